"""The names of the files in a run folder, and functions that read them. Imports nothing slow."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from mtl.checks import InputError, require
from mtl.files.escaping import unescape_interpolation

LOCK = ".lock"
COMMAND = "command.json"  # the overrides, choices and seed of a new run, written first of all
CONFIG = "config.yaml"  # written before a run trains
LOG = "train.log"
CHECKPOINTS = "checkpoints"  # the folder of best.ckpt and last.ckpt
WEIGHTS, CONTENT = "model.safetensors", "model.json"  # of a folder that mtl card has written
TESTS_LAST = re.compile(r"^test_checkpoint: last$", re.MULTILINE)  # in the configuration of a run
PREDICTIONS = "predictions.parquet"  # of the test rows; has labels, so it stays in the run folder
RESULTS = "results.json"  # written last
MAX_FILE_BYTES = 1 << 24  # the largest file that is read, in bytes,
MAX_STEP_LOG_BYTES = 1 << 30  # and the largest with a row for each step


def checked_file(path: Path, folder: Path, most: float = MAX_FILE_BYTES) -> Path:
    """Return ``path`` if it is a regular file of at most ``most`` bytes in ``folder``, which may come from a stranger.

    Raises InputError for a link out of the folder, a device, a pipe, a larger file, or if there is no such file.
    """
    try:
        real = path.resolve(strict=True)
        if real.is_relative_to(folder.resolve()) and real.is_file() and real.stat().st_size <= most:
            return path
    except (OSError, RuntimeError):  # a RuntimeError for links in a circle
        pass
    size = "" if most == math.inf else f" of at most {most / 2**20:.0f} MiB"
    raise InputError(f"{path}: must be a regular file{size} inside {folder}, and no link to elsewhere")


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; {} if it is missing or damaged."""
    try:
        content = json.loads(checked_file(path, path.parent).read_text())
    except (OSError, RecursionError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts by their dotted names."""
    if not isinstance(node, dict):
        return {prefix: node}
    parts = [flatten(child, f"{prefix}.{name}" if prefix else str(name)) for name, child in node.items()]
    return {key: value for part in parts for key, value in part.items()}


def is_plain(path: Path) -> bool:
    """Return whether ``path`` is a folder that ``write_plain`` has written."""
    return (path / WEIGHTS).is_file() and (path / CONTENT).is_file()


def checkpoint_path(path: str | Path, name: str = "best") -> Path:
    """Return the file of a checkpoint: ``path`` itself, or ``best.ckpt`` or ``last.ckpt`` of the run folder ``path``.

    A folder that ``mtl card`` has written is returned as it is. ``name``: which of the two to prefer, unless the run
    has tested ``last.ckpt``; the other one is returned if it is the only one. Raises InputError for a link out of the
    folder.
    """
    path = Path(unescape_interpolation(str(path)))
    if name == "best" and (path / CONFIG).is_file() and TESTS_LAST.search((path / CONFIG).read_text()):
        name = "last"  # the checkpoint that was tested has what was learnt after the training
    candidates = [path / CHECKPOINTS / f"{stem}.ckpt" for stem in (name, "best", "last")] if path.is_dir() else []
    return next((checked_file(file, path, math.inf) for file in candidates if file.is_file()), path)


def find_checkpoint(path: str | Path, name: str = "best") -> Path:
    """Return the ``checkpoint_path``; raise InputError if there is no such file, or folder of ``mtl card``."""
    path = checkpoint_path(path, name)
    exists = path.is_file() or is_plain(path)
    none_yet = f"{path}: this run was stopped before its first checkpoint; begin it again with the same command"
    require(exists or not (path / CONFIG).is_file(), none_yet)
    require(exists, f"checkpoint {path}: no such file; give a run folder, or RUN/{CHECKPOINTS}/last.ckpt")
    return path
