"""Read CSV and Parquet files as tables whose columns have distinct names and whose rows are complete."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import polars as pl

from mtl.checks import InputError, first_line, require
from mtl.types import ROW

from ..files.reading import MEMORY, SUFFIXES, files_of, is_several, quote, read_bytes, read_gzip, regular_size
from .columns import FILE
from .parquet import SUFFIX, ParquetRows, as_read, check_alike, check_names

ROWS = 1 << 16  # rows of a block
CELL = 16  # bytes of memory that it takes at least to read a cell of a Parquet file
NULL_VALUES = ("", "NA", "NaN", "nan", "null", "None")  # texts that count as empty cells, by default
SEPARATORS = (",", ";", "\t", "|")  # that are recognised


def read_table(path: Path, separator: str | None, null_values: Sequence[str], option: str = "") -> pl.DataFrame:
    """Return the rows of a CSV file (every cell is text or null) or of a Parquet file (typed), numbered in ``ROW``.

    ``option`` is the option that names the file in messages. Raises InputError if the file is missing, empty,
    unreadable or of another format, if two columns have one name, or if a row has more or fewer cells than there
    are columns.
    """
    size = regular_size(path, option)
    require(path.name.endswith(SUFFIXES), f"{path}: accepted formats are {', '.join(SUFFIXES)}")
    require(size > 0, f"{path} is empty")
    if path.suffix == SUFFIX:
        rows = ParquetRows.of(path, option)
        count, width = sum(rows.counts), len(rows.schema)  # a small file may repeat a value 10^9 times
        require(
            count * width * CELL <= MEMORY,
            f"{path} has {count:,} rows of {width} columns, which do not fit into memory: use data=table_stream",
        )
        frames = [frame for frame, _ in rows.frames(list(rows.schema), ROWS)]
        require(bool(frames), f"{path} has a header but no rows")
        return pl.concat(frames, rechunk=True)
    return _text(path, separator, null_values).with_row_index(ROW, offset=1)


def checked_rows(frame: pl.DataFrame, where: Path) -> pl.DataFrame:
    """Return typed rows, numbered in ``ROW``, with NaN as empty cells. Raises InputError for wrong names or no rows."""
    check_names(frame.columns, where)
    require(len(frame) > 0, f"{where} has {'columns' if frame.width else 'no columns and'} but no rows")
    return as_read(frame).with_row_index(ROW, offset=1)


def read_tables(path: Path, separator: str | None, null_values: Sequence[str], option: str) -> pl.DataFrame:
    """Return the rows of a file, or of all files of a folder or a pattern, one after the other; see ``files_of``.

    If there are several files, the column ``FILE`` names the file of each row, and ``ROW`` numbers the rows of each
    file. Raises InputError as ``read_table`` does, and if the files have different columns.
    """
    files = files_of(path, option)
    if not is_several(path):
        return read_table(path, separator, null_values, option)
    frames = {file: read_table(file, separator, null_values, option) for file in files}
    check_alike({file: frame.schema for file, frame in frames.items()}, f"{option}={path}")
    names, first = pl.Enum(list(map(str, files))), frames[files[0]].columns
    named = [frame.select(first).with_columns(pl.lit(str(f), dtype=names).alias(FILE)) for f, frame in frames.items()]
    return pl.concat(named, how="vertical_relaxed", rechunk=True)


def read_blocks(path: Path, separator: str | None, null_values: Sequence[str]) -> Iterator[tuple[pl.DataFrame, float]]:
    """Yield the rows of ``read_table`` in blocks, with the share of the file read so far. Raises InputError as it does.

    In memory are a block of a Parquet file, or all rows of a text file.
    """
    if path.suffix == SUFFIX:
        rows = ParquetRows.of(path, "")
        for block in rows.blocks(ROWS):
            yield rows.read(block, list(rows.schema)), (block.start + block.count) / sum(rows.counts)
    else:
        frame = read_table(path, separator, null_values)
        for start in range(0, len(frame), ROWS):
            yield frame[start : start + ROWS], min(1.0, (start + ROWS) / len(frame))


def _text(path: Path, given: str | None, null_values: Sequence[str]) -> pl.DataFrame:
    """Return the rows of a text file.

    The cells of each row are counted, since polars fills short rows with nulls without an error.
    """
    raw = read_gzip(path) if path.suffix == ".gz" else read_bytes(path)
    try:
        text = raw.decode("utf-8-sig").rstrip("\r\n")  # empty lines at the end are not rows
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}, line {line}: {error.reason}; save the table as CSV in UTF-8") from None
    require(bool(text.strip()), f"{path} is empty")
    bare = re.sub(r'"[^"]*"', "", text) if '"' in text else text
    rows = pl.Series([bare]).str.split("\n").explode()
    separator = "\t" if path.suffix == ".tsv" else given or max(SEPARATORS, key=rows[0].count)
    cells = rows.str.count_matches(separator, literal=True) + 1
    uneven = (cells != cells[0]).arg_true()
    if len(uneven):
        raise InputError(
            f"{path}, row {uneven[0]} has {cells[uneven[0]]} cells, but the first line names {cells[0]} columns "
            f"(separated by {separator!r}): correct the row, and put cells that contain {separator!r} in double quotes"
        )
    require(len(rows) > 1, f"{path} has a header but no rows")
    read = partial(pl.read_csv, text.encode(), separator=separator, infer_schema=False)
    try:
        names = [name or "" for name in read(has_header=False, n_rows=1).row(0)]
        frame = read(null_values=list(null_values))
    except (Exception, pl.exceptions.PanicException) as error:
        raise InputError(f"cannot read {path}: {quote(first_line(error), 200)}") from None
    check_names(names, path)
    frame.columns = names  # polars adds suffixes to equal names
    return frame
