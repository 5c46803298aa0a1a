"""Find the file of a checkpoint. Imports nothing slow."""

from __future__ import annotations

import math
import re
from pathlib import Path

from mtl.checks import require
from mtl.files.escaping import unescape_interpolation
from mtl.files.run_files import CHECKPOINTS, CONFIG, checked_file

WEIGHTS, CONTENT = "model.safetensors", "model.json"  # of a folder that mtl card has written
TESTS_LAST = re.compile(r"^test_checkpoint: last$", re.MULTILINE)  # in the configuration of a run


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
    require(exists, f"checkpoint {path}: no such file; give a run folder, or RUN/{CHECKPOINTS}/last.ckpt")
    return path
