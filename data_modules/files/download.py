"""Fetch and unpack files; only complete files get their names, even after a lost connection, a kill or a full disk."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pooch
import requests

from mtl.checks import InputError, causes, require

from .cache import locked, unwritable
from .reading import check_unpacked, quote, read_gzip

TIMEOUT = (20.0, 120.0)  # seconds to connect, and to wait for data; a slow server is not an error
RETRIES = 2


def fetch_archive(
    file: Path, archive: Path, site: str, known_hash: str | None, download: bool, unverified: bool = False
) -> None:
    """Fetch ``archive`` from ``site`` and unpack it into its own folder, unless ``file`` of its content exists.

    Without a ``known_hash``, only if ``unverified``. Raises InputError.
    """
    if file.exists():
        return
    url = f"{site.rstrip('/')}/{archive.name}"
    require(
        known_hash is not None or unverified or not download or archive.exists(),
        f"{file} is missing. It has no published checksum, so that a download cannot be verified: get {url} in a way "
        f"that you trust and put it at {archive}, or set data.unverified=true to download it all the same",
    )
    fetch(url, archive, known_hash, download)
    with locked(archive.with_name(f".{archive.name}.unpacking.lock"), f"unpacking {archive}"):
        if not file.exists():
            with unpacked(archive) as folder:
                move_missing(folder, archive.parent)
            require(file.exists(), f"{archive} contains no {file.relative_to(archive.parent)}")


def fetch(url: str, dest: Path, known_hash: str | None, download: bool = True) -> None:
    """Download ``url`` to ``dest``; do nothing if ``dest`` exists with ``known_hash`` (``md5:...`` or a sha256).

    Raises InputError.
    """
    by_hand = f"get {url} elsewhere and put it at {dest}, or set paths.data_dir to the folder of your data"
    if not download:
        require(dest.exists(), f"{dest} is missing and data.download=false: set it to true, or {by_hand}")
        return
    pooch.get_logger().setLevel("WARNING")
    source = pooch.create(dest.parent, "", None, registry={dest.name: known_hash}, urls={dest.name: url})
    source.retry_if_failed = RETRIES
    plain = {"Accept-Encoding": "identity"}
    downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=TIMEOUT, headers=plain)
    with locked(dest.with_name(f".{dest.name}.lock"), f"fetching {dest}"):
        try:
            source.fetch(dest.name, downloader=downloader)
        except (ValueError, requests.RequestException) as error:  # a ValueError if the hash is wrong
            system = [cause.strerror for cause in causes(error) if isinstance(cause, OSError) and cause.strerror]
            why = system[-1] if system else quote(str(error), 200)
            raise InputError(f"cannot download {dest.name}: {why}. Without the network, {by_hand}") from error
        except OSError as error:
            raise unwritable(dest.parent, error) from error


@contextmanager
def unpacked(archive: Path) -> Iterator[Path]:
    """Provide a hidden folder beside ``archive`` with its content; the folder is deleted at the end.

    A ``.tar.gz`` file in the content is unpacked as well. Raises InputError if the archive is damaged. The caller holds
    a lock.
    """
    folder = archive.with_name(f".{archive.name}.unpacked")
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed process
    try:
        folder.mkdir()
        try:
            _unpack(archive, folder)
            for inner in sorted(folder.rglob("*.tar.gz")):
                _unpack(inner, inner.parent)
                inner.unlink()
        except InputError:
            raise
        except Exception as error:  # on damaged bytes the reader can raise almost any exception
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # a full disk, say
                raise
            why = quote(str(error))
            advice = "delete it and start again to fetch it once more"
            raise InputError(f"{archive} is damaged ({why}): {advice}") from error
        yield folder
    except OSError as error:
        raise unwritable(archive.parent, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack a zip, ``.tar.gz`` or ``.gz`` file. Raises InputError if it is a bomb, see ``check_unpacked``."""
    packed = archive.stat().st_size
    if archive.name.endswith(".tar.gz"):
        root, size = Path(os.path.abspath(folder)), 0
        with tarfile.open(archive) as tar:
            for member in tar:  # extractall's safe filters need Python 3.11.4; links are left out
                size += member.size
                check_unpacked(archive, packed, size)
                file = Path(os.path.normpath(root / member.name))
                if not file.is_relative_to(root):
                    raise ValueError(f"{member.name} leaves the folder")
                if data := tar.extractfile(member) if member.isfile() else None:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    with data, file.open("wb") as to:
                        shutil.copyfileobj(data, to)
    elif archive.suffix == ".gz":
        (folder / archive.stem).write_bytes(read_gzip(archive))
    else:
        with zipfile.ZipFile(archive) as content:
            check_unpacked(archive, packed, sum(member.file_size for member in content.infolist()))
            content.extractall(folder)  # removes "..", drives and leading slashes from paths


def move_missing(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``; if ``target`` is an existing folder, move only missing files into it."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(source, target)
    elif source.is_dir():
        for inner in source.iterdir():
            move_missing(inner, target / inner.name)
