"""Give every run folder one owner: no two runs write into the same folder, and no run overwrites a finished one."""

from __future__ import annotations

import math
import os
from pathlib import Path

from filelock import FileLock, Timeout

from mtl.checks import InputError
from mtl.files.run_files import COMMAND, CONFIG, LOCK, LOG, RESULTS, checked_file
from mtl.files.writing import reported
from mtl.runs.caller import Caller


def lock_run_folder(folder: Path, resumed: bool, caller: Caller) -> FileLock:
    """Acquire and return the lock of a run folder; the system releases it when the process ends or is killed.

    Raises InputError if another process holds the lock, if the folder contains a run that this run does not resume, or
    if its lock or log is a link out of it.
    A run that ended before its first checkpoint left nothing to lose, so its folder is taken over.
    """
    with reported(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name in (LOCK, LOG):  # which are opened for writing: a link could lead anywhere
        if os.path.lexists(folder / name):
            checked_file(folder / name, folder, math.inf)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=1)  # second: mtl report --watch may have it for a moment
    except Timeout:
        raise InputError(
            f"run folder {folder}: another process is using it; wait until it ends, or choose another "
            f"{caller.folder_option}"
        ) from None
    if resumed or not (folder / CONFIG).exists():
        return lock
    last = folder / "checkpoints" / "last.ckpt"
    saved = [last] if last.exists() else sorted(last.parent.glob("*.ckpt"))
    if saved or (folder / RESULTS).exists():
        lock.release()
        resume = f"resume it with: {caller.command('ckpt', saved[0])}; or " if saved else ""
        raise InputError(f"run folder {folder} contains a run already; {resume}choose another {caller.folder_option}")
    return lock


def unlock_run_folder(folder: Path, lock: FileLock, delete_empty: bool) -> None:
    """Release the lock of a run folder; with ``delete_empty`` delete the folder if no run has begun in it."""
    if delete_empty and {path.name for path in folder.iterdir()} <= {LOCK, COMMAND}:
        (folder / COMMAND).unlink(missing_ok=True)
        (folder / LOCK).unlink(missing_ok=True)
        folder.rmdir()
    lock.release()
