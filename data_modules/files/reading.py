"""Read local files that may be missing, of another kind, unreadable, damaged or far too large."""

from __future__ import annotations

import gzip
import io
import stat
import zlib
from pathlib import Path

from mtl.checks import InputError

CHUNK = 1 << 20  # bytes


def regular_size(path: Path, option: str = "") -> int:
    """Return the size of the file ``path`` in bytes.

    Raises InputError if it is missing, a folder, or a pipe or device, whose reading might never end; ``option`` is the
    option that names the file in messages.
    """
    here = f"{option}={path}" if option else str(path)
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{here}: no such file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{here}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if stat.S_ISDIR(status.st_mode):
        raise InputError(f"{here} is a folder: give a file")
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{here} is a pipe or a device: give a regular file")
    return status.st_size


def read_bytes(path: Path, limit: int | None = None) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes. Raises InputError."""
    size = regular_size(path)
    if limit is not None and size > limit:
        raise InputError(f"{path} has {size} bytes, at most {limit} are expected: give the right file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except (MemoryError, OverflowError):
        raise InputError(f"{path} has {size} bytes, more than fit into memory") from None


def read_gzip(path: Path, limit: int | None = None) -> bytes:
    """Return the unpacked content of a gzip file, of at most ``limit`` bytes. Raises InputError."""
    unpacked = io.BytesIO()
    try:
        with gzip.open(io.BytesIO(read_bytes(path))) as source:
            while chunk := source.read(CHUNK):
                unpacked.write(chunk)
                if limit is not None and unpacked.tell() > limit:
                    raise InputError(f"{path} unpacks to more than {limit} bytes, which is too large")
    except (gzip.BadGzipFile, zlib.error, EOFError, OSError) as error:
        raise InputError(f"{path} is damaged or not a gzip file ({error})") from None
    except MemoryError:
        raise InputError(f"{path} unpacks to more than fits into memory") from None
    return unpacked.getvalue()


def quote(text: str, limit: int = 60) -> str:
    """Return ``text`` in quotes, cut after ``limit`` characters, with control characters escaped."""
    return repr(text if len(text) <= limit else text[:limit] + "...")
