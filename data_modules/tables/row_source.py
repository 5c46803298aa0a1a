"""Read the rows of a table block by block, from CSV or Parquet files or from a DataFrame in memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import polars as pl

from mtl.checks import InputError, first_line, format_value, require
from mtl.files.cloud import CloudPath, path_of
from mtl.files.escaping import CONTROL
from mtl.types import ROW

from ..files.cloud import FILE, scan
from ..files.identity import stamp
from ..files.reading import MEMORY, SUFFIXES, files_of, parsing, quote, read_bytes, read_gzip, regular_size
from .options import NULL_VALUES

PARQUET = ".parquet"
BLOCK_ROWS = 1 << 16  # rows of a block
# Bytes of memory that it takes to read and encode a row of a Parquet file: of its numbers and split, and of each cell
BYTES_PER_ROW, BYTES_PER_CELL = 64, 32
SEPARATORS = (",", ";", "\t", "|")  # that are recognised
MAX_DIFFERENCES_LISTED = 10  # differences in a message


@dataclass(frozen=True)
class Block:
    """``count`` rows of the table ``file`` from row ``start``, counted from 0; ``first``: its number in all."""

    file: str
    start: int
    count: int
    first: int


@dataclass(frozen=True)
class RowSource:
    """The rows of one or several files with the same columns, one file after the other, or of a DataFrame.

    ``tables``: the rows of each file by its name in messages; in memory, one table has the rows of all files.
    ``from_text``: whether they were text files, whose cells are all texts or null. ``stamps``: size and time of each
    file that is read anew for each block; () in the cloud. ``location`` names all files in messages. Numbers may differ
    in type between files: all have the type that holds each of them.
    """

    location: str
    tables: Mapping[str, pl.LazyFrame]
    from_text: bool = False
    stamps: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @staticmethod
    def open(
        path: Path,
        option: str = "",
        separator: str | None = None,
        null_values: Sequence[str] = NULL_VALUES,
        in_memory: bool = False,
    ) -> RowSource:
        """Return the rows of a file, or of all files of a folder or a pattern; see ``files_of``.

        Text files are read as a whole; of Parquet files, only the blocks that are asked for, unless ``in_memory``.
        ``separator``: of text files; None: the one that their first line has most. Cells that equal one of
        ``null_values`` are empty. ``option`` names the path in messages. Raises InputError if a file is missing, empty,
        unreadable, of another format or too large, if a column has no name or the name of another one, or if a row has
        more or fewer cells than there are columns.
        """
        files, location = files_of(path, option), f"{option}={path}" if option else str(path)
        for file in files:
            require(file.name.endswith(SUFFIXES), f"{file}: accepted formats are {', '.join(SUFFIXES)}")
            require(regular_size(file) > 0, f"{file} is empty")
        if files[0].suffix != PARQUET:
            texts = {str(file): read_text(file, separator, null_values) for file in files}
            return RowSource.of_frames(texts, location, from_text=True)
        numbered: dict[str, Any] = {"row_index_name": ROW, "row_index_offset": 1}
        numbered |= {"include_file_paths": FILE} if len(files) > 1 else {}
        scans = {str(file): scan(file, glob=False, **numbered) for file in files}
        stamps = {str(file): () if isinstance(file, CloudPath) else stamp(file) for file in files}
        source = RowSource(location, scans, stamps=stamps)
        return source._load() if in_memory else source

    @staticmethod
    def of_frames(frames: Mapping[str, pl.DataFrame], location: str = "", from_text: bool = False) -> RowSource:
        """Return the rows of DataFrames, by their names in messages; ``location`` names all, if there are several.

        Raises InputError if their columns differ, or if there are no rows.
        """
        first, *others = frames
        columns, location = frames[first].columns, location or first
        require(bool(columns), f"{first} has no columns")
        check_columns_agree({name: frame.schema for name, frame in frames.items()}, location)
        tables = {name: frame.select(columns).with_row_index(ROW, offset=1) for name, frame in frames.items()}
        if others:  # one table, since a small block takes as long as a large one
            names = pl.Enum(list(frames))
            named = [table.with_columns(pl.lit(name, dtype=names).alias(FILE)) for name, table in tables.items()]
            tables = {location: pl.concat(named, how="vertical_relaxed", rechunk=True)}
        [(name, table)] = tables.items()
        require(len(table) > 0, f"{location} has no rows")
        return RowSource(location, {name: table.lazy()}, from_text)

    def _load(self) -> RowSource:
        """Return the same rows in memory. Raises InputError if there are none, or too many."""
        count, width = self.count, len(self.schema)  # a small file may repeat a value 10^9 times
        fits = count * (BYTES_PER_ROW + width * BYTES_PER_CELL) <= MEMORY
        wide = f"{count:,} rows of {width} columns, which do not fit into memory"
        require(fits, f"{self.location} has {wide}: use data.window_rows=1048576")
        require(count > 0, f"{self.location} has a header but no rows")
        frames = {block.file: self.read(block, self.columns).select(self.columns) for block in self.blocks(None)}
        return RowSource.of_frames(frames, self.location)

    @cached_property
    def counts(self) -> list[int]:
        """The number of rows of each table; of a Parquet file, from its footer. Raises InputError."""
        return [self._collect(name, lambda rows: rows.select(pl.len())).item() for name in self.tables]

    @property
    def count(self) -> int:
        """The number of rows of all files."""
        return sum(self.counts)

    @cached_property
    def schema(self) -> Mapping[str, pl.DataType]:
        """The columns, in the order of the first file, and their types; InputError unless all files agree."""
        empty = {name: self._collect(name, lambda rows: rows.head(0)) for name in self.tables}
        empty = {name: frame.drop(ROW, FILE, strict=False) for name, frame in empty.items()}
        check_columns_agree({name: frame.schema for name, frame in empty.items()}, self.location)
        first, *others = empty.values()
        return pl.concat([first, *(other.select(first.columns) for other in others)], how="vertical_relaxed").schema

    @property
    def columns(self) -> list[str]:
        return list(self.schema)

    def blocks(self, rows: int | None) -> list[Block]:
        """Return the rows in blocks of at most ``rows``, in order. A block lies in one table; None: is a whole one.

        A table without rows has no block.
        """
        blocks, first = list[Block](), 0
        for name, count in zip(self.tables, self.counts, strict=True):
            for start in range(0, count, rows or max(count, 1)):
                blocks.append(Block(name, start, min(rows or count, count - start), first + start))
            first += count
        return blocks

    def read(self, block: Block, columns: Sequence[str]) -> pl.DataFrame:
        """Return ``columns``, each once, of the rows of a block; NaN is null.

        The rows are numbered in ``ROW`` as in their file, which, if there are several, ``FILE`` names. Raises
        InputError, also if the file has changed since it was opened.
        """
        if opened := self.stamps.get(block.file):
            file = Path(block.file)
            changed = f"{file} was changed, replaced or deleted while it was being read"
            require(file.exists() and stamp(file) == opened, f"{changed}; it must stay as it is until the run ends")
        types: dict[Any, pl.DataType] = {name: self.schema[name] for name in columns}
        numbering = pl.selectors.by_name(ROW, FILE, require_all=False)
        frame = self._collect(block.file, lambda rows: rows.slice(block.start, block.count).select(numbering, *types))
        return frame.cast(types).with_columns(pl.selectors.float().fill_nan(None))

    def frames(self, columns: Sequence[str]) -> Iterator[tuple[pl.DataFrame, str]]:
        """Yield ``columns`` of all rows in blocks, each with the name of its file."""
        for block in self.blocks(BLOCK_ROWS):
            yield self.read(block, columns), block.file

    def _collect(self, name: str, query: Callable[[pl.LazyFrame], pl.LazyFrame]) -> pl.DataFrame:
        if not self.stamps:
            return query(self.tables[name]).collect()
        with parsing(path_of(name), "It must be a Parquet file, with a name of its own for each column"):
            return query(self.tables[name]).collect()


def read_blocks(path: Path, option: str = "", **reading: Any) -> Iterator[tuple[pl.DataFrame, float]]:
    """Yield the rows of a single file in blocks, each with the fraction of the rows read so far.

    The arguments are those of ``RowSource.open``. Raises InputError.
    """
    regular_size(path, option)
    source = RowSource.open(path, option, **reading)
    for block in source.blocks(BLOCK_ROWS):
        yield source.read(block, source.columns).drop(FILE, strict=False), (block.first + block.count) / source.count


def check_parquet(path: Path, option: str) -> None:
    """Raise InputError if ``path`` stands for files of another format than Parquet, see ``files_of``."""
    for file in files_of(path, option):
        text = file.name.endswith((".csv", ".csv.gz", ".tsv"))
        name = file.name.split(".")[0] + PARQUET
        hint = f"; convert it with polars.scan_csv({file.name!r}).sink_parquet({name!r})" if text else ""
        require(file.suffix == PARQUET, f"{file}: data.window_rows reads {PARQUET} files{hint}")


def read_text(path: Path, separator: str | None, null_values: Sequence[str]) -> pl.DataFrame:
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
    separator = "\t" if path.suffix == ".tsv" else separator or max(SEPARATORS, key=rows[0].count)
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


def check_columns_agree(schemas: Mapping[str, Mapping[str, pl.DataType]], location: str) -> None:
    """Raise InputError unless all files have the columns of the first one, of the same type or also numbers.

    The names are checked as well, see ``check_names``. ``location`` names the files in the message.
    """

    def fits(first: pl.DataType | None, second: pl.DataType | None) -> bool:
        if first is None or second is None:
            return first == second
        return first == second or pl.Null in (first, second) or (first.is_numeric() and second.is_numeric())

    for file, schema in schemas.items():
        check_names(list(schema), file)
    (first, expected), *others = schemas.items()
    for file, schema in others:
        types = {name: (expected.get(name), schema.get(name)) for name in (*expected, *schema)}
        unlike = {name: pair for name, pair in types.items() if not fits(*pair)}
        differences = [f"{format_value(name)} ({a} and {b})" for name, (a, b) in unlike.items()]
        two, listed = f"{Path(first).name} and {Path(file).name}", ", ".join(differences[:MAX_DIFFERENCES_LISTED])
        require(not differences, f"{location}: its files {two} differ in {listed}")


def check_names(names: Sequence[str], location: str) -> None:
    """Raise InputError if a name is empty or contains control characters, or if several columns have one name."""
    for name, count in Counter(name.strip() for name in names).items():
        valid, message = bool(name) and not CONTROL.search(name), "is empty or contains control characters: rename it"
        require(valid, f"{location}: the name {quote(name)} of a column {message}")
        require(count == 1, f"{location}: {count} columns are called {quote(name)}: give each a name of its own")
