"""Cache parsed data as files of tensors: safe against killed processes and shared by concurrent ones."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from mtl.checks import InputError
from mtl.files.writing import writing

from .identity import digest

logger = logging.getLogger(__name__)

Key = Sequence[str | int | float]


def keyed(path: Path, key: Key) -> Path:
    """Return ``path`` with a digest of ``key`` added to the file name: ``digits.pt`` -> ``digits-1f0c9a4b27de.pt``."""
    return path.with_name(f"{path.stem}-{digest(key)[:12]}{path.suffix}")


def cached(path: Path, build: Callable[[], dict[str, Tensor]], key: Key = ()) -> dict[str, Tensor]:
    """Return the tensors stored for ``key``; if there are none yet, call ``build`` and store its result.

    The file is ``keyed(path, key)``. ``key`` must hold everything that the content depends on: the format version, and
    the ``stamp`` of the source. A damaged file is rebuilt. One process builds, the others wait and read.
    Raises InputError if the folder cannot be written; errors of ``build`` are not caught.
    """
    path = keyed(path, key)
    tensors = _read(path)
    if tensors is not None:  # read before locking: a finished cache then works in a read-only folder
        return tensors
    with locked(path.with_name(path.name + ".lock"), f"building {path}"):
        tensors = _read(path)
        if tensors is None:
            for leftover in path.parent.glob(f".{path.name}.*"):  # we hold the lock, so its writer is gone
                with contextlib.suppress(OSError):
                    leftover.unlink()
            logger.info("building %s", path)
            tensors = build()
            with writing(path) as file:
                torch.save(tensors, file)
    return tensors


@contextlib.contextmanager
def locked(path: Path, doing: str) -> Iterator[None]:
    """Hold an exclusive lock on the file ``path``; wait while another process holds it.

    The kernel releases the lock of a killed process, so no lock is ever stale. ``doing`` completes the log line
    "waiting for another process that is ...". Raises InputError if the lock file cannot be written.
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
    """Return the error for a folder that cannot be written (read-only, full disk, not a folder)."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return InputError(
        f"cannot write to the folder {folder}: {why}; make it writable, free space on its disk, or set "
        f"paths.data_dir to another folder"
    )


def _read(path: Path) -> dict[str, Tensor] | None:
    """Return the stored tensors, or None if there is no readable file."""
    if not path.exists():
        return None
    try:
        content: dict[str, Tensor] = torch.load(path, weights_only=True)
    except Exception as error:  # on damaged bytes the unpickler can raise almost any exception
        logger.warning("the cache %s is damaged and will be rebuilt: %s", path, error)
        return None
    return content
