"""Unpack archives atomically: an unpacked file is complete or absent, even if the process is killed."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from mtl.checks import InputError
from mtl.writing import writing

from .reading import quote

CHUNK = 1 << 20  # bytes
MAX_BYTES = 500_000_000  # the most that an archive may unpack to, unless the caller expects more
MAX_FILES = 1_000_000


def extract_gzip(archive: Path, dest: Path, max_bytes: int = MAX_BYTES) -> None:
    """Unpack the single file in ``archive``, of at most ``max_bytes``, to ``dest``, atomically. Raises InputError."""
    try:
        with gzip.open(archive) as source, writing(dest) as target:
            while chunk := source.read(CHUNK):
                if target.tell() + len(chunk) > max_bytes:  # a gzip file does not declare its size
                    raise InputError(f"{archive} unpacks to more than {max_bytes} bytes: delete it, it is a wrong file")
                target.write(chunk)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise InputError(
            f"{archive} is damaged ({error}): delete it and start again to download it once more"
        ) from error
    except OSError as error:
        raise InputError(f"cannot read {archive}: {error.strerror or error}") from error


def extract_zip(archive: Path, dest_dir: Path, max_bytes: int = MAX_BYTES) -> None:
    """Unpack ``archive`` into ``dest_dir``; leave files that exist already unchanged.

    Files are unpacked into a hidden folder inside ``dest_dir`` and then renamed, so each is complete or absent. Raises
    InputError if the archive is damaged, if a member's path leads out of ``dest_dir``, if all members together have
    more than ``max_bytes``, or if ``dest_dir`` cannot be written. Two processes must not unpack the same archive at the
    same time.
    """
    try:
        with zipfile.ZipFile(archive) as content:
            files = [info for info in content.infolist() if not info.is_dir()]
            names = [info.filename for info in files]
            size = sum(info.file_size for info in files)  # zipfile unpacks no more of a member than it declares
            if size > max_bytes or len(names) > MAX_FILES:
                raise InputError(
                    f"{archive} declares {len(names)} files of {size} bytes, more than the {max_bytes} bytes that are "
                    "expected: delete it, it is a wrong file"
                )
            for name in names:
                parts = PurePosixPath(name).parts
                if re.search(r"^/|\\|^[A-Za-z]:", name) or ".." in parts or not parts:
                    raise InputError(f"{archive}: the path of member {quote(name)} leads out of the archive; delete it")
            missing = [name for name in names if not (dest_dir / name).exists()]
            if missing:
                _unpack(content, missing, archive, dest_dir)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"cannot unpack {archive} into {dest_dir}: {error.strerror or error}") from error
    except Exception as error:  # on damaged bytes the reader can raise almost any exception
        raise InputError(
            f"{archive} is damaged ({quote(str(error))}): delete it and start again to download it once more"
        ) from error


def _unpack(content: zipfile.ZipFile, names: list[str], archive: Path, dest_dir: Path) -> None:
    for leftover in dest_dir.glob(f".{archive.name}.*.tmp"):  # from a process that was killed here
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = dest_dir / f".{archive.name}.{os.getpid()}.tmp"
    try:
        content.extractall(temporary, names)
        for top in sorted({PurePosixPath(name).parts[0] for name in names}):
            if not (dest_dir / top).exists():
                os.replace(temporary / top, dest_dir / top)  # rename a new folder as a whole
        for name in names:
            if (temporary / name).exists():
                (dest_dir / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(temporary / name, dest_dir / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
