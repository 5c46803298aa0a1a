"""Read files, with clear errors if one is missing, not a regular file, unreadable, damaged or too large."""

from __future__ import annotations

import glob
import gzip
import io
import math
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl

from mtl.checks import InputError, first_line, require
from mtl.files.cloud import CloudPath

from .cloud import count_rows, describe_problem

SUFFIXES = (".csv", ".csv.gz", ".tsv", ".parquet")  # of tables
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # bytes of this machine
BYTES_PER_TEXT_BYTE = 8  # bytes of memory that it takes to read a byte of text
MAX_EXPANSION = 100  # how many times its size a file may be unpacked to,
HARMLESS_BYTES = 1 << 26  # and the size that any may
PATTERN_SIGNS = "*?["  # a path that does not exist and contains one of these is a pattern


def regular_size(path: Path, option: str = "") -> int:
    """Return the size of the file ``path`` in bytes; of one in the cloud 1, since reading it will show what is wrong.

    Raises InputError if it is missing, a folder, or a pipe or device, which might be endless; ``option`` is the option
    that names the file in messages.
    """
    location = f"{option}={path}" if option else str(path)
    if isinstance(path, CloudPath):
        return 1
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{location}: no such file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{location}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if stat.S_ISDIR(status.st_mode):
        raise InputError(f"{location} is a folder: give a file")
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{location} is a pipe or a device: give a regular file")
    return status.st_size


def files_of(path: Path, option: str = "") -> list[Path]:
    """Return the regular files that ``path`` stands for, sorted by name.

    ``path`` is a file; a folder, which stands for its files with one of the ``SUFFIXES``, except hidden ones; or a
    pattern such as ``visits/*.parquet``; of one in the cloud, files without rows are left out. ``option`` is the option
    that names the files in messages. Raises InputError if there is no file, or if formats differ.
    """
    location = f"{option}={path}" if option else str(path)
    if isinstance(path, CloudPath):
        message = f"{location}: in the cloud, give a file or a pattern, as in s3://NAME/*.parquet"
        require(path.name.endswith(SUFFIXES), message)
        files: list[Path] = [*map(CloudPath, cloud_rows(path))] if is_pattern(path) else [path]
        require(bool(files), f"{location}: no file with rows matches this pattern")
    elif os.path.isdir(path):
        files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
        files = [file for file in files if not file.name.startswith(".")]
        message = f"{location} is a folder without tables ({', '.join(SUFFIXES)}): give a file, or their folder"
        require(bool(files), message)
    elif is_pattern(path):
        files = sorted(Path(file) for file in glob.glob(str(path), recursive=True))
        require(bool(files), f"{location}: no file matches this pattern")
    else:
        files = [path]
    for file in files:
        regular_size(file, option)
    formats = sorted({suffix for file in files for suffix in SUFFIXES if file.name.endswith(suffix)})
    message = f"{location}: {' and '.join(formats)} files: give a pattern that matches one format, as in *.csv"
    require(len(formats) < 2, message)
    return files


def cloud_rows(path: CloudPath) -> dict[str, int]:
    """Return ``count_rows(path)``. Raises InputError."""
    with parsing(path):
        return count_rows(path)


def is_pattern(path: Path) -> bool:
    return any(sign in str(path) for sign in PATTERN_SIGNS) and not os.path.exists(path)


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file. Raises InputError."""
    regular_size(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None


def read_gzip(path: Path) -> bytes:
    """Return the unpacked content of a gzip file. Raises InputError, also for a bomb, see ``check_unpacked``."""
    packed, content = regular_size(path), io.BytesIO()
    try:
        with gzip.open(path) as file:
            while part := file.read(1 << 24):
                content.write(part)
                check_unpacked(path, packed, content.tell(), MEMORY // BYTES_PER_TEXT_BYTE)
    except (gzip.BadGzipFile, zlib.error, EOFError, OSError) as error:
        raise InputError(f"{path} is damaged or not a gzip file ({error})") from None
    return content.getvalue()


def check_unpacked(path: Path, packed: int, size: float, max_bytes: float = math.inf) -> None:
    """Raise InputError if a file of ``packed`` bytes is unpacked to ``size`` bytes, and this is what a bomb would be.

    Up to ``HARMLESS_BYTES`` are accepted, more only up to ``MAX_EXPANSION`` times the file and ``max_bytes``.
    """
    is_allowed = size <= max(HARMLESS_BYTES, min(MAX_EXPANSION * packed, max_bytes))
    limit = f"{MAX_EXPANSION} times its {packed:,} bytes"
    limit = "a table in memory may have" if MAX_EXPANSION * packed > max_bytes else limit
    require(is_allowed, f"{path} holds more than {limit}: unpack it by other means if you trust it")


def read_lines(file: Path, encoding: str = "latin-1") -> pl.DataFrame:
    """Return the lines of a text file, perhaps compressed by gzip, as the columns ``number``, from 1, and ``line``."""
    raw = read_gzip(file) if file.suffix == ".gz" else read_bytes(file)
    text = raw.decode(encoding).rstrip("\r\n")
    require(bool(text.strip()), f"{file} is empty. {repair(file)}")
    lines = pl.Series("line", [text]).str.split("\n").explode().str.strip_suffix("\r")
    return lines.to_frame().with_row_index("number", 1)


@contextmanager
def parsing(file: Path, again: str = "") -> Iterator[None]:
    """Raise InputError, with the advice ``again``, for any error: on damaged bytes, parsers can raise almost any.

    The rows of a published file need no check of their own: its checksum is checked when it is fetched.
    """
    regular_size(file)  # to read a pipe would wait for ever
    try:
        yield
    except InputError:
        raise
    except (Exception, pl.exceptions.PanicException) as error:
        if isinstance(file, CloudPath):
            raise InputError(f"{file}: {describe_problem(error)}") from None
        why = quote(f"{type(error).__name__}: {first_line(error)}", 200)
        raise InputError(f"{file} is damaged ({why}). {again or repair(file)}") from None


def repair(file: Path) -> str:
    """Return the advice that ends a message about a damaged file."""
    return f"Repair the file, or delete the folder {file.parent} to have it fetched again"


def quote(text: str, limit: int = 60) -> str:
    """Return ``text`` in quotes, cut after ``limit`` characters, with control characters escaped."""
    return repr(text if len(text) <= limit else text[:limit] + "...")
