"""Read CSV and Parquet files as tables whose columns have distinct names and whose rows are complete."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import polars as pl

from mtl.checks import InputError, first_line, require
from mtl.types import ROW

from ..files.memory import machine_memory
from ..files.reading import quote, regular_size
from ..files.several import SUFFIXES, files_of, is_several
from .columns import FILE
from .parquet import SUFFIX, ParquetRows, as_read, check_alike, check_names

BYTES = 1 << 23  # bytes of a text file in a block
ROWS = 1 << 16  # rows of a Parquet file in a block
NULL_VALUES = ("", "NA", "NaN", "nan", "null", "None")  # texts that count as empty cells, by default
SEPARATORS = (",", ";", "\t", "|")  # that are recognised
QUOTE, LINE_FEED, BOM = ord('"'), ord("\n"), codecs.BOM_UTF8


def read_table(
    path: Path, separator: str | None, null_values: Sequence[str], option: str = "data.path"
) -> pl.DataFrame:
    """Return the rows of a CSV file (every cell is text or null) or of a Parquet file (typed), numbered in ``ROW``.

    ``option`` is the option that names the file in messages. Raises InputError if the file is missing, empty,
    unreadable or of another format, if two columns have one name, or if a line has more or fewer cells than the first.
    """
    frames, size, memory = list[pl.DataFrame](), 0, machine_memory()
    for frame, _ in read_blocks(path, separator, null_values, option):
        frames.append(frame)
        size += frame.estimated_size()
        require(memory is None or size <= memory, f"the rows of {path} do not fit into memory: see data=table_stream")
    return pl.concat(frames, rechunk=True)


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
    """Yield the rows of a file in blocks like the result of ``read_table``, with the share of the file read so far.

    The column ``ROW`` numbers the rows of the whole file. Raises InputError as ``read_table`` does, at the block with
    the mistake.
    """
    check_file(path, option)
    done = 0
    if path.suffix == SUFFIX:
        rows = ParquetRows.of(path, option)
        for block in rows.blocks(ROWS):
            done = block.start + block.count
            yield rows.read(block, list(rows.schema)), done / sum(rows.counts)
    else:
        for frame, share in _text(path, separator, null_values):
            yield frame.with_row_index(ROW, offset=1 + done), share
            done += len(frame)
    require(done > 0, f"{path} has a header but no rows")


def check_file(path: Path, option: str) -> None:
    """Raise InputError unless ``path`` is a regular, nonempty file of a known format."""
    size = regular_size(path, option)
    require(path.name.endswith(SUFFIXES), f"{path}: accepted formats are {', '.join(SUFFIXES)}")
    require(size > 0, f"{path} is empty")


def _text(path: Path, given: str | None, null_values: Sequence[str]) -> Iterator[tuple[pl.DataFrame, float]]:
    separator = "\t" if path.suffix == ".tsv" else given or ","
    header, lines = b"", 0  # the first line, and the number of lines behind it that are read
    for raw, share in _rows(path):
        if not header:
            header, _, raw = raw.removeprefix(BOM).partition(b"\n")
            if b"\r" in header.rstrip(b"\r") and not raw:
                _decoded(header, path)
                raise InputError(f"{path}: its lines end with carriage returns; save it with line feeds at the ends")
            if given is None and path.suffix != ".tsv":
                separator = _recognised(header)
        if raw:
            yield _parsed(header + b"\n" + raw, path, separator, null_values, lines), share
            lines += raw.count(b"\n") + 1
    require(bool(header.strip()), f"{path} is empty")
    if not lines:
        _check_cells(header, path, separator, 0)


def _recognised(header: bytes) -> str:
    """Return the separator that occurs most often in the first line of a file, outside quotes."""
    bare = b"".join(header.split(b'"')[::2])
    return max(SEPARATORS, key=lambda separator: bare.count(separator.encode()))


def _rows(path: Path) -> Iterator[tuple[bytes, float]]:
    """Yield the bytes of whole rows, without the last line feed, and the share of the file that is read."""
    size = regular_size(path)
    try:
        with open(path, "rb") as file:
            stream: IO[bytes] = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            rest, wanted = b"", BYTES
            while chunk := stream.read(wanted):
                rest += chunk
                end = _end_of_rows(rest)
                if end == 0:  # a row longer than a block
                    wanted = len(rest)
                    continue
                rows, wanted = rest[:end].rstrip(b"\r\n"), BYTES
                if not rows:
                    continue
                # Empty lines at the end of a file are not rows; the next bytes tell whether these are at the end
                feed = rest.index(b"\n", len(rows)) + 1
                rest = rest[feed:]
                yield rows, file.tell() / size
            if rest := rest.rstrip(b"\r\n"):
                yield rest, 1.0
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise InputError(f"{path} is damaged or not a gzip file ({error})") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None


def _end_of_rows(buffer: bytes) -> int:
    """Return the end of the last complete row, after a line feed outside quotes; 0 if there is none."""
    if b'"' not in buffer:
        return buffer.rfind(b"\n") + 1
    symbols = np.frombuffer(buffer, np.uint8)
    inside = np.logical_xor.accumulate(symbols == QUOTE)
    ends = np.flatnonzero((symbols == LINE_FEED) & ~inside)
    return int(ends[-1]) + 1 if len(ends) else 0


def _parsed(raw: bytes, path: Path, separator: str, null_values: Sequence[str], skipped: int) -> pl.DataFrame:
    """Return the rows of the text ``raw``, which begins with the names of the columns and ends without a line feed.

    polars refuses a line that is too long, but silently fills one that is too short. Therefore the cells are counted:
    in text without quotes the separators of all lines together, otherwise line by line. The line of a mistake is
    searched for only if there is one. ``skipped``: see ``_check_cells``.
    """
    first, mark = raw.partition(b"\n")[0], separator.encode()
    even = raw.count(mark) == first.count(mark) * (raw.count(b"\n") + 1)
    names = first.decode(errors="replace").rstrip("\r").split(separator)
    if not even or b'"' in raw or b"\0" in raw or "\ufffd" in first.decode(errors="replace"):
        names = _check_cells(raw, path, separator, skipped)
    check_names(names, path)
    try:
        frame = pl.read_csv(raw, separator=separator, infer_schema=False, null_values=list(null_values))
    except (Exception, pl.exceptions.PanicException) as error:
        _check_cells(raw, path, separator, skipped)
        raise InputError(f"cannot read {path}: {quote(first_line(error), 200)}") from None
    require(
        len(frame.columns) == len(names),
        f"{path}: its first line has {len(names)} or {len(frame.columns)} cells, depending on how its quotes are read",
    )
    frame.columns = names  # polars keeps doubled quotes in names
    return frame


def _check_cells(raw: bytes, path: Path, separator: str, skipped: int) -> list[str]:
    """Return the names of the columns. Raises InputError, which names the first line with a wrong number of cells.

    ``skipped``: the number of lines of the file between the first line and the others of ``raw``, for messages.
    """
    text = _decoded(raw, path, skipped)
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
                    f"{path}, line {_in_file(begin, skipped)} has {count} cells, but the first line names {len(names)} "
                    f"columns (separated by {separator!r}): correct the line, and put cells that contain {separator!r} "
                    "in double quotes"
                )
            begin = lines.line_num + 1
    except csv.Error as error:
        raise InputError(
            f"{path}, line {_in_file(lines.line_num, skipped)}: {error}; put cells that contain separators or double "
            "quotes in double quotes, and double the quotes inside"
        ) from None
    finally:
        csv.field_size_limit(limit)
    return names


def _decoded(raw: bytes, path: Path, skipped: int = 0) -> str:
    """Return UTF-8 text without NUL bytes; raise InputError, which names the line of the first other byte."""
    try:
        text, bad = raw.decode(), [raw.find(b"\0")]
    except UnicodeDecodeError as error:
        text, bad = "", [error.start, raw.find(b"\0")]
    if wrong := [index for index in bad if index >= 0]:
        index = min(wrong)
        line = _in_file(raw.count(b"\n", 0, index) + 1, skipped)
        raise InputError(
            f"{path}, line {line}: the byte {raw[index]:#04x} does not occur in UTF-8 text; save the table as CSV in "
            "UTF-8"
        )
    return text


def _in_file(line: int, skipped: int) -> int:
    """Convert the number of a line in a block, which repeats the header, to its number in the file."""
    return line + skipped if line > 1 else line
