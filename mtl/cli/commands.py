"""Commands that messages print: pasted into a shell, they do what the message says."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

# Words of this command line without which a run that starts from one of its checkpoints would have other folders,
# servers or classes; ``train.py`` sets them
KEPT: list[str] = []


def command(option: str, checkpoint: str | Path) -> str:
    """Return the command that starts from ``checkpoint``, as in ``python train.py ckpt=...``."""
    return shlex.join(["python", program(), *KEPT, f"{option}={quoted(checkpoint)}"])


def sweep_command(words: Iterable[str], folder: str | Path) -> str:
    """Return the command that goes on with the sweep of ``words`` in ``folder``."""
    words = [word for word in words if not word.startswith("hydra.sweep.dir=")]
    return shlex.join(["python", program(), *words, f"hydra.sweep.dir={quoted(folder)}"])


def program() -> str:
    """Return the path of train.py, as it was given where a shell would not find it in its folder."""
    given = Path(sys.argv[0])
    return str(given) if given.name == "train.py" and given.absolute().parent != Path.cwd() else "train.py"


def quoted(path: str | Path) -> str:
    """Return a path as a value that Hydra reads as this very text."""
    text = str(path)
    if re.fullmatch(r"[\w./-]+", text):
        return text
    return "'" + re.sub(r"(\\*)('|$)", lambda end: end[1] * 2 + end[2].replace("'", "\\'"), text) + "'"
