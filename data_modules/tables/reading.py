"""Read a CSV or Parquet file as a table whose columns have distinct names and whose rows are complete."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from mtl.checks import InputError, require
from mtl.types import ROW

from ..files.reading import quote, read_bytes, read_gzip, regular_size
from ..files.several import SUFFIXES, files_of, is_several
from ..options import CONTROL, machine_memory, shown
from .columns import FILE

LISTED = 10  # differences, and columns of each, that a message lists
BLOCK = 1 << 24  # bytes examined at a time
LINE_FEED, BOM = ord("\n"), codecs.BOM_UTF8


def read_table(path: Path, separator: str, null_values: Sequence[str], option: str = "data.path") -> pl.DataFrame:
    """Return the rows of a CSV file (every cell is text or null) or of a Parquet file (typed), numbered in ``ROW``.

    ``option`` is the option that names the file in messages. Raises InputError if the file is missing, empty,
    unreadable or of another format, if two columns have one name, or if a line has more or fewer cells than the first.
    """
    check_file(path, option)
    if path.suffix == ".parquet":
        frame = _read_parquet(path)
    else:
        frame = _read_csv(path, "\t" if path.suffix == ".tsv" else separator, null_values)
    require(len(frame) > 0, f"{path} has a header but no rows")
    return frame.with_row_index(ROW, offset=1)


def read_tables(path: Path, separator: str, null_values: Sequence[str], option: str = "data.path") -> pl.DataFrame:
    """Return the rows of a file, or of all files of a folder or a pattern, one after the other; see ``files_of``.

    Of several files, the column ``FILE`` says which one a row is from, and ``ROW`` numbers the rows of each. Raises
    InputError as ``read_table`` does, and if the files have different columns.
    """
    files = files_of(path, option)
    if not is_several(path):
        return read_table(path, separator, null_values, option)
    frames = [read_table(file, separator, null_values, option) for file in files]
    first = frames[0]
    differences = [
        f"{file.name} {difference}"
        for file, frame in zip(files, frames, strict=True)
        for difference in differs(frame, first)
    ]
    require(
        not differences,
        f"{option}={path}: its files differ: compared with {files[0].name}, {'; '.join(differences[:LISTED])}"
        f"{', ...' if len(differences) > LISTED else ''}",
    )
    names = pl.Enum(list(map(str, files)))
    named = [
        frame.select(first.columns).with_columns(pl.lit(str(file), dtype=names).alias(FILE))
        for file, frame in zip(files, frames, strict=True)
    ]
    return pl.concat(named, how="vertical_relaxed", rechunk=True)


def differs(frame: pl.DataFrame, first: pl.DataFrame) -> Iterator[str]:
    """Yield what is different about the columns of ``frame``; numbers of different types fit together."""
    lacks, more = ([name for name in a.columns if name not in b.columns] for a, b in ((first, frame), (frame, first)))
    if lacks:
        yield f"lacks {', '.join(map(shown, lacks[:LISTED]))}"
    if more:
        yield f"also has {', '.join(map(shown, more[:LISTED]))}"
    for name, kind in frame.select(name for name in first.columns if name not in lacks).schema.items():
        before = first[name].dtype
        if kind != before and pl.Null not in (kind, before) and not (kind.is_numeric() and before.is_numeric()):
            yield f"has {kind} in column {shown(name)}, not {before}"


def check_file(path: Path, option: str) -> None:
    """Raise InputError unless ``path`` is a regular file of a format that is read, and not empty."""
    size = regular_size(path, option)
    require(path.name.endswith(SUFFIXES), f"{path}: accepted formats are {', '.join(SUFFIXES)}")
    require(size > 0, f"{path} is empty")


def _read_parquet(path: Path) -> pl.DataFrame:
    try:
        with open(path, "rb") as file:  # polars would take the path for a pattern
            frame = pl.read_parquet(file)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except (Exception, pl.exceptions.PanicException) as error:  # on damaged bytes polars can raise almost anything
        raise unreadable_parquet(path, error) from None
    check_names(frame.columns, path)
    return as_read(frame)


def unreadable_parquet(path: Path, error: BaseException) -> InputError:
    """Return the error for a Parquet file that polars cannot read."""
    return InputError(
        f"cannot read {path}: {first_line(error)}; it is damaged, not a Parquet file, or has columns of one name"
    )


def as_read(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of a Parquet file with NaN as empty cells."""
    return frame.with_columns(pl.selectors.float().fill_nan(None))


def _read_csv(path: Path, separator: str, null_values: Sequence[str]) -> pl.DataFrame:
    raw = read_gzip(path, machine_memory()) if path.suffix == ".gz" else read_bytes(path, machine_memory())
    raw = raw.removeprefix(BOM).rstrip(b"\r\n")
    require(len(raw) > 0, f"{path} is empty")
    return parse_text(raw, path, separator, null_values)


