"""Build the commands that messages print, ready to paste into a shell."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtl.overrides import key_of, quote_path, remove_list

RUN_FOLDER = {"paths.run_dir", "hydra.run.dir"}  # options that say where one run writes


@dataclass(frozen=True)
class CommandLine:
    """A command line: all of its ``arguments``, its ``overrides`` such as ``gate=topk``, and its flags.

    ``searched``: where Hydra finds further YAML files.
    """

    arguments: Sequence[str] = ()
    overrides: Sequence[str] = ()
    searched: Sequence[str] = ()
    help: bool = False
    multirun: bool = False
    cfg: str | None = None
    resolve: bool = False
    package: str | None = None

    def folders(self) -> list[str]:
        """Return the folders of the user's own YAML files, whose classes are trusted."""
        return [path.removeprefix("file://") for path in self.searched if path.startswith("file://")]


def run_command(overrides: Sequence[str], searched: Sequence[str] = ()) -> str:
    """Return the command of a run of ``overrides``, in which ``hydra.searchpath`` becomes ``--config-dir``.

    ``searched``: further folders of YAML files.
    """
    others, paths = remove_list(overrides, "hydra.searchpath")
    return shlex.join([*program(), *config_dirs([*searched, *paths]), *others])


def config_dirs(searched: Iterable[str]) -> list[str]:
    """Return the flags that name the folders of YAML files in ``searched``."""
    folders = [relative_to_cwd(path.removeprefix("file://")) for path in searched]
    return [argument for folder in folders for argument in ("--config-dir", folder)]


def relative_to_cwd(path: str | Path) -> str:
    """Return a path below the working folder without the name of this folder."""
    return str(path).removeprefix(f"{Path.cwd()}/")


def sweep_command(overrides: Iterable[str], folder: str | Path) -> str:
    """Return the command that continues the sweep of ``overrides`` in ``folder``."""
    overrides = [override for override in overrides if key_of(override) not in ("hydra.mode", "hydra.sweep.dir")]
    return shlex.join([*program(), *overrides, f"hydra.sweep.dir={quote_path(folder)}"])


def program(name: str = "train") -> list[str]:
    """Return the arguments that start the command ``name`` in the same way as this process was started.

    These are ``mtl train``, ``python -m mtl train``, or ``python`` and the path of train.py.
    """
    script = Path(sys.argv[0])
    if script.name == "train.py" and name == "train":
        return ["python", script.name if script.absolute().parent == Path.cwd() else str(script)]
    return ["mtl", name] if script.suffix != ".py" and script.stem == "mtl" else ["python", "-m", "mtl", name]
