"""Train, test and report: ``mtl train gate=comet data=movielens``, or ``python train.py`` in a checkout.

Words are the overrides of the command line, such as ``gate=comet``.
Slow imports are inside functions, so that ``--help`` and a mistyped option are answered at once.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig

from mtl.checks import require
from mtl.cli import errors
from mtl.cli.command_line import read_line
from mtl.cli.help import print_help
from mtl.config import resolvers
from mtl.config.compose import CONF, choices_of, composed, installed_data, opened, recorded, with_default_recipe
from mtl.config.early import check_early, check_resumed, check_sweep
from mtl.config.hydra_errors import explain
from mtl.config.portable import is_portable
from mtl.files.run_files import CHECKPOINTS, COMMAND, CONFIG, read_json
from mtl.files.writing import write_json
from mtl.overrides import key_of, value_of
from mtl.pipeline.run_lock import lock_run_folder, unlock_run_folder
from mtl.runs import commands
from mtl.runs.caller import Caller
from mtl.runs.commands import CommandLine
from mtl.runs.console import protect_streams
from mtl.runs.signals import Stopped
from mtl.runs.trial import TrialEnd

log = logging.getLogger("mtl")

USAGE = """
Train a network, test its best checkpoint and save the results. With -m, do
so for each combination of values.

  {program} gate=comet data=movielens optimizer.lr=3e-4
  {program} -m gate=comet,topk seed=1,2,3
  {program} ckpt=outputs/DATE/RUN
  {program} gate=topk --help      also shows the options of gate=topk
