"""Read ranges of rows of Parquet files as one table, in memory that does not grow with the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from mtl.checks import require, shown
from mtl.literals import CONTROL
from mtl.types import ROW

from ..files.cache import versions
from ..files.reading import files_of, parsing, quote

SUFFIX = ".parquet"
LISTED = 10  # differences in a message


@dataclass(frozen=True)
class Block:
    """``count`` rows of a file from row ``start``, counted from 0; ``first`` is the number of this row in all files."""

    path: Path
    start: int
    count: int
    first: int


@dataclass(frozen=True)
class ParquetRows:
    """The rows of several Parquet files with the same columns, one file after the other.

    ``stamps``: the size and the time of each file. ``here`` names all files in messages.
    """

    here: str
    paths: Sequence[Path]
    stamps: Mapping[Path, Sequence[int]]

    @staticmethod
    def of(path: Path, option: str) -> ParquetRows:
        """Return the rows of a file, of all ``.parquet`` files in a folder, or of all files that a pattern matches.

        ``option`` names the path in messages. Raises InputError if there is no file, or one of another format.
        """
        paths = parquet_files(path, option)
        return ParquetRows(f"{option}={path}", paths, {file: versions(file) for file in paths})

    @cached_property
    def counts(self) -> list[int]:
        """The number of rows of each file, from its footer. Raises InputError."""
        return [_read(path, lambda rows: rows.select(pl.len())).item() for path in self.paths]

    @cached_property
    def schema(self) -> Mapping[str, pl.DataType]:
        """The columns and their types; raise InputError unless all files agree."""
        schemas = {path: _read(path, lambda rows: rows.head(0)).schema for path in self.paths}
        for path, schema in schemas.items():
            check_names(schema.names(), path)
        check_alike(schemas, self.here, exact=True)
        return schemas[self.paths[0]]

    def blocks(self, rows: int) -> list[Block]:
        """Return the rows of all files in blocks of at most ``rows``, in order. A block lies in one file."""
        found, first = list[Block](), 0
        for path, count in zip(self.paths, self.counts, strict=True):
            for start in range(0, count, rows):
                found.append(Block(path, start, min(rows, count - start), first + start))
            first += count
        return found

    def read(self, block: Block, columns: Sequence[str]) -> pl.DataFrame:
        """Return ``columns``, each once, of the rows of a block, numbered in ``ROW`` as in their file.

        Raises InputError, also if the file has changed since its rows were counted.
        """
        require(
            block.path.exists() and versions(block.path) == self.stamps[block.path],
            f"{block.path} was changed, replaced or deleted while it was being streamed; a file that is streamed must "
            "stay as it is until the run ends",
        )
        frame = _read(block.path, lambda rows: rows.slice(block.start, block.count).select([*dict.fromkeys(columns)]))
        return as_read(frame).with_row_index(ROW, offset=1 + block.start)

    def frames(self, columns: Sequence[str], rows: int) -> Iterator[tuple[pl.DataFrame, str]]:
        """Yield ``columns`` of all rows in blocks of at most ``rows``, each with the name of its file."""
        for block in self.blocks(rows):
            yield self.read(block, columns), str(block.path)


def parquet_files(path: Path, option: str) -> list[Path]:
    """Return the Parquet files that ``path`` stands for, see ``files_of``. Raises InputError."""
    files = files_of(path, option)
    for file in files:
        text = file.name.endswith((".csv", ".csv.gz", ".tsv"))
        name = file.name.split(".")[0] + SUFFIX
        hint = f"; convert it with polars.scan_csv({file.name!r}).sink_parquet({name!r})" if text else ""
        require(file.suffix == SUFFIX, f"{file}: data=table_stream reads {SUFFIX} files{hint}")
    return files


def _read(path: Path, query: Any) -> pl.DataFrame:
    with parsing(path, "It must be a Parquet file, with a name of its own for each column"):
        frame: pl.DataFrame = query(pl.scan_parquet(path, glob=False, hive_partitioning=False)).collect()
    return frame


def as_read(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of a Parquet file with NaN replaced by empty cells."""
    return frame.with_columns(pl.selectors.float().fill_nan(None))


def check_alike(schemas: Mapping[Path, Mapping[str, pl.DataType]], here: str, exact: bool = False) -> None:
    """Raise InputError unless all files have the columns of the first one; numbers may differ in type if not ``exact``.

    ``here`` names the files in the message.
    """

    def fits(one: pl.DataType | None, other: pl.DataType | None) -> bool:
        if exact or one is None or other is None:
            return one == other
        return one == other or pl.Null in (one, other) or (one.is_numeric() and other.is_numeric())

    (first, expected), *others = schemas.items()
    for file, schema in others:
        pairs = {name: (expected.get(name), schema.get(name)) for name in (*expected, *schema)}
        odd = [f"{shown(name)} ({one} and {other})" for name, (one, other) in pairs.items() if not fits(one, other)]
        require(not odd, f"{here}: its files {first.name} and {file.name} differ in {', '.join(odd[:LISTED])}")


def check_names(names: Sequence[str], path: Path) -> None:
    """Raise InputError if a name is empty or contains control characters, or if several columns have one name."""
    for name, count in Counter(name.strip() for name in names).items():
        good = bool(name) and not CONTROL.search(name)
        require(good, f"{path}: the name {quote(name)} of a column is empty or contains control characters: rename it")
        require(count == 1, f"{path}: {count} columns are called {quote(name)}: give each a name of its own")
