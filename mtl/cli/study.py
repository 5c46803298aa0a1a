"""Shared parts of ``mtl tune`` and ``mtl reproduce``, which start many runs of ``mtl train`` from one command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra

from mtl.cli.command_line import read_line
from mtl.cli.errors import one_line_errors
from mtl.cli.help import print_help
from mtl.config.compose import BOTH, CONF, opened
from mtl.config.early import check_early
from mtl.config.hydra_errors import explain, explained
from mtl.overrides import write_value
from mtl.runs.commands import CommandLine


def check_names(overrides: Sequence[str], command_options: Sequence[str]) -> None:
    """Raise InputError if one of the runs' ``overrides`` is mistyped: at once, since this imports nothing slow.

    ``command_options``: the options of the command itself, of which one may be meant.
    """
    with explained(overrides, command_options):
        cfg = hydra.compose("train", list(overrides))
    check_early(cfg)


def start(file: str, usage: str, run: Callable[[list[str]], Any], arguments: Sequence[str] | None = None) -> None:
    """Show the help of ``conf/FILE``, or call ``run`` with the overrides of the command line, with Hydra set up."""
    name, line = Path(file).stem, CommandLine()

    def sentence(error: BaseException) -> str | None:
        if isinstance(error, ModuleNotFoundError) and error.name in ("optuna", "sqlalchemy"):
            return f"mtl {name} needs the package {error.name}: pip install -e '.[tune]'"
        return explain(error, line.overrides)

    with one_line_errors(sentence):
        line = read_line(sys.argv[1:] if arguments is None else arguments, name)
        if line.help:
            return print_help(usage, CONF / file, line.overrides)
        # As an override, since the storage of a study keeps the overrides of its runs
        searched = [f"{BOTH}={write_value(list(line.searched))}"] if line.searched else []
        with opened():
            run([*line.overrides, *searched])