def parse_text(raw: bytes, path: Path, separator: str, null_values: Sequence[str], skipped: int = 0) -> pl.DataFrame:
    """Return the rows of the text ``raw``, which begins with the names of the columns and ends without a line feed.

    ``skipped``: the number of lines of the file at ``path`` between the first line and the others, for messages.
    Raises InputError.
    """
    _check_text(raw, path, skipped)
    carriage = b"\r" in raw and b"\n" not in raw
    require(not carriage, f"{path}: its lines end with carriage returns; save it with line feeds at the ends")
    names = _check_cells(raw, separator, path, skipped)
    require(b"\n" in raw, f"{path} has a header but no rows")
    try:
        frame = pl.read_csv(raw, separator=separator, infer_schema=False, null_values=list(null_values))
    except (Exception, pl.exceptions.PanicException) as error:
        raise InputError(f"cannot read {path}: {first_line(error)}") from None
    require(
        len(frame.columns) == len(names),
        f"{path}: its first line has {len(names)} or {len(frame.columns)} cells, depending on how its quotes are read",
    )
    frame.columns = names  # polars keeps doubled quotes in names
    return frame


def _in_file(line: int, skipped: int) -> int:
    """Return the number in the file of a line of ``raw``."""
    return line + skipped if line > 1 else line


def _check_text(raw: bytes, path: Path, skipped: int) -> None:
    """Raise InputError, which names the line, unless ``raw`` is UTF-8 text without NUL bytes."""
    bad = [index for index in (raw.find(b"\0"), _first_invalid(raw)) if index >= 0]
    if bad:
        index = min(bad)
        line = _in_file(raw.count(b"\n", 0, index) + 1, skipped)
        raise InputError(
            f"{path}, line {line}: the byte {raw[index]:#04x} does not occur in UTF-8 text; save the table as CSV in "
            "UTF-8"
        )


def _first_invalid(raw: bytes) -> int:
    """Return the index of the first byte that is not UTF-8, or -1."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(raw), BLOCK):  # in blocks: the text of a large file would take memory
        pending = len(decoder.getstate()[0])  # bytes of a character that the block before has begun
        try:
            decoder.decode(raw[start : start + BLOCK], final=start + BLOCK >= len(raw))
        except UnicodeDecodeError as error:
            return start - pending + error.start
    return -1


def _check_cells(raw: bytes, separator: str, path: Path, skipped: int) -> list[str]:
    """Return the names of the columns; raise InputError, which names the first line with more or fewer cells."""
    text = io.TextIOWrapper(io.BytesIO(raw), "utf-8", newline="\n")
    limit = csv.field_size_limit(len(raw) + 1)  # a setting of the whole process, put back below
    lines = csv.reader(text, delimiter=separator, strict=True)
    try:
        names = next(lines)
        check_names(names, path)
        counts = _quoted(lines) if b'"' in raw else _unquoted(raw, separator)
        for line, cells in counts:
            if cells != len(names):
                raise InputError(
                    f"{path}, line {_in_file(line, skipped)} has {cells} cells, but the first line names {len(names)} "
                    f"columns (separated by {separator!r}): correct the line, and put cells that contain {separator!r} "
                    "in double quotes"
                )
    except csv.Error as error:
        raise InputError(
            f"{path}, line {_in_file(lines.line_num, skipped)}: {error}; put cells that contain separators or double "
            "quotes in double quotes, and double the quotes inside"
        ) from None
    finally:
        csv.field_size_limit(limit)
    return names


def _quoted(lines: Any) -> Iterator[tuple[int, int]]:
    """Yield the first line and the number of cells of each row that the ``csv.reader`` has left."""
    begin = lines.line_num + 1
    for cells in lines:
        yield begin, len(cells) or 1  # an empty line has one empty cell
        begin = lines.line_num + 1


def _unquoted(raw: bytes, separator: str) -> Iterator[tuple[int, int]]:
    """Yield the number and the cells of a line of text without quotes, whenever the cells are not as many as before.

    A line has one cell more than it has separators. They are counted for many lines at once.
    """
    symbols, start, line, last = np.frombuffer(raw, np.uint8), 0, 1, -1
    while start < len(raw):
        end = raw.find(b"\n", start + BLOCK) + 1 or len(raw)
        block = symbols[start:end]
        ends = np.flatnonzero(block == LINE_FEED)
        if end == len(raw):  # the last line has no line feed
            ends = np.append(ends, len(block))
        separators = np.flatnonzero(block == ord(separator))
        cells = np.diff(np.searchsorted(separators, ends), prepend=0) + 1  # [lines of the block]
        for index in np.flatnonzero(np.diff(cells, prepend=last)):
            yield line + int(index), int(cells[index])
        start, line, last = end, line + len(ends), int(cells[-1])


def check_names(names: Sequence[str], path: Path) -> None:
    """Raise InputError if a name is empty or contains control characters, or if several columns have one name."""
    seen: dict[str, int] = {}
    for column, name in enumerate((name.strip() for name in names), start=1):
        require(bool(name), f"{path}: column {column} of {len(names)} has no name: give it one")
        require(
            not CONTROL.search(name),
            f"{path}: the name of column {column}, {quote(name)}, contains line breaks or control characters: rename "
            "it, and end lines by a line feed",
        )
        if name in seen:
            raise InputError(
                f"{path}: columns {seen[name]} and {column} are both called {quote(name)}: give each a name of its own"
            )
        seen[name] = column


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, in quotes and shortened."""
    return quote((str(error).splitlines() or [type(error).__name__])[0], 200)
