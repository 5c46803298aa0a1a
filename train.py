"""Train, test and report: ``python train.py gate=comet data=movielens``. All options are in ``conf/``.

Slow imports are inside functions, so that ``--help`` and a mistyped option are answered at once.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from mtl.cli import resolvers
from mtl.cli.explain import explain
from mtl.cli.resolvers import run_folder

if TYPE_CHECKING:
    from pytorch_lightning import LightningDataModule, LightningModule, Trainer

resolvers.register()
log = logging.getLogger("mtl")

HARMLESS_WARNINGS = (
    ".*does not have many workers.*",  # batches are slices of tensors in memory: workers would only copy them
    ".*callbacks used to create the checkpoint need to be provided.*",  # a resumed run may have another schedule
    ".*Checkpoint directory .* exists and is not empty.*",  # a resumed run writes to its own folder
    ".*isinstance.treespec, LeafSpec.*",  # inside Lightning
    ".*smaller than the logging interval.*",  # with little data, the values per epoch suffice
    ".*Grad strides do not match bucket view strides.*",  # the stride of a dimension of size 1 means nothing
    ".*broadcast_buffers. is deprecated.*",  # its successor is not in every version that we accept
    ".*recommended to use .self.log.*sync_dist.*",  # the logged values are already sums over all processes
)
NOT_OURS = ("paper", "pruner", "sampler", "study")  # folders of conf/ whose choices only other programs make
LENT: list[str] = []  # words of the command line that come from the checkpoint, see ``data_of_checkpoint``


def run(cfg: DictConfig) -> float | None:
    """Train ``cfg``'s network, or only test a checkpoint, and write results; return the best monitored value."""
    from mtl import distributed, memory

    with warnings.catch_warnings():
        for message in HARMLESS_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        memory.keep_freed_memory()
        try:
            with contextlib.ExitStack() as ending:
                return _run(cfg, ending)
        finally:
            distributed.destroy_process_group()


def _run(cfg: DictConfig, ending: contextlib.ExitStack) -> float | None:
    import pytorch_lightning as pl

    from mtl import distributed
    from mtl.checkpoints.files import read_whole
    from mtl.checkpoints.restore import restore_data
    from mtl.checkpoints.start import start_from
    from mtl.checkpoints.teacher import read_teacher
    from mtl.checks import require
    from mtl.cli import results
    from mtl.cli.threads import use_threads
    from mtl.config import build, schema
    from mtl.config.resume import check_batches
    from mtl.records import CONFIG, RESULTS
    from mtl.writing import write_json, write_text

    schema.check(cfg)
    software = results.versions()  # now, since files may change while it trains
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    folder = Path(cfg.paths.run_dir)
    build.check_options(cfg)
    teacher = read_teacher(cfg)
    use_threads(cfg.get("threads"))
    data, trainer = build.build_data(cfg), build.build_trainer(cfg)
    for logger in trainer.loggers:
        if hasattr(logger, "close"):  # it stays open from the training to the test
            ending.callback(logger.close)
    require(
        trainer.world_size == 1 or HydraConfig.get().mode != RunMode.MULTIRUN,
        f"-m with {trainer.world_size} processes: each would run the whole sweep again. Use one device per job "
        "(trainer=default), or several devices without -m",
    )
    earlier = cfg.ckpt or cfg.evaluate
    if earlier:
        accept, checkpoint = cfg.get("changed_data") == "accept", read_whole(earlier)
        if cfg.ckpt:
            check_batches(checkpoint, cfg.data.get("batch_size", 0), trainer.world_size)
        restore_data(data, checkpoint, "resume" if cfg.ckpt else "test", accept)
    else:
        data.prepare_data()
    data.setup()
    network = build.build_network(cfg, data.spec, fresh=not earlier)
    if cfg.get("start_from") and not earlier:  # else it is the option of the earlier run
        start_from(network, cfg.start_from)
    distillation = teacher and teacher.distillation(network, data.spec)
    module = build.build_module(cfg, network, data.spec, distillation)
    log.info("%s: %s parameters, run folder %s", cfg.label, f"{results.count_parameters(network):,}", folder)
    if trainer.is_global_zero:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / CONFIG, OmegaConf.to_yaml(cfg, resolve=True))

    if trainer.world_size > 1:
        first = trainer.node_rank * trainer.num_devices
        ranks = range(first, first + trainer.num_devices)
        ending.enter_context(distributed.announced_wait(ranks, trainer.world_size, silent=trainer.local_rank > 0))
    if cfg.evaluate:
        tested, best, monitor = cfg.evaluate, None, "val/loss"
    else:
        tested, best, monitor = _fit(cfg, trainer, module, data)
    fit_metrics, epochs = dict(trainer.callback_metrics), trainer.current_epoch
    trainer.test(module, datamodule=data, ckpt_path=tested, verbose=False, weights_only=True)
    # What the test returns lacks values that no logger is given
    test = {name: value for name, value in trainer.callback_metrics.items() if name.startswith("test/")}
    main, label = module.evaluation.main_metrics(), tested or "last weights"
    training = {name: value for name, value in trainer.callback_metrics.items() if name.startswith("training/")}
    record = results.collect(
        cfg.label, cfg.seed, label, test, fit_metrics | training, network, epochs, best, software, monitor, main
    )
    if trainer.is_global_zero:
        write_json(folder / RESULTS, record)
        results.print_results(record, folder)
    return best if best is not None else record["test"]["loss"]


