"""Read the rows of a CSV or Parquet file in blocks, in memory that does not grow with the file."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import polars as pl

from mtl.checks import InputError, require
from mtl.types import ROW

from ..files.reading import regular_size
from .reading import (
    BOM,
    LINE_FEED,
    as_read,
    check_file,
    check_names,
    parse_text,
    unreadable_parquet,
)

BYTES = 1 << 23  # of text in a block
ROWS = 1 << 16  # of a Parquet file in a block
QUOTE = ord('"')


def read_blocks(path: Path, separator: str, null_values: Sequence[str]) -> Iterator[tuple[pl.DataFrame, float]]:
    """Yield the rows of a file as ``read_table`` returns them, in blocks, and the share of the file that is read.

    The column ``ROW`` numbers the rows of the whole file. Raises InputError as ``read_table`` does, at the block where
    a mistake is.
    """
    check_file(path, "")
    blocks = _parquet(path) if path.suffix == ".parquet" else _text(path, separator, null_values)
    done = 0
    for frame, share in blocks:
        yield frame.with_row_index(ROW, offset=1 + done), share
        done += len(frame)
    require(done > 0, f"{path} has a header but no rows")


def _parquet(path: Path) -> Iterator[tuple[pl.DataFrame, float]]:
    try:
        lazy = pl.scan_parquet(path, glob=False)
        total = int(lazy.select(pl.len()).collect().item())
        check_names(lazy.collect_schema().names(), path)
        for start in range(0, total, ROWS):
            frame = lazy.slice(start, ROWS).collect()
            yield as_read(frame), min(1.0, (start + ROWS) / total)
    except InputError:
        raise
    except (Exception, pl.exceptions.PanicException) as error:  # on damaged bytes polars can raise almost anything
        raise unreadable_parquet(path, error) from None


def _text(path: Path, separator: str, null_values: Sequence[str]) -> Iterator[tuple[pl.DataFrame, float]]:
    separator = "\t" if path.suffix == ".tsv" else separator
    header, lines = b"", 0  # the first line, and the number of lines behind it that are read
    for raw, share in _rows(path):
        if not header:
            header, _, raw = raw.removeprefix(BOM).partition(b"\n")
        if raw:
            yield parse_text(header + b"\n" + raw, path, separator, null_values, lines), share
            lines += raw.count(b"\n") + 1
    require(bool(header.strip()), f"{path} is empty")


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
                # Empty lines at the end of a file are no rows: what follows decides whether these are at its end
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
    """Return the end of the last row that is whole: behind a line feed outside quotes; 0 if there is none."""
    if b'"' not in buffer:
        return buffer.rfind(b"\n") + 1
    symbols = np.frombuffer(buffer, np.uint8)
    inside = np.logical_xor.accumulate(symbols == QUOTE)
    ends = np.flatnonzero((symbols == LINE_FEED) & ~inside)
    return int(ends[-1]) + 1 if len(ends) else 0
