"""A run: train a network, test its best checkpoint, and write the results."""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from mtl import distributed
from mtl.callbacks.epoch_report import EpochReport
from mtl.checkpoints.files import Checkpoint, read, read_to_resume, restoring
from mtl.checkpoints.restore import restore_data
from mtl.checkpoints.warm_start import start_from
from mtl.checks import require
from mtl.config import build, resolvers
from mtl.config.check import check
from mtl.config.patterns import with_columns
from mtl.config.resume import check_batches
from mtl.config.teacher import Teacher, read_teacher
from mtl.files.escaping import escape_interpolation
from mtl.files.run_files import CHECKPOINTS, CONFIG
from mtl.files.writing import write_text
from mtl.loggers.base import run_loggers
from mtl.pipeline import memory
from mtl.pipeline.advice import size_advice
from mtl.pipeline.peers import lost_peers_reported
from mtl.runs import results
from mtl.runs.caller import Caller, PythonCaller
from mtl.runs.commands import run_command
from mtl.runs.predictions_file import read_predictions
from mtl.runs.signals import Stopped
from mtl.training.measurements import Measurements

log = logging.getLogger("mtl")

SOFTWARE = results.versions()  # of the imported code: files may change while a study or a notebook goes on

HARMLESS_WARNINGS = (
    ".*does not have many workers.*",  # batches are slices of tensors in memory: workers would only copy them
    ".*callbacks used to create the checkpoint need to be provided.*",  # a resumed run may have another schedule
    ".*Checkpoint directory .* exists and is not empty.*",  # a resumed run writes to its own folder
    ".*isinstance.treespec, LeafSpec.*",  # inside Lightning
    ".*smaller than the logging interval.*",  # with little data, the values per epoch suffice
    ".*Grad strides do not match bucket view strides.*",  # the stride of a dimension of size 1 means nothing
    ".*broadcast_buffers. is deprecated.*",  # its successor is not in every version that we accept
    ".*FSDP2-wrapped module .* returned a view tensor.*",  # no code changes a network's output in place
    ".*recommended to use .self.log.*sync_dist.*",  # the logged values are already sums over all processes
)


@dataclass(frozen=True)
class Start:
    """What a run begins with: the ``checkpoint`` that it resumes or tests, or the ``source`` of its first weights.

    ``teacher``: the run that it imitates.
    """

    checkpoint: Checkpoint | None
    source: Checkpoint | None
    teacher: Teacher | None


@dataclass(frozen=True)
class Fitted:
    """What the training left: the ``checkpoint`` to test, None for the last weights, and its monitored value, ``best``.

    ``progress``: of each task, see ``EpochReport``.
    """

    checkpoint: str | None
    monitor: str = "val/loss"
    best: float | None = None
    epochs: int = 0
    seconds_per_epoch: float | None = None
    progress: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def run(cfg: DictConfig, *, caller: Caller | None = None, checkpoint: Checkpoint | None = None) -> float | None:
    """Train ``cfg``'s network, or only test a checkpoint, and write results; return the best monitored value.

    ``checkpoint``: the content of ``cfg.ckpt`` or ``cfg.evaluate``, if it has been read already.
    """
    caller = caller or Caller()
    with warnings.catch_warnings():
        for message in HARMLESS_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        if not isinstance(caller, PythonCaller):  # the memory of the caller's program is its own
            memory.keep_freed_memory()
        with ExitStack() as cleanup:
            cleanup.callback(distributed.destroy_process_group)
            check(cfg, caller.line.overrides)
            pl.seed_everything(cfg.seed, workers=True, verbose=False)
            start = read_start(cfg, caller, checkpoint)
            cleanup.callback(torch.set_num_threads, torch.get_num_threads())
            if cfg.get("threads"):
                torch.set_num_threads(cfg.threads)
            data: Any = build.build_data(cfg)  # nothing is read yet
            trainer = build_trainer(cfg, start, caller, cleanup)
            load_rows(cfg, data, trainer, start, caller)
            module = build_module(cfg, data, start)
            begin(cfg, trainer, module, data, caller, cleanup)
            # Not above, where it would delay the first line by a second; nor after the training: files may have changed
            from mtl.pipeline import finish

            tests_only = cfg.evaluate and start.checkpoint
            fitted = Fitted(str(tests_only.path)) if tests_only else fit(cfg, trainer, module, data, start, caller)
            measured = test(cfg, trainer, module, data, start, fitted, caller)
            if trainer.is_global_zero:
                finish.write(cfg, trainer, module, data, measured, fitted, caller)
        if cfg.get("report") and not cfg.evaluate and resolvers.is_first():
            finish.write_page(cfg, caller)
    return fitted.best if fitted.best is not None else measured.value("", "loss")


