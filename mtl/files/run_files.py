"""The names of the files in a run folder, and functions that read them. Imports nothing slow."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mtl.checks import InputError

LOCK = ".lock"
COMMAND = "command.json"  # the overrides, choices and seed of a new run, written first of all
CONFIG = "config.yaml"  # written before a run trains
LOG = "train.log"
CHECKPOINTS = "checkpoints"  # the folder of best.ckpt and last.ckpt
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
