"""Commands that messages print: pasted into a shell, they do what the message says."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

GIVEN: list[str] = []  # the words of this command line
# Those of them without which a run that starts from one of its checkpoints would have other folders, servers or classes
KEPT: list[str] = []


def command(option: str, checkpoint: str | Path) -> str:
    """Return the command that starts from ``checkpoint``, as in ``python train.py ckpt=...``."""
    return shlex.join([*program(), *KEPT, f"{option}={quoted(checkpoint)}"])


def sweep_command(words: Iterable[str], folder: str | Path) -> str:
    """Return the command that goes on with the sweep of ``words`` in ``folder``."""
    words = [word for word in words if not word.startswith("hydra.sweep.dir=")]
    return shlex.join([*program(), *words, f"hydra.sweep.dir={quoted(folder)}"])


def program(name: str = "train") -> list[str]:
    """Return the words that start the program ``name``, in the way in which this process was started.

    That is ``mtl train``, ``python -m mtl train``, or the file train.py with its folder unless it is in this one.
    """
    given = Path(sys.argv[0])
    if given.name == "__main__.py" and given.parent.name == "mtl":
        return ["python", "-m", "mtl", name]
    if given.suffix != ".py" and given.stem == "mtl":
        return ["mtl", name]
    beside = given.with_name(f"{name}.py")
    elsewhere = given.name in ("train.py", "tune.py", "reproduce.py") and given.absolute().parent != Path.cwd()
    return ["python", str(beside) if elsewhere else beside.name]


def quoted(path: str | Path) -> str:
    """Return a path as a value that Hydra reads as this very text."""
    text = str(path)
    if re.fullmatch(r"[\w./-]+", text):
        return text
    return "'" + re.sub(r"(\\*)('|$)", lambda end: end[1] * 2 + end[2].replace("'", "\\'"), text) + "'"
