"""Shared parts of ``mtl tune`` and ``mtl reproduce``, which start many runs of ``mtl train`` from one command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from mtl.checks import InputError
from mtl.cli import main
from mtl.cli.compose import CONF, composed, opened
from mtl.cli.errors import one_line_errors
from mtl.cli.explain import explain
from mtl.cli.help import print_help
from mtl.cli.line import read_line
from mtl.overrides import key_of, write_value
from mtl.runs.commands import CommandLine

PROGRAM = main.main  # what the process of a run does
FOLDERS = {"paths.run_dir", "hydra.run.dir"}
BOTH = "hydra.searchpath"  # option of the study and of its runs: folders of further YAML files


def own_options(file: str, *others: str) -> list[str]:
    """Return the options of a study in ``conf/FILE``, without its sections ``others``."""
    return [str(name) for name in OmegaConf.load(CONF / file) if name not in ("defaults", *others)]


def split_overrides(overrides: Sequence[str], options: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides that set ``options``, and those for runs. The last one of an option counts."""
    overrides_by_key = {
        ("~" if override.startswith("~") else "") + key_of(override): override for override in overrides
    }  # ~x and +x=1 are two
    for key in FOLDERS & overrides_by_key.keys():
        raise InputError(f"{overrides_by_key[key]}: each run has a folder of its own; leave this option out")
    ours = [override for key, override in overrides_by_key.items() if key.split(".")[0] in options or key == BOTH]
    return ours, [override for key, override in overrides_by_key.items() if key == BOTH or override not in ours]


@contextmanager
def explained(overrides: Sequence[str]) -> Iterator[None]:
    """Raise InputError if one of ``overrides`` sets an option, or makes a choice, that does not exist."""
    try:
        yield
    except Exception as error:
        sentence = explain(error, overrides)
        if sentence is None:
            raise
        raise InputError(sentence) from error


def check_names(overrides: Sequence[str]) -> None:
    """Raise InputError if one of ``overrides`` is mistyped: at once, since this imports nothing slow."""
    with explained(overrides):
        hydra.compose("train", list(overrides))


def first_run(overrides: Sequence[str]) -> DictConfig:
    """Return the configuration of a run of ``overrides``, with every value checked."""
    from mtl.config.check import check
    from mtl.config.patterns import with_columns

    with explained(overrides):
        cfg = composed(overrides)
    cfg.run_name, cfg.paths.run_dir = "trial", "."
    check(cfg)
    with_columns(cfg)
    return cfg


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
