"""Keep what was parsed once: files of tensors that survive a killed process and serve several at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from mtl.types import InputError

logger = logging.getLogger(__name__)

Key = Sequence[str | int | float]


def keyed(path: Path, key: Key) -> Path:
    """Return ``path`` with a digest of ``key`` in the file's name: ``digits.pt`` -> ``digits-1f0c9a4b27de.pt``."""
    digest = hashlib.sha256(json.dumps(list(key)).encode()).hexdigest()
    return path.with_name(f"{path.stem}-{digest[:12]}{path.suffix}")


def cached(path: Path, build: Callable[[], dict[str, Tensor]], key: Key = ()) -> dict[str, Tensor]:
    """Return the tensors stored for ``key``; call ``build`` and store its result where there are none yet.

    The file is ``keyed(path, key)``: put into ``key`` all that the content depends on (format version, size and
    time of the source). A damaged file is built again. One process builds, the others wait and read. Raises
    ``InputError`` where the folder cannot be written; what ``build`` raises passes through.
    """
    path = keyed(path, key)
    tensors = _read(path)
    if tensors is not None:  # without the lock: a finished cache also works from a read-only folder
        return tensors
    with locked(path.with_name(path.name + ".lock"), f"building {path}"):
        tensors = _read(path)
        if tensors is None:
            for leftover in path.parent.glob(f".{path.name}.*.tmp"):  # we hold the lock: their writer is gone
                with contextlib.suppress(OSError):
                    leftover.unlink()
            logger.info("building %s", path)
            tensors = build()
            _store(path, tensors)
    return tensors


@contextlib.contextmanager
def locked(path: Path, doing: str) -> Iterator[None]:
    """Hold the lock file ``path`` against other processes; wait while one of them holds it.

    The kernel frees the lock of a killed process, so no lock is ever stale. ``doing`` completes the log line
    "waiting for another process that is ...". Raises ``InputError`` where the lock file cannot be written.
    """
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.info("waiting for another process that is %s", doing)
            lock.acquire()
    except OSError as error:
        raise unwritable(path.parent, error) from error
    try:
        yield
    finally:
        lock.release()


def unwritable(folder: Path, error: BaseException) -> InputError:
    """Return the error for a folder that cannot be written (read-only, full, no folder at all)."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return InputError(
        f"cannot write to the folder {folder}: {why}; make it writable, make room on its disk, or point "
        f"data.data_dir at another folder"
    )


def _read(path: Path) -> dict[str, Tensor] | None:
    """Return the stored tensors, or None where there is no readable file."""
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not compare the checksums stored in its format
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"wrong checksum of {damaged}")
        content = torch.load(path, weights_only=True)
        if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
            raise TypeError("it does not hold tensors by name")
    except Exception as error:  # damaged bytes make the unpickler raise nearly anything
        logger.warning("the cache %s is damaged and is built again: %s", path, error)
        return None
    return content


def _store(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write ``tensors`` beside ``path`` and rename: the name ``path`` never holds half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())  # before the rename, or a power cut could leave an empty file of that name
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        # torch turns a failed write into a RuntimeError about its own buffer; the reason is the one before it
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise unwritable(path.parent, cause) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