def read_start(cfg: DictConfig, caller: Caller, checkpoint: Checkpoint | None) -> Start:
    """Read what the run starts from, and complete ``cfg.data.tasks`` by it: by columns of a table, or by its source."""
    if checkpoint is None and (cfg.ckpt or cfg.evaluate):
        checkpoint = read_to_resume(cfg.ckpt) if cfg.ckpt else read(cfg.evaluate)
    if checkpoint is None:
        with_columns(cfg, caller.frames["train"].columns if "train" in caller.frames else None)
    # A resumed run has used it already
    source = read(cfg.start_from) if cfg.start_from and checkpoint is None else None
    if source is not None and cfg.data.get("path") and not cfg.data.get("tasks"):
        with open_dict(cfg):
            cfg.data.tasks = escape_interpolation(source.config(cfg.get("trust") or ())["data"].get("tasks") or {})
    build.check_options(cfg)
    if checkpoint is not None and cfg.evaluate and cfg.get("threshold"):
        read_predictions(checkpoint.path.parent.parent, "val")  # before the test, since it may have none
    return Start(checkpoint, source, read_teacher(cfg))


def build_trainer(cfg: DictConfig, start: Start, caller: Caller, cleanup: ExitStack) -> pl.Trainer:
    """Return the Trainer, whose loggers ``cleanup`` closes. Raises InputError for processes that the caller forbids."""
    trainer = build.build_trainer(cfg, start.checkpoint, caller)
    for run_logger in run_loggers(trainer.loggers):
        cleanup.callback(run_logger.close)
    message = f"trainer.devices={cfg.trainer.devices} makes {trainer.world_size} processes: {caller.why_one_process}"
    require(trainer.world_size == 1 or not caller.why_one_process, message)
    return trainer


def load_rows(cfg: DictConfig, data: Any, trainer: pl.Trainer, start: Start, caller: Caller) -> None:
    """Read the rows; a run that starts from a checkpoint has its splits, vocabularies and scales."""
    if caller.frames:
        data.frames = caller.frames
    if (checkpoint := start.checkpoint) is not None:
        if cfg.ckpt:
            state = f"checkpoint {checkpoint.path} does not hold the state of a training; take another one of the run"
            parts = {"loops": dict, "optimizer_states": list, "callbacks": dict}  # Lightning takes empty ones for fresh
            whole = all(isinstance(checkpoint.get(name), kind) and checkpoint[name] for name, kind in parts.items())
            require(whole, state)
            check_batches(checkpoint, cfg.data.get("batch_size", 0), trainer.world_size)
        accept = cfg.get("on_data_change") == "accept"
        restore_data(data, checkpoint, "resume" if cfg.ckpt else "test", accept)
    else:
        data.prepare_data()
        if start.source is not None:
            data.continue_from(start.source.data())
    data.setup()


def build_module(cfg: DictConfig, data: Any, start: Start) -> Any:
    """Return the MultiTaskModule of a new network, with the weights of the source."""
    checkpoint, source = start.checkpoint, start.source
    spec, kinds = data.spec, {task.kind for task in data.spec.tasks}
    require(not cfg.get("interval") or "regression" in kinds, "interval: none of the tasks is a regression")
    require(not cfg.get("threshold") or "binary" in kinds, "threshold: none of the tasks is binary")
    has_classes = bool(kinds & {"binary", "multiclass"})
    require(not cfg.get("calibrate") or has_classes, "calibrate: none of the tasks is binary or multiclass")
    if checkpoint is not None and cfg.evaluate and not checkpoint.get("blend"):  # else it is the blend's calibration
        spec = checkpoint.calibrated(data.spec)
    if checkpoint is not None and cfg.evaluate and cfg.get("interval"):  # an error now, not after the test
        for task in checkpoint.calibrated(data.spec).tasks:
            if task.kind == "regression":
                task.interval_margin(cfg.interval)
    network = build.build_network(cfg, spec, load_pretrained=checkpoint is None)
    if source is not None:
        start_from(network, source, same_ids=data.earlier is not None)
    distillation = start.teacher.distillation(network, data.spec) if start.teacher else None
    return build.build_module(cfg, network, spec, distillation)