def _fit(
    cfg: DictConfig, trainer: Trainer, module: LightningModule, data: LightningDataModule
) -> tuple[str | None, float | None, str]:
    """Train; return the checkpoint to test (None: test the last weights), the best monitored value and its name."""
    from mtl.checks import InputError
    from mtl.cli import errors
    from mtl.cli.commands import command

    last = Path(cfg.paths.run_dir) / "checkpoints" / "last.ckpt"
    try:
        trainer.fit(module, datamodule=data, ckpt_path=cfg.ckpt, weights_only=True)
    except RuntimeError as error:
        if not errors.lost_peer(error):
            raise
        raise InputError(f"another process of this run has ended; resume with: {command('ckpt', last)}") from error
    saved = trainer.checkpoint_callback
    score = getattr(saved, "best_model_score", None)
    best = None if score is None else float(score)
    monitor = getattr(saved, "monitor", None) or "val/loss"
    checkpoint = str(getattr(saved, "best_model_path", "")) or None
    if checkpoint is None:
        log.warning("no finite %s was measured: testing the last weights", monitor)
    if cfg.tested == "last":
        checkpoint = str(trainer.strategy.broadcast(last))
    return checkpoint, best, monitor


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> float | None:
    from mtl.cli.signals import Stopped, stop_signals

    try:
        with stop_signals.listening():
            return start(cfg, HydraConfig.get())
    except Stopped as stop:
        log.warning("%s", stop)
        sys.exit(128 + stop.number if resolvers.is_first() else 0)
    except Exception as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN:  # Hydra goes on with the next job, and raises this at the end
            raise
        report(error)


