"""Read the rows of a table block by block, from CSV or Parquet files or from a DataFrame in memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import polars as pl

from mtl.checks import InputError, first_line, format_value, require
from mtl.files.cloud import CloudPath, path_of
from mtl.files.literals import CONTROL
from mtl.types import ROW

from ..files.cache import versions
from ..files.cloud import scan
from ..files.reading import MEMORY, SUFFIXES, files_of, parsing, quote, read_bytes, read_gzip, regular_size
from .cells import FILE
from .options import NULL_VALUES

PARQUET = ".parquet"
ROWS = 1 << 16  # rows of a block
# Bytes of memory that it takes to read and encode a row of a Parquet file: of its numbers and split, and of each cell
NUMBERED, CELL = 64, 32
SEPARATORS = (",", ";", "\t", "|")  # that are recognised
LISTED = 10  # differences in a message


@dataclass(frozen=True)
class Block:
    """``count`` rows of a file from row ``start``, counted from 0; ``first`` is the number of this row in all files."""

    file: str
    start: int
    count: int
    first: int


@dataclass(frozen=True)
class RowSource:
    """The rows of one or several files with the same columns, one file after the other, or of a DataFrame.

    ``tables``: the rows of each file by its name in messages. ``from_text``: whether they were text files, whose cells
    are all texts or null. ``stamps``: size and time of each file that is read anew for each block; () in the cloud.
    ``here`` names all files in messages. Numbers may differ in type between files: all have the type that holds each of
    them. ``origin``: columns of the tables that name the file and the number of each row, if one table has the rows of
    several files.
    """

    here: str
    tables: Mapping[str, pl.LazyFrame]
    from_text: bool
    stamps: Mapping[str, Sequence[int]] = field(default_factory=dict)
    origin: Sequence[str] = ()

    @staticmethod
    def open(
        path: Path, option: str = "", separator: str | None = None, null_values: Sequence[str] = NULL_VALUES
    ) -> RowSource:
        """Return the rows of a file, or of all files of a folder or a pattern; see ``files_of``.

        Text files are read as a whole; of Parquet files, only the blocks that are asked for. ``separator``: of text
        files; None: the one that their first line has most. Cells that equal one of ``null_values`` are empty.
        ``option`` names the path in messages. Raises InputError if a file is missing, empty, unreadable or of another
        format, if a column has no name or the name of another one, or if a row has more or fewer cells than there are
        columns.
        """
        files, here = files_of(path, option), f"{option}={path}" if option else str(path)
        for file in files:
            require(file.name.endswith(SUFFIXES), f"{file}: accepted formats are {', '.join(SUFFIXES)}")
            require(regular_size(file) > 0, f"{file} is empty")
        if files[0].suffix != PARQUET:
            texts = {str(file): read_text(file, separator, null_values).lazy() for file in files}
            return RowSource(here, texts, from_text=True)
        stamps = {str(file): () if isinstance(file, CloudPath) else versions(file) for file in files}
        return RowSource(here, {str(file): scan(file, glob=False) for file in files}, from_text=False, stamps=stamps)

    @staticmethod
    def one_file(path: Path, option: str = "", **reading: Any) -> RowSource:
        """Return the rows of a single file, as ``open`` does."""
        regular_size(path, option)
        return RowSource.open(path, option, **reading)

    @staticmethod
    def of_frame(frame: pl.DataFrame, where: str) -> RowSource:
        """Return the rows of a DataFrame; ``where`` names it in messages. Raises InputError for one without rows."""
        require(frame.width > 0, f"{where} has no columns")
        require(len(frame) > 0, f"{where} has no rows")
        return RowSource(where, {where: frame.lazy()}, from_text=False)

    @cached_property
    def counts(self) -> list[int]:
        """The number of rows of each file; of a Parquet file, from its footer. Raises InputError."""
        return [self._collect(file, lambda rows: rows.select(pl.len())).item() for file in self.tables]

    @property
    def count(self) -> int:
        """The number of rows of all files."""
        return sum(self.counts)

    @cached_property
    def schema(self) -> Mapping[str, pl.DataType]:
        """The columns, in the order of the first file, and their types; InputError unless all files agree."""
        empty = {file: self._collect(file, lambda rows: rows.head(0).drop(self.origin)) for file in self.tables}
        for file, frame in empty.items():
            check_names(frame.columns, file)
        first, *others = empty.values()
        check_alike({file: frame.schema for file, frame in empty.items()}, self.here)
        return pl.concat([first, *(other.select(first.columns) for other in others)], how="vertical_relaxed").schema

    @property
    def columns(self) -> list[str]:
        return list(self.schema)

    def blocks(self, rows: int | None) -> list[Block]:
        """Return the rows of all files in blocks of at most ``rows``, in order. A block lies in one file; None: is one.

        A file without rows has no block.
        """
        found, first = list[Block](), 0
        for file, count in zip(self.tables, self.counts, strict=True):
            for start in range(0, count, rows or max(count, 1)):
                found.append(Block(file, start, min(rows or count, count - start), first + start))
            first += count
        return found

    def read(self, block: Block, columns: Sequence[str]) -> pl.DataFrame:
        """Return ``columns``, each once, of the rows of a block, numbered in ``ROW`` as in their file; NaN is null.

        Raises InputError, also if the file has changed since it was opened.
        """
        stamp = self.stamps.get(block.file)
        require(
            not stamp or (Path(block.file).exists() and versions(Path(block.file)) == stamp),
            f"{block.file} was changed, replaced or deleted while it was being read; it must stay as it is until the "
            "run ends",
        )
        types: dict[Any, pl.DataType] = {name: self.schema[name] for name in columns}
        wanted = [*types, *self.origin]
        frame = self._collect(block.file, lambda rows: rows.slice(block.start, block.count).select(wanted))
        frame = frame.cast(types).with_columns(pl.selectors.float().fill_nan(None))
        return frame if self.origin else frame.with_row_index(ROW, offset=1 + block.start)

    def frames(self, columns: Sequence[str]) -> Iterator[tuple[pl.DataFrame, str]]:
        """Yield ``columns`` of all rows in blocks, each with the name of its file."""
        for block in self.blocks(ROWS):
            yield self.read(block, columns), block.file

    def with_progress(self) -> Iterator[tuple[pl.DataFrame, float]]:
        """Yield all columns of all rows in blocks, each with the share of the rows read so far."""
        for block in self.blocks(ROWS):
            yield self.read(block, self.columns), (block.first + block.count) / self.count

    def loaded(self) -> RowSource:
        """Return the same rows in memory. Raises InputError if there are none, or too many."""
        count, width = self.count, len(self.schema)  # a small file may repeat a value 10^9 times
        require(count > 0, f"{self.here} has a header but no rows")
        fits = not self.stamps or count * (NUMBERED + width * CELL) <= MEMORY
        wide = f"{count:,} rows of {width} columns, which do not fit into memory"
        require(fits, f"{self.here} has {wide}: use data.window_rows=1048576")
        parts = [(block.file, self.read(block, self.columns)) for block in self.blocks(None)]
        if len(parts) == 1:
            [(file, frame)] = parts
            return RowSource(self.here, {file: frame.drop(ROW).lazy()}, self.from_text)
        files = pl.Enum([file for file, _ in parts])  # one table, since a small block takes as long as a large one
        named = [frame.with_columns(pl.lit(file, dtype=files).alias(FILE)) for file, frame in parts]
        merged = {self.here: pl.concat(named, rechunk=True).lazy()}
        return RowSource(self.here, merged, self.from_text, origin=(ROW, FILE))

    def whole(self) -> pl.DataFrame:
        """Return all rows."""
        return pl.concat([self.read(block, self.columns) for block in self.loaded().blocks(None)])

    def _collect(self, file: str, query: Any) -> pl.DataFrame:
        if file not in self.stamps:
            frame: pl.DataFrame = query(self.tables[file]).collect()
            return frame
        with parsing(path_of(file), "It must be a Parquet file, with a name of its own for each column"):
            frame = query(self.tables[file]).collect()
        return frame


def read_text(path: Path, given: str | None, null_values: Sequence[str]) -> pl.DataFrame:
    """Return the rows of a text file, each cell a text or null. Raises InputError; see ``RowSource.open``.

    The cells of each row are counted, since polars fills short rows with nulls without an error.
    """
    if isinstance(path, CloudPath):
        with parsing(path):
            raw = "\n".join(scan(path, glob=False).collect()["line"]).encode()
    else:
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
    check_names(names, str(path))
    frame.columns = names  # polars adds suffixes to equal names
    return frame


def check_alike(schemas: Mapping[str, Mapping[str, pl.DataType]], here: str) -> None:
    """Raise InputError unless all files have the columns of the first one, of the same type or also numbers.

    ``here`` names the files in the message.
    """

    def fits(one: pl.DataType | None, other: pl.DataType | None) -> bool:
        if one is None or other is None:
            return one == other
        return one == other or pl.Null in (one, other) or (one.is_numeric() and other.is_numeric())

    (first, expected), *others = schemas.items()
    for file, schema in others:
        pairs = {name: (expected.get(name), schema.get(name)) for name in (*expected, *schema)}
        odd = [
            f"{format_value(name)} ({one} and {other})" for name, (one, other) in pairs.items() if not fits(one, other)
        ]
        two = f"{Path(first).name} and {Path(file).name}"
        require(not odd, f"{here}: its files {two} differ in {', '.join(odd[:LISTED])}")


def check_names(names: Sequence[str], where: str) -> None:
    """Raise InputError if a name is empty or contains control characters, or if several columns have one name."""
    for name, count in Counter(name.strip() for name in names).items():
        good = bool(name) and not CONTROL.search(name)
        require(good, f"{where}: the name {quote(name)} of a column is empty or contains control characters: rename it")
        require(count == 1, f"{where}: {count} columns are called {quote(name)}: give each a name of its own")
