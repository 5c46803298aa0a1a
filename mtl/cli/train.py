"""Train, test and report: ``mtl train gate=comet data=movielens``, or ``python train.py`` in a checkout.

Words are the overrides of the command line, such as ``gate=comet``.
Slow imports are inside functions, so that ``--help`` and a mistyped option are answered at once.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from mtl.cli import errors, resolvers
from mtl.cli.explain import CONF, explain
from mtl.cli.help import print_help
from mtl.runs import commands

resolvers.register()
log = logging.getLogger("mtl")

USAGE = """
Train a network, test its best checkpoint and save the results. With -m, do
so for each combination of values.

  {program} gate=comet data=movielens optimizer.lr=3e-4
  {program} -m gate=comet,topk seed=1,2,3
  {program} ckpt=outputs/DATE/RUN
  {program} gate=topk --help      also shows the options of gate=topk
"""


class Start:
    """The command line, the checkpoint that it starts from (read only once), and the words from this checkpoint."""

    argv: tuple[str, ...] = ()
    checkpoint: Any = None
    words: tuple[str, ...] = ()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program with the words of the command line; print every error as one message."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        return print_help(USAGE.format(program=" ".join(commands.program())), CONF / "train.yaml", given)
    commands.GIVEN[:] = given
    Start.argv, Start.checkpoint, Start.words = tuple(sys.argv), None, ()
    try:
        with errors.as_one_message(lambda error: sentence_for(error, given)):
            os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors instead of printing tracebacks
            if not resolvers.RANK.isdecimal():
                sys.exit(f"error: RANK={resolvers.RANK}: this environment variable must be the number of this process")
            read_start(given)
            # argparse needs flags and their values first
            sys.argv[1:] = sorted([*Start.words, *given], key=is_override)
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")(task)()
    finally:
        sys.argv[:] = Start.argv


def is_override(word: str) -> bool:
    """Return whether a word of the command line is a Hydra override, not a flag or its value."""
    return not word.startswith("-") and ("=" in word or word.startswith("~"))


def read_start(given: Sequence[str]) -> None:
    """Read the checkpoint that the words ``given`` start from, and the words of its run that Hydra needs as well."""
    named = {word.partition("=")[0]: word for word in given if word.startswith(("ckpt=", "evaluate="))}
    if len(named) != 1 or {"-m", "--multirun"} & set(given):
        return
    [(option, word)] = named.items()
    try:
        path = OverridesParser.create().parse_override(word).value()
    except HydraException:  # reported when Hydra reads it
        return
    if not isinstance(path, str):
        return
    from mtl.checkpoints.files import read, read_to_resume
    from mtl.checks import require
    from mtl.config.resume import stored_words, words_in_force
    from mtl.files.records import COMMAND, read_json

    Start.checkpoint = read_to_resume(path) if option == "ckpt" else read(path)
    folder = resolvers.run_folder(str(Start.checkpoint.path))
    in_memory = option == "ckpt" and folder and read_json(folder / COMMAND).get("rows")
    python = f"mtl.fit(frame, tasks, resume={str(folder)!r}) goes on with it"
    require(not in_memory, f"{word}: this run has its rows from Python; {python}")
    own = [word for word in given if is_override(word)]
    Start.words = tuple(words_in_force(stored_words(Start.checkpoint), own)[0])


def task(cfg: DictConfig) -> float | None:
    """Run ``cfg``, which Hydra composed; a signal ends the run with one message."""
    from mtl.runs.signals import Stopped, stop_signals

    if Start.argv:  # empty in a job that a launcher runs in a separate process
        sys.argv[:] = Start.argv  # Lightning starts the other processes of the run with it
    try:
        with stop_signals.listening():
            return start(cfg, HydraConfig.get(), Start.checkpoint, Start.words)
    except Stopped as stop:
        log.warning("%s", stop)
        sys.exit(128 + stop.number if resolvers.is_first() else 0)
    except Exception as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN:  # Hydra continues with the next job and raises this at the end
            raise
        errors.end(error, sentence_for(error, commands.GIVEN))


def start(cfg: DictConfig, hydra_cfg: Any, checkpoint: Any = None, stored: Sequence[str] = ()) -> float | None:
    """Lock the run folder and run; ``stored``: the words that come from ``checkpoint``."""
    from mtl.checkpoints.files import read, read_to_resume
    from mtl.checkpoints.trust import classes_in
    from mtl.checks import require
    from mtl.cli.folder import claim, release
    from mtl.cli.run import run
    from mtl.config.check import check
    from mtl.config.resume import is_harmless, resumed_config
    from mtl.files.records import CHECKPOINTS, COMMAND, CONFIG, RESULTS, read_json
    from mtl.files.writing import write_json
    from mtl.runs.console import make_lasting

    make_lasting()
    if not resolvers.is_first():
        logging.disable(logging.WARNING)
    words = [word for word in hydra_cfg.overrides.task if word not in stored]
    local = [word for word in words if not is_harmless(word) and not word.startswith(("ckpt=", "evaluate="))]
    commands.KEPT[:] = [*searched(hydra_cfg), *local]
    folder = Path(hydra_cfg.runtime.output_dir)
    if hydra_cfg.mode == RunMode.MULTIRUN and read_json(folder / COMMAND).get("overrides") == words:
        record, last = read_json(folder / RESULTS), folder / CHECKPOINTS / "last.ckpt"
        if record:
            log.info("%s has finished before", folder)
            best = record.get(f"best_{cfg.monitor.replace('/', '_')}")
            return float(record["test"]["loss"] if best is None else best)
        if last.exists() and not (cfg.ckpt or cfg.evaluate):
            cfg.ckpt = str(last)
    resumed = resolvers.run_folder(cfg.ckpt) if cfg.ckpt else None
    same_folder = resumed is not None and resumed.resolve() == folder.resolve()
    lock = claim(folder, same_folder) if resolvers.is_first() else None
    try:
        if resolvers.is_first() and not same_folder:
            seed = cfg.seed if isinstance(cfg.seed, int) else None  # not checked yet
            choices = choices_of(hydra_cfg, cfg.get("logger"))
            write_json(folder / COMMAND, {"overrides": words, "choices": choices, "seed": seed})
        check(cfg, words)
        each = "-m would run the whole sweep in each. Use one device per job (trainer=default), or leave out -m"
        why_one_process = each if hydra_cfg.mode == RunMode.MULTIRUN else ""
        keys = {word.partition("=")[0] for word in words}
        given = [name for name in ("ckpt", "evaluate", "start_from") if name in keys and cfg[name]]
        require(len(given) < 2, f"{' and '.join(given)}: give one or the other")
        if not (cfg.ckpt or cfg.evaluate):
            return run(recorded(cfg, hydra_cfg, words), why_one_process=why_one_process)
        if checkpoint is None:
            checkpoint = read_to_resume(cfg.ckpt) if cfg.ckpt else read(cfg.evaluate)
        ckpt, evaluate = cfg.ckpt, bool(cfg.evaluate)
        trust = [*(cfg.trust or []), *classes_in(folders_of(hydra_cfg))]
        cfg = resumed_config(checkpoint, words, composed, trust, evaluate)
        cfg.ckpt = ckpt
        return run(cfg, checkpoint, why_one_process)
    except Exception as error:
        is_job = hydra_cfg.mode == RunMode.MULTIRUN  # Hydra shows its error only after all jobs
        if resolvers.is_first() and (is_job or (folder / CONFIG).exists()):
            message = errors.explain(error)[0].removeprefix("error: ")
            log.error("%s", message, extra={"file_only": not is_job})  # main() prints the error of a single run
        raise
    finally:
        if lock is not None:
            release(folder, lock, delete_empty=hydra_cfg.mode == RunMode.RUN)  # a sweep still logs there


def folders_of(hydra_cfg: DictConfig) -> list[str]:
    """Return the folders of ``--config-dir``."""
    return [source.path for source in hydra_cfg.runtime.config_sources if source.provider == "command-line"]


def searched(hydra_cfg: DictConfig) -> list[str]:
    """Return the words that make a command find the YAML files of ``--config-dir``."""
    folders = [word for path in folders_of(hydra_cfg) for word in ("--config-dir", path)]
    return [*folders, *(word for word in hydra_cfg.overrides.hydra if word.startswith("hydra.searchpath="))]


def composed(words: Sequence[str]) -> DictConfig:
    """Compose ``conf/`` with ``words``, and record the words and choices in the configuration, as for a checkpoint."""
    cfg = hydra.compose("train", list(words), return_hydra_config=True)
    with open_dict(cfg):
        hydra_cfg = cfg.pop("hydra")
    return recorded(cfg, hydra_cfg, words)


def recorded(cfg: DictConfig, hydra_cfg: DictConfig, words: Sequence[str]) -> DictConfig:
    """Return ``cfg`` with its harmless ``words``, for a resumed run to compose, and its choices of config groups."""
    from mtl.config.resume import is_harmless

    with open_dict(cfg):
        cfg.words = [word for word in words if is_harmless(word)]
        cfg.choices = choices_of(hydra_cfg, cfg.get("logger"))
    return cfg


def choices_of(hydra_cfg: DictConfig, loggers: Iterable[str] | None) -> dict[str, str | list[str] | None]:
    """Return the option chosen from each config group, without the experiment, which is only a set of values.

    ``loggers``: the names of the loggers, since Hydra does not report the choice if there are several.
    """
    chosen = hydra_cfg.runtime.choices.items()
    choices = {name: option for name, option in chosen if not name.startswith("hydra/") and name != "experiment"}
    return choices | {"logger": choices.get("logger") or list(loggers or ()) or None}


def sentence_for(error: BaseException, given: Sequence[str]) -> str | None:
    """Explain which word of the command line caused ``error``; None if it has another cause."""
    missing = re.sub("/(?=[^/]*$)", "=", str(getattr(error, "missing_cfg_file", "")))
    if isinstance(error, MissingConfigException) and missing in Start.words:
        file = f"{error.missing_cfg_file}.yaml"
        return f"the checkpoint has {missing}, a file of your own: add --config-dir FOLDER, which holds {file}"
    return explain(error, [word for word in given if not word.startswith("-")])
