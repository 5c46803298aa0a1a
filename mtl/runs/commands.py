"""Build the commands that messages print, ready to paste into a shell."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from mtl.checks import require
from mtl.files.literals import escaped

PYTHON: list[Path | None] = []  # the folder of the run that mtl.fit trains, if it does; None: a temporary one


@dataclass(frozen=True)
class Line:
    """A command line: all that is ``given``, its overrides (``words``) such as ``gate=topk``, and its flags.

    ``searched``: where Hydra finds further YAML files. ``local``: the words that a run started from a checkpoint of
    this one has to repeat, since a checkpoint keeps no folders, servers or classes.
    """

    given: Sequence[str] = ()
    words: Sequence[str] = ()
    local: Sequence[str] = ()
    searched: Sequence[str] = ()
    help: bool = False
    multirun: bool = False
    cfg: str | None = None
    resolve: bool = False
    package: str | None = None

    def folders(self) -> list[str]:
        """Return the folders of the user's own YAML files, whose classes are trusted."""
        return [path.removeprefix("file://") for path in self.searched if path.startswith("file://")]

    def kept(self) -> list[str]:
        """Return the words and flags that the command of a run started from a checkpoint needs."""
        return [*config_dirs(self.searched), *self.local]


LINE = Line()  # that of this process


def key_of(word: str) -> str:
    """Return the name of the option or config group that a word such as ``+gate.k=4`` sets."""
    return word.lstrip("+~").partition("=")[0]


def command(option: str, checkpoint: str | Path) -> str:
    """Return the command that starts from ``checkpoint``, as in ``python train.py ckpt=...``, or the call in Python."""
    if PYTHON:
        call = f"mtl.fit(frame, tasks, resume={str(PYTHON[0])!r})"
        return call if option == "ckpt" else f"mtl.load({str(checkpoint)!r}).evaluate(frame)"
    return shlex.join([*program(), *LINE.kept(), f"{option}={quoted(near(checkpoint))}"])


def run_command(words: Sequence[str]) -> str:
    """Return the command of a run of ``words``, in which ``hydra.searchpath`` becomes ``--config-dir``."""
    others, searched = without(words, "hydra.searchpath")
    return shlex.join([*program(), *config_dirs(searched), *others])


def command_of(words: Sequence[str]) -> str:
    """Return the command of this process's run of ``words``, with the folders of YAML files that it was given."""
    return shlex.join([*program(), *config_dirs(LINE.searched), *words])


def config_dirs(searched: Iterable[str]) -> list[str]:
    """Return the flags that name the folders of YAML files in ``searched``."""
    return [word for path in searched for word in ("--config-dir", near(path.removeprefix("file://")))]


def near(path: str | Path) -> str:
    """Return a path below the working folder without the name of this folder."""
    return str(path).removeprefix(f"{Path.cwd()}/")


def without(words: Sequence[str], option: str) -> tuple[list[str], list[str]]:
    """Return the ``words`` that do not set ``option``, and the list that the last of the others sets it to."""
    own = [word for word in words if key_of(word) == option]
    value: Any = OverridesParser.create().parse_override(own[-1]).value() if own else None
    require(isinstance(value, list | None), f"{' '.join(own)}: must be a list, as in {option}=[...]")
    return [word for word in words if word not in own], value or []


def sweep_command(words: Iterable[str], folder: str | Path) -> str:
    """Return the command that continues the sweep of ``words`` in ``folder``."""
    words = [word for word in words if key_of(word) != "hydra.sweep.dir"]
    return shlex.join([*program(), *words, f"hydra.sweep.dir={quoted(folder)}"])


def program(name: str = "train") -> list[str]:
    """Return the words that start the command ``name`` in the same way as this process was started.

    These are ``mtl train``, ``python -m mtl train``, or ``python`` and the path of train.py.
    """
    given = Path(sys.argv[0])
    if given.name == "train.py" and name == "train":
        return ["python", given.name if given.absolute().parent == Path.cwd() else str(given)]
    return ["mtl", name] if given.suffix != ".py" and given.stem == "mtl" else ["python", "-m", "mtl", name]


def quoted(path: str | Path) -> str:
    """Quote a path so that Hydra reads it unchanged, and no part of it is an interpolation."""
    text: str = escaped(str(path))
    if re.fullmatch(r"[\w./-]+", text):
        return text
    return in_quotes(text)


def hydra_text(value: Any, text: Callable[[str], str] | None = None) -> str:
    """Return ``value`` as Hydra's grammar writes it; strings are written by ``text``, by default in quotes.

    Numbers get the shortest text that reads as the same number.
    """
    text = text or in_quotes
    if isinstance(value, list):
        return f"[{','.join(hydra_text(child, text) for child in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{hydra_text(child, text)}' for name, child in value.items())}}}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return text(value) if isinstance(value, str) else repr(value)


def in_quotes(text: str) -> str:
    """Return ``text`` in quotes, inside which Hydra reads every character as it is."""
    return "'" + re.sub(r"(\\*)('|$)", lambda end: end[1] * 2 + end[2].replace("'", "\\'"), text) + "'"
