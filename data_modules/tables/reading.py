"""Read CSV and Parquet files as tables whose columns have distinct names and whose rows are complete."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import polars as pl

from mtl.checks import InputError, first_line, require
from mtl.types import ROW

from ..files.memory import machine_memory
from ..files.reading import quote, read_bytes, read_gzip, regular_size
from ..files.several import SUFFIXES, files_of, is_several
from .columns import FILE
from .parquet import SUFFIX, ParquetRows, as_read, check_alike, check_names

ROWS = 1 << 16  # rows of a block
NULL_VALUES = ("", "NA", "NaN", "nan", "null", "None")  # texts that count as empty cells, by default
SEPARATORS = (",", ";", "\t", "|")  # that are recognised
BOM = codecs.BOM_UTF8


def read_table(
    path: Path, separator: str | None, null_values: Sequence[str], option: str = "data.path"
) -> pl.DataFrame:
    """Return the rows of a CSV file (every cell is text or null) or of a Parquet file (typed), numbered in ``ROW``.

    ``option`` is the option that names the file in messages. Raises InputError if the file is missing, empty,
    unreadable or of another format, if two columns have one name, or if a line has more or fewer cells than the first.
    """
    size, memory = regular_size(path, option), machine_memory()
    require(path.name.endswith(SUFFIXES), f"{path}: accepted formats are {', '.join(SUFFIXES)}")
    require(size > 0, f"{path} is empty")
    require(memory is None or size < memory, f"{path} does not fit into memory: convert it to Parquet files")
    if path.suffix == SUFFIX:
        rows = ParquetRows.of(path, option)
        frames = [frame for frame, _ in rows.frames(list(rows.schema), ROWS)]
        require(bool(frames), f"{path} has a header but no rows")
        return pl.concat(frames, rechunk=True)
    return _text(path, separator, null_values).with_row_index(ROW, offset=1)


def checked_rows(frame: pl.DataFrame, where: Path) -> pl.DataFrame:
    """Return typed rows, numbered in ``ROW``, with NaN as empty cells. Raises InputError for wrong names or no rows."""
    check_names(frame.columns, where)
    require(len(frame) > 0, f"{where} has {'columns' if frame.width else 'no columns and'} but no rows")
    return as_read(frame).with_row_index(ROW, offset=1)


def read_tables(
    path: Path, separator: str | None, null_values: Sequence[str], option: str = "data.path"
) -> pl.DataFrame:
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


def read_blocks(
    path: Path, separator: str | None, null_values: Sequence[str], option: str = ""
) -> Iterator[tuple[pl.DataFrame, float]]:
    """Yield the rows of ``read_table`` in blocks, with the share of the file read so far. Raises InputError as it does.

    In memory are a block of a Parquet file, or all rows of a text file.
    """
    if path.suffix == SUFFIX:
        rows = ParquetRows.of(path, option)
        for block in rows.blocks(ROWS):
            yield rows.read(block, list(rows.schema)), (block.start + block.count) / sum(rows.counts)
    else:
        frame = read_table(path, separator, null_values, option)
        for start in range(0, len(frame), ROWS):
            yield frame[start : start + ROWS], min(1.0, (start + ROWS) / len(frame))


def _text(path: Path, given: str | None, null_values: Sequence[str]) -> pl.DataFrame:
    """Return the rows of a text file.

    polars refuses a line that is too long, but silently fills one that is too short. Therefore the cells are counted:
    in text without quotes the separators of all lines together, otherwise line by line. The line of a mistake is
    searched for only if there is one.
    """
    raw = read_gzip(path) if path.suffix == ".gz" else read_bytes(path)
    raw = raw.removeprefix(BOM).rstrip(b"\r\n")  # empty lines at the end are not rows
    first = raw.partition(b"\n")[0]
    require(bool(first.strip()), f"{path} is empty")
    if b"\r" in first.rstrip(b"\r") and first == raw:
        _decoded(raw, path)
        raise InputError(f"{path}: its lines end with carriage returns; save it with line feeds at the ends")
    separator = "\t" if path.suffix == ".tsv" else given or _recognised(first)
    mark = separator.encode()
    even = raw.count(mark) == first.count(mark) * (raw.count(b"\n") + 1)
    names = first.decode(errors="replace").rstrip("\r").split(separator)
    if not even or b'"' in raw or b"\0" in raw or "\ufffd" in first.decode(errors="replace"):
        names = _check_cells(raw, path, separator)
    check_names(names, path)
    try:
        frame = pl.read_csv(raw, separator=separator, infer_schema=False, null_values=list(null_values))
    except (Exception, pl.exceptions.PanicException) as error:
        _check_cells(raw, path, separator)
        raise InputError(f"cannot read {path}: {quote(first_line(error), 200)}") from None
    require(len(frame) > 0, f"{path} has a header but no rows")
    require(
        len(frame.columns) == len(names),
        f"{path}: its first line has {len(names)} or {len(frame.columns)} cells, depending on how its quotes are read",
    )
    frame.columns = names  # polars keeps doubled quotes in names
    return frame


def _recognised(header: bytes) -> str:
    """Return the separator that occurs most often in the first line of a file, outside quotes."""
    bare = b"".join(header.split(b'"')[::2])
    return max(SEPARATORS, key=lambda separator: bare.count(separator.encode()))


def _check_cells(raw: bytes, path: Path, separator: str) -> list[str]:
    """Return the names of the columns. Raises InputError, which names the first line with a wrong number of cells."""
    text = _decoded(raw, path)
    limit = csv.field_size_limit(len(raw) + 1)  # a setting of the whole process, put back below
    lines = csv.reader(io.StringIO(text, newline="\n"), delimiter=separator, strict=True)
    try:
        names = next(lines)
        check_names(names, path)
        begin = lines.line_num + 1
        for cells in lines:
            count = len(cells) or 1  # an empty line has one empty cell
            if count != len(names):
                raise InputError(
                    f"{path}, line {begin} has {count} cells, but the first line names {len(names)} "
                    f"columns (separated by {separator!r}): correct the line, and put cells that contain {separator!r} "
                    "in double quotes"
                )
            begin = lines.line_num + 1
    except csv.Error as error:
        raise InputError(
            f"{path}, line {lines.line_num}: {error}; put cells that contain separators or double "
            "quotes in double quotes, and double the quotes inside"
        ) from None
    finally:
        csv.field_size_limit(limit)
    return names


def _decoded(raw: bytes, path: Path) -> str:
    """Return UTF-8 text without NUL bytes; raise InputError, which names the line of the first other byte."""
    try:
        text, bad = raw.decode(), [raw.find(b"\0")]
    except UnicodeDecodeError as error:
        text, bad = "", [error.start, raw.find(b"\0")]
    if wrong := [index for index in bad if index >= 0]:
        index = min(wrong)
        line = raw.count(b"\n", 0, index) + 1
        raise InputError(
            f"{path}, line {line}: the byte {raw[index]:#04x} does not occur in UTF-8 text; save the table as CSV in "
            "UTF-8"
        )
    return text