def start(cfg: DictConfig, hydra_cfg: DictConfig) -> float | None:
    """Take possession of the run folder, add the configuration of the checkpoint that the run starts from, and run."""
    from mtl.checkpoints.files import read_whole, whole_checkpoint
    from mtl.checks import require
    from mtl.cli import commands, errors
    from mtl.cli.console import make_lasting
    from mtl.cli.folder import claim, give_up
    from mtl.config import schema
    from mtl.config.resume import config_from_checkpoint, kept_words
    from mtl.records import COMMAND, CONFIG, RESULTS, read_json
    from mtl.writing import write_json

    make_lasting()
    if not resolvers.is_first():
        logging.disable(logging.WARNING)
    words = [word for word in hydra_cfg.overrides.task if word not in LENT]
    sys.argv[1:] = [word for word in sys.argv[1:] if word not in LENT]  # the processes of this run start with it
    commands.KEPT[:] = [*searched(hydra_cfg), *kept_words(cfg, words)]
    folder = Path(hydra_cfg.runtime.output_dir)
    if hydra_cfg.mode == RunMode.MULTIRUN and read_json(folder / COMMAND).get("overrides") == words:
        record, last = read_json(folder / RESULTS), folder / "checkpoints" / "last.ckpt"
        if record:
            log.info("%s has finished before", folder)
            best = record.get(f"best_{cfg.monitor.replace('/', '_')}")
            return record["test"]["loss"] if best is None else best
        if last.exists() and not (cfg.ckpt or cfg.evaluate):
            cfg.ckpt = str(last)
    resumed = run_folder(cfg.ckpt) if cfg.ckpt else None
    goes_on = resumed is not None and resumed.resolve() == folder.resolve()
    lock = claim(folder, goes_on) if resolvers.is_first() else None
    try:
        if resolvers.is_first() and not goes_on:
            write_json(
                folder / COMMAND,
                {
                    "overrides": words,
                    "choices": choices_of(hydra_cfg, cfg.get("logger")),
                    "seed": cfg.seed if isinstance(cfg.seed, int) else None,  # it has not been checked yet
                },
            )
        schema.check(cfg, words)
        given = [name for name in ("ckpt", "evaluate", "start_from") if cfg[name]]
        require(len(given) < 2, f"{' and '.join(given)}: give one or the other")
        trust = list(cfg.trust or [])
        if cfg.ckpt:
            whole = str(whole_checkpoint(cfg.ckpt, trust))
            words = [word for word in words if not word.startswith("ckpt=")]
            cfg = config_from_checkpoint(whole, words, composed, trust)
            cfg.ckpt = whole
        elif cfg.evaluate:
            cfg = config_from_checkpoint(cfg.evaluate, words, composed, trust, evaluate=True)
        else:
            if cfg.start_from:
                read_whole(cfg.start_from)  # a damaged file is reported before data are fetched
            cfg = with_choices(cfg, hydra_cfg)
        return run(cfg)
    except Exception as error:
        is_job = hydra_cfg.mode == RunMode.MULTIRUN  # of which Hydra shows no error before all jobs have ended
        if resolvers.is_first() and (is_job or (folder / CONFIG).exists()):
            message = errors.explain(error)[0].removeprefix("error: ")
            log.error("%s", message, extra={"file_only": not is_job})  # report() shows that of a single run
        raise
    finally:
        if lock is not None:
            give_up(folder, lock, delete_empty=hydra_cfg.mode == RunMode.RUN)  # a sweep still logs there


def searched(hydra_cfg: DictConfig) -> list[str]:
    """Return the words of the command line that say where further YAML files are."""
    given = [source.path for source in hydra_cfg.runtime.config_sources if source.provider == "command-line"]
    folders = [word for path in given for word in ("--config-dir", path)]
    return [*folders, *(word for word in hydra_cfg.overrides.hydra if word.startswith("hydra.searchpath="))]


def with_choices(cfg: DictConfig, hydra_cfg: DictConfig) -> DictConfig:
    """Return ``cfg`` with the option chosen from each config group, which a run that resumes from it composes again."""
    with open_dict(cfg):
        cfg.label = cfg.label  # resolve it: it refers to Hydra's choices
        cfg.choices = choices_of(hydra_cfg, cfg.get("logger"))
    return cfg


def composed(words: Sequence[str]) -> DictConfig:
    """Return the configuration of ``conf/`` with ``words``, unresolved, and its choices."""
    cfg = hydra.compose("train", list(words), return_hydra_config=True)
    with open_dict(cfg):
        cfg.choices = choices_of(cfg.pop("hydra"), cfg.get("logger"))
    return cfg


