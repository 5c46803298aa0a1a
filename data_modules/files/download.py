"""Fetch and unpack files; only complete files get their names, even after a lost connection, a kill or a full disk."""

from __future__ import annotations

import errno
import os
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pooch
import requests
from tqdm import tqdm

from mtl.checks import InputError, causes, require

from .cache import locked, unwritable
from .reading import quote, read_gzip

TIMEOUT = (20.0, 120.0)  # seconds to connect, and to wait for data; a slow server is not an error
RETRIES = 4
CHUNK = 1 << 16  # bytes
MAX_BYTES = 8_000_000_000  # largest file and largest content of an archive; that of KuaiRand-1K has 4.3 GB


def obtain(
    file: Path,
    archive: Path,
    url: str,
    known_hash: str | None,
    download: bool,
    unverified: bool = False,
) -> None:
    """Fetch ``archive`` from ``url`` and unpack it into its own folder, unless ``file`` of its content exists.

    Without a ``known_hash``, only if ``unverified``. Raises InputError.
    """
    if file.exists():
        return
    require(
        known_hash is not None or unverified or not download or archive.exists(),
        f"{file} is missing. It has no published checksum, so that a download cannot be verified: get {url} in a way "
        f"that you trust and put it at {archive}, or set data.unverified=true to download it all the same",
    )
    with locked(archive.with_name(f".{archive.name}.lock"), f"fetching {archive}"):
        if not file.exists():
            otherwise = f", or unpack it so that {file} exists"
            _download(url, archive, known_hash, download, file, otherwise)
            with unpacked(archive) as folder:
                place(folder, archive.parent)
            require(file.exists(), f"{archive} contains no {file.relative_to(archive.parent)}")


def fetch(
    url: str,
    dest: Path,
    known_hash: str | None,
    download: bool = True,
    missing: Path | None = None,
    otherwise: str = "",
) -> None:
    """Download ``url`` to ``dest``; do nothing if ``dest`` exists with ``known_hash`` (``md5:...`` or a sha256).

    If the connection is lost, the next attempt continues where it ended, even in another run. Messages name the file
    ``missing`` (default ``dest``), and ``otherwise`` says how else to obtain it. Raises InputError.
    """
    with locked(dest.with_name(f".{dest.name}.lock"), f"fetching {dest}") if download else nullcontext():
        _download(url, dest, known_hash, download, missing or dest, otherwise)


def _download(url: str, dest: Path, known_hash: str | None, download: bool, missing: Path, otherwise: str) -> None:
    by_hand = f"get {url} elsewhere and put it at {dest}{otherwise}, or set data.data_dir to the folder of your data"
    lacking = f"{missing} is missing and data.download=false: set it to true, or {by_hand}"
    if not download:
        require(dest.exists(), lacking)
        return
    pooch.get_logger().setLevel("WARNING")
    source = pooch.create(dest.parent, "", None, registry={dest.name: known_hash}, urls={dest.name: url})
    source.retry_if_failed = RETRIES
    try:
        source.fetch(dest.name, downloader=_Resumed(dest, known_hash))
    except (_EndError, requests.RequestException) as error:
        system = [cause.strerror for cause in causes(error) if isinstance(cause, OSError) and cause.strerror]
        why = system[-1] if system else quote(str(error), 200)
        raise InputError(f"cannot download {dest.name}: {why}. Without the network, {by_hand}") from error
    except OSError as error:
        raise unwritable(dest.parent, error) from error


class _EndError(Exception):
    """An error that another attempt would not fix."""


class _Resumed:
    """A downloader for pooch that writes ``dest`` + ".part" and, if the hash is known, continues an earlier attempt."""

    def __init__(self, dest: Path, known_hash: str | None) -> None:
        self.dest, self.known_hash = dest, known_hash
        self.part = dest.with_name(f"{dest.name}.part")
        self.complete = self.answered = False
        if known_hash is None:
            self.part.unlink(missing_ok=True)

    def __call__(self, url: str, output_file: str, _: object) -> None:
        if self.complete:  # pooch asks again: the hash was wrong
            raise _EndError(f"the hash of the server's file is not {self.known_hash}")
        have = self.part.stat().st_size if self.part.exists() else 0
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        try:
            with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response:
                self.answered = True
                self._receive(response, have)
        except requests.ConnectionError as error:
            if self.answered:
                raise
            raise _EndError("no connection") from error
        except (requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema) as error:
            raise _EndError(str(error)) from error
        self.complete = not have
        os.replace(self.part, output_file)

    def _receive(self, response: requests.Response, have: int) -> None:
        if not response.ok:
            self.part.unlink(missing_ok=True)
            if not have:
                raise _EndError(f"the server answered {response.status_code} {response.reason}")
            response.raise_for_status()  # the part may be of another file: start over
        have = have if response.status_code == requests.codes.partial_content else 0
        length = int(response.headers.get("Content-Length") or 0) + have or None
        bar = tqdm(desc=self.dest.name, total=length, initial=have, unit="B", unit_scale=True, disable=None)
        with bar, self.part.open("ab" if have else "wb") as file:
            for chunk in response.iter_content(CHUNK):
                have += len(chunk)
                if have > MAX_BYTES:
                    self.part.unlink()
                    raise _EndError(f"the server sends more than {MAX_BYTES:,} bytes, the most that it can have")
                file.write(chunk)
                bar.update(len(chunk))


@contextmanager
def unpacked(archive: Path) -> Iterator[Path]:
    """Provide a hidden folder beside ``archive`` with its content; the folder is deleted at the end.

    A ``.tar.gz`` file in the content is unpacked as well. Raises InputError if the archive is damaged or too large. The
    caller holds a lock.
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
            raise InputError(
                f"{archive} is damaged ({why}): delete it and start again to fetch it once more"
            ) from error
        yield folder
    except OSError as error:
        raise unwritable(archive.parent, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack a zip, ``.tar.gz`` or ``.gz`` file; no member takes more than its declared size. Raises InputError."""
    too_many = f"{archive} unpacks to {{:,}} bytes, too many: delete it and start again"
    if archive.name.endswith(".tar.gz"):
        with tarfile.open(archive) as tar:
            size = sum(member.size for member in tar.getmembers())
            require(size <= MAX_BYTES, too_many.format(size))
            tar.extractall(folder, filter="data")  # refuses paths and links that leave the folder
    elif archive.suffix == ".gz":
        (folder / archive.stem).write_bytes(read_gzip(archive, MAX_BYTES))
    else:
        with zipfile.ZipFile(archive) as content:
            size = sum(info.file_size for info in content.infolist())
            require(size <= MAX_BYTES, too_many.format(size))
            content.extractall(folder)  # removes "..", drives and leading slashes from paths


def place(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``; if ``target`` is an existing folder, move only missing files into it."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(source, target)
    elif source.is_dir():
        for inner in source.iterdir():
            place(inner, target / inner.name)
