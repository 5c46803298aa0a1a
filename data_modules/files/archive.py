"""Unpack archives atomically: an unpacked file is complete or absent, even if the process is killed."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from mtl.types import InputError


def extract_gzip(archive: Path, dest: Path) -> None:
    """Unpack the single file in ``archive`` to ``dest``, atomically. Raises InputError."""
    temporary = dest.with_name(f".{dest.name}.{os.getpid()}.tmp")
    try:
        with gzip.open(archive) as source, temporary.open("wb") as target:
            shutil.copyfileobj(source, target)
        os.replace(temporary, dest)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise InputError(
            f"{archive} is damaged ({error}): delete it and start again to download it once more"
        ) from error
    except OSError as error:
        raise InputError(f"cannot unpack {archive} to {dest}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def extract_zip(archive: Path, dest_dir: Path) -> None:
    """Unpack ``archive`` into ``dest_dir``; leave files that exist already unchanged.

    Files are unpacked into a hidden folder inside ``dest_dir`` and then renamed, so each is complete or absent. Raises
    InputError if the archive is damaged, if a member's path leads out of ``dest_dir``, or if ``dest_dir`` cannot be
    written. Two processes must not unpack the same archive at the same time.
    """
    try:
        with zipfile.ZipFile(archive) as content:
            names = [info.filename for info in content.infolist() if not info.is_dir()]
            for name in names:
                if re.search(r"^/|\\|^[A-Za-z]:", name) or ".." in PurePosixPath(name).parts:
                    raise InputError(f"{archive}: the path of member {name!r} leads out of the archive; delete it")
            missing = [name for name in names if not (dest_dir / name).exists()]
            if missing:
                _unpack(content, missing, archive, dest_dir)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise InputError(
            f"{archive} is damaged ({error}): delete it and start again to download it once more"
        ) from error
    except OSError as error:
        raise InputError(f"cannot unpack {archive} into {dest_dir}: {error.strerror or error}") from error


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