"""


@dataclass(frozen=True)
class Source:
    """The checkpoint that a command line starts from, read only once, and the overrides that come from its run."""

    checkpoint: Any = None
    overrides: Sequence[str] = ()


def main(arguments: Sequence[str] | None = None, trial: TrialEnd | None = None) -> None:
    """Run the program with the overrides of the command line; print every error as one message.

    ``trial``: the pipe to the worker that started the run, if one did.
    """
    line, source = CommandLine(), Source()
    with errors.one_line_errors(lambda error: sentence_for(error, line, source)):
        line = read_line(sys.argv[1:] if arguments is None else arguments)
        if line.help:
            usage = USAGE.format(program=" ".join(commands.program()))
            return print_help(usage, CONF / "train.yaml", with_default_recipe(line.overrides, line.searched))
        if not resolvers.RANK.isdecimal():
            sys.exit(f"error: RANK={resolvers.RANK}: this environment variable must be the number of this process")
        folders = [override for override in line.overrides if key_of(override) == "paths.run_dir"]
        if line.multirun and folders:
            advice = "each run of a sweep has a folder of its own; hydra.sweep.dir= is that of all"
            sys.exit(f"error: {folders[0]}: {advice}")
        with opened(line.searched) as hydra:
            if not line.multirun:
                source = read_start(line.overrides)
            overrides = [*source.overrides, *with_default_recipe(line.overrides, line.searched)]
            job = partial(task, Caller(line, trial=trial), source)
            if line.cfg:
                return hydra.show_cfg("train", overrides, line.cfg, line.package, line.resolve)
            if line.multirun:
                check_sweep(overrides)
                hydra.multirun("train", job, [*overrides, "hydra.mode=MULTIRUN"])
            else:
                hydra.run("train", job, overrides)


def read_start(overrides: Sequence[str]) -> Source:
    """Read the checkpoint that ``overrides`` start from, and the overrides of its run that Hydra needs as well."""
    named = {key: override for override in overrides if (key := key_of(override)) in ("ckpt", "evaluate")}
    if len(named) != 1:
        return Source()
    [(option, override)] = named.items()
    try:
        path = value_of(override)
    except HydraException:  # reported when Hydra reads it
        return Source()
    if not isinstance(path, str):
        return Source()
    check_resumed(path, overrides)
    from mtl.checkpoints.files import read, read_to_resume
    from mtl.config.resume import group_overrides, use_installed_data

    checkpoint = read_to_resume(path) if option == "ckpt" else read(path)
    folder = resolvers.run_folder(str(checkpoint.path))
    in_memory = option == "ckpt" and folder and read_json(folder / COMMAND).get("rows")
    python = f"mtl.fit(frame, tasks, resume={str(folder)!r}) goes on with it"
    require(not in_memory, f"{override}: this run has its rows from Python; {python}")
    use_installed_data(checkpoint, installed_data())
    return Source(checkpoint, group_overrides(checkpoint, overrides))


def task(caller: Caller, source: Source, cfg: DictConfig) -> float | None:
    """Run ``cfg``, which Hydra composed; a signal ends the run with one message."""
    try:
        with caller.signals.listening():
            return start(cfg, HydraConfig.get(), caller, source)
    except Stopped as stop:
        log.warning("%s", stop)
        sys.exit(128 + stop.number if resolvers.is_first() else 0)
    except Exception as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN:  # Hydra continues with the next job and raises this at the end
            raise
        errors.end(error, sentence_for(error, caller.line, source))


def start(cfg: DictConfig, hydra_cfg: Any, caller: Caller, source: Source) -> float | None:
    """Lock the run folder and run ``cfg``, which is a job of the ``caller``."""
    protect_streams()
    if not resolvers.is_first():
        logging.disable(logging.WARNING)
    overrides = list(hydra_cfg.overrides.task[len(source.overrides) :])
    options = [override for override in overrides if key_of(override) not in ("ckpt", "evaluate")]
    caller = replace(caller, local=[override for override in options if not is_portable(override)])
    folder = Path(hydra_cfg.runtime.output_dir)
    if hydra_cfg.mode == RunMode.MULTIRUN and read_json(folder / COMMAND).get("overrides") == overrides:
        from mtl.report.runs import finished_results

        last = folder / CHECKPOINTS / "last.ckpt"
        if results := finished_results(folder):
            log.info("%s has finished before", folder)
            loss = results.measured.value("", "loss")
            return loss if results.best is None else results.best
        if last.exists() and not (cfg.ckpt or cfg.evaluate):
            cfg.ckpt = str(last)
    resumed = resolvers.run_folder(cfg.ckpt) if cfg.ckpt else None
    same_folder = resumed is not None and resumed.resolve() == folder.resolve()
    lock = lock_run_folder(folder, same_folder, caller) if resolvers.is_first() else None
    try:
        if resolvers.is_first() and not same_folder:
            seed = cfg.seed if isinstance(cfg.seed, int) else None  # not checked yet
            choices = choices_of(hydra_cfg, cfg.get("logger"))
            write_json(folder / COMMAND, {"overrides": overrides, "choices": choices, "seed": seed})
        keys = set(map(key_of, overrides))
        starts = [name for name in ("ckpt", "evaluate", "start_from") if name in keys and cfg[name]]
        require(len(starts) < 2, f"{' and '.join(starts)}: give one or the other")
        check_early(cfg)
        from mtl.checkpoints.files import read, read_to_resume
        from mtl.checkpoints.trust import classes_in
        from mtl.config.resume import resumed_config
        from mtl.pipeline.run import run

        if not (cfg.ckpt or cfg.evaluate):
            return run(recorded(cfg, hydra_cfg, overrides), caller=caller)
        checkpoint = source.checkpoint
        if checkpoint is None:
            checkpoint = read_to_resume(cfg.ckpt) if cfg.ckpt else read(cfg.evaluate)
        ckpt, evaluate = cfg.ckpt, bool(cfg.evaluate)
        trust = [*(cfg.trust or []), *classes_in(caller.line.folders())]
        cfg = resumed_config(checkpoint, overrides, composed, trust, evaluate)
        cfg.ckpt = ckpt
        return run(cfg, caller=caller, checkpoint=checkpoint)
    except Exception as error:
        is_job = hydra_cfg.mode == RunMode.MULTIRUN  # Hydra shows its error only after all jobs
        if resolvers.is_first() and (is_job or (folder / CONFIG).exists()):
            message = errors.explain(error)[0].removeprefix("error: ")
            log.error("%s", message, extra={"file_only": not is_job})  # main() prints the error of a single run
        raise
    finally:
        if lock is not None:
            unlock_run_folder(folder, lock, delete_empty=hydra_cfg.mode == RunMode.RUN)  # a sweep still logs there


def sentence_for(error: BaseException, line: CommandLine, source: Source) -> str | None:
    """Explain which override of the command line caused ``error``; None if it has another cause."""
    missing = re.sub("/(?=[^/]*$)", "=", str(getattr(error, "missing_cfg_file", "")))
    if isinstance(error, MissingConfigException) and missing in source.overrides:
        file = f"{error.missing_cfg_file}.yaml"
        return f"the checkpoint has {missing}, a file of your own: add --config-dir FOLDER, which holds {file}"
    return explain(error, line.overrides)