def begin(cfg: DictConfig, trainer: pl.Trainer, module: Any, data: Any, caller: Caller, cleanup: ExitStack) -> None:
    """Say what is trained, write its configuration, and watch over the processes of the run until ``cleanup``."""
    folder, parameters = Path(cfg.paths.run_dir), results.count_parameters(module.network)
    rows = data.row_counts().get("train", 0) if data.labelled is not None else 0  # of a table
    per_row = f" ({parameters / rows:,.0f} for each training row)" if rows else ""
    log.info("%s: %s parameters%s, run folder %s", cfg.run_name, f"{parameters:,}", per_row, folder)
    weights = {name: weight.numel() for name, weight in module.network.named_parameters() if "bottom." not in name}
    for sentence in size_advice(sum(weights.values()) / cfg.ensemble, rows, cfg.recipe.get("expert_units") or ()):
        log.info("%s", sentence)
    if trainer.is_global_zero:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / CONFIG, OmegaConf.to_yaml(cfg, resolve=True))
    for logger in trainer.loggers:
        logger.log_hyperparams({**module.config, "command": run_command(cfg.overrides, caller.line.searched)})
    if trainer.world_size > 1:
        first = trainer.node_rank * trainer.num_devices
        ranks = range(first, first + trainer.num_devices)
        cleanup.enter_context(caller.signals.watching(getattr(trainer.strategy.launcher, "kill", None)))
        cleanup.enter_context(distributed.warn_if_waiting(ranks, trainer.world_size, silent=trainer.local_rank > 0))


def fit(cfg: DictConfig, trainer: pl.Trainer, module: Any, data: Any, start: Start, caller: Caller) -> Fitted:
    """Train. After Ctrl-C in Python, the run goes on as if the training had ended."""
    last = Path(cfg.paths.run_dir) / CHECKPOINTS / "last.ckpt"
    path = None if start.checkpoint is None else str(start.checkpoint.path)
    try:
        with restoring(start.checkpoint), lost_peers_reported("resume", caller.command("ckpt", last)):
            trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=True)
    except Stopped as stopped:
        if not isinstance(caller, PythonCaller) or stopped.number != signal.SIGINT or not trainer.global_step:
            raise
        log.warning("stopped by Ctrl-C after step %d; the best state so far is kept", trainer.global_step)
    saved, values = trainer.checkpoint_callback, trainer.callback_metrics
    score = getattr(saved, "best_model_score", None)
    best = None if score is None else float(score)
    monitor = getattr(saved, "monitor", None) or "val/loss"
    checkpoint = str(getattr(saved, "best_model_path", "")) or None
    if checkpoint is None:
        keeps_best = getattr(saved, "monitor", None) is not None
        why = f"no finite {monitor} was measured" if keeps_best else "the run keeps no best checkpoint"
        log.warning("%s: testing the last weights", why)
    if cfg.test_checkpoint == "last":
        checkpoint = str(trainer.strategy.broadcast(last))
        best = float(values[monitor]) if monitor in values else None
    seconds = float(values["train/seconds_per_epoch"]) if "train/seconds_per_epoch" in values else None
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # not declared
    # Before the test, which restores the state of the best epoch
    progress = next((callback.progress for callback in callbacks if isinstance(callback, EpochReport)), {})
    return Fitted(checkpoint, monitor, best, trainer.current_epoch, seconds, progress)


def test(
    cfg: DictConfig, trainer: pl.Trainer, module: Any, data: Any, start: Start, fitted: Fitted, caller: Caller
) -> Measurements:
    """Test the checkpoint, and return what was measured."""
    # Of the last epoch; those of the tested checkpoint are measured before its test
    module.measured = Measurements({key: value for key, value in module.measured.items() if key.split != "val"})
    module.loaded_epoch = fitted.epochs - 1 if fitted.epochs else None  # unless a checkpoint is loaded
    weights = cfg.evaluate or fitted.checkpoint or Path(cfg.paths.run_dir) / CHECKPOINTS / "last.ckpt"
    restored = restoring(start.checkpoint if cfg.evaluate else None)
    with restored, lost_peers_reported("test", caller.command("evaluate", weights)):
        trainer.test(module, datamodule=data, ckpt_path=fitted.checkpoint, verbose=False, weights_only=True)
    # Lightning's test() returns only logged values, callback_metrics also has those of callbacks of one's own
    tests = {name: value for name, value in trainer.callback_metrics.items() if name.startswith("test/")}
    measured = Measurements.of(tests)
    measured.update(module.measured.rounded())
    return measured