def choices_of(hydra_cfg: DictConfig, loggers: Iterable[str] | None) -> dict[str, str | list[str] | None]:
    """Return the option chosen from each config group; an experiment is only a set of values, so it is left out.

    ``loggers``: the names of the loggers. Hydra does not say which ones were chosen if there are several.
    """
    chosen = hydra_cfg.runtime.choices.items()
    choices = {name: option for name, option in chosen if not name.startswith("hydra/") and name != "experiment"}
    return choices | {"logger": choices.get("logger") or list(loggers or ()) or None}


def data_of_checkpoint(words: Sequence[str]) -> list[str]:
    """Return ``["data=NAME"]`` of the checkpoint that ``words`` start from if they set options of its data, else [].

    Hydra composes the configuration before the checkpoint is read, and would not know the options of other data.
    """
    given = dict(word.split("=", 1) for word in words if "=" in word)
    path = given.get("evaluate") or given.get("ckpt")
    if not path or "data" in given or not any(word.startswith("data.") for word in given):
        return []
    from mtl.checkpoints.files import read_whole
    from mtl.checks import InputError

    try:
        choices = read_whole(path.strip("'\""))["config"].get("choices", {})
    except (InputError, OSError):  # reported where the checkpoint is used
        return []
    name = choices.get("data") if isinstance(choices, dict) else None
    return [f"data={name}"] if isinstance(name, str) and re.fullmatch(r"\w+", name) else []


def report(error: BaseException) -> NoReturn:
    """Print ``error`` as one message and exit; with HYDRA_FULL_ERROR=1 raise it."""
    if os.environ.get("MTL_FULL_ERROR") == "1":
        raise error
    sentence = explain(error, [word for word in sys.argv[1:] if not word.startswith("-")])
    if LENT and isinstance(error, MissingConfigException) and error.missing_cfg_file == LENT[0].replace("=", "/"):
        file = f"{error.missing_cfg_file}.yaml"
        sentence = f"the checkpoint has {LENT[0]}, a file of your own: add --config-dir FOLDER, which holds {file}"
    if sentence:
        sys.exit(f"error: {sentence}")
    from mtl.cli import errors  # takes seconds: it brings torch

    message, status = errors.explain(error)
    sys.stderr.write(message + "\n")
    sys.exit(status)


def print_help() -> None:
    """Print Hydra's help, as wide as the terminal, without the choices that only other programs make."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            main()  # exits
    finally:
        width = shutil.get_terminal_size().columns
        wrapper = textwrap.TextWrapper(width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in text.getvalue().splitlines():
            if not line.startswith(tuple(f"{name}: " for name in NOT_OURS)):
                print(wrapper.fill(line) if ", " in line else line)


def is_override(word: str) -> bool:
    """Return whether a word of the command line is one of Hydra's overrides, rather than a flag or its value."""
    return not word.startswith("-") and ("=" in word or word.startswith("~"))


def cli() -> None:
    """Run the program; print every error as one message."""
    # Hydra would print tracebacks of its own; with this it raises. The processes that this one starts inherit both
    os.environ.setdefault("MTL_FULL_ERROR", os.environ.get("HYDRA_FULL_ERROR", "0"))
    os.environ["HYDRA_FULL_ERROR"] = "1"
    if not resolvers.RANK.isdecimal():
        sys.exit(f"error: RANK={resolvers.RANK}: this environment variable must be the number of this process")
    LENT[:] = data_of_checkpoint(sys.argv[1:])
    sys.argv += LENT
    sys.argv[1:] = sorted(sys.argv[1:], key=is_override)  # argparse wants flags, and what belongs to them, first
    try:
        print_help() if {"-h", "--help"} & set(sys.argv[1:]) else main()
    except SystemExit:
        raise
    except BaseException as error:
        report(error)


if __name__ == "__main__":
    cli()
