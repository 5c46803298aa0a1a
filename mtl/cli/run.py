"""A run: train a network, test its best checkpoint, and write the results."""

from __future__ import annotations

import contextlib
import logging
import signal
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import polars
import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from mtl import distributed
from mtl.callbacks.reports import EpochReport
from mtl.checkpoints.files import Checkpoint, read, read_to_resume, restoring
from mtl.checkpoints.restore import restore_data
from mtl.checkpoints.start import start_from
from mtl.checks import InputError, require
from mtl.cli import errors, memory, resolvers
from mtl.cli.ending import next_commands
from mtl.config import build
from mtl.config.check import check
from mtl.config.patterns import with_columns
from mtl.config.resume import check_batches, places_of
from mtl.config.teacher import read_teacher
from mtl.files.literals import escape_interpolation
from mtl.files.records import CHECKPOINTS, CONFIG, PREDICTIONS, RESULTS
from mtl.files.writing import write_json, write_text
from mtl.loggers.base import run_loggers
from mtl.runs import results
from mtl.runs.advice import advice
from mtl.runs.caller import Caller, PythonCaller
from mtl.runs.commands import run_command
from mtl.runs.predictions_file import write_predictions
from mtl.runs.signals import Stopped
from mtl.training.measurements import NETWORK, Measurements

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
        try:
            with contextlib.ExitStack() as ending:
                best = _run(cfg, caller, checkpoint, ending)
        finally:
            distributed.destroy_process_group()
    if cfg.get("report") and not cfg.evaluate and resolvers.is_first():
        from mtl.report.summary import PAGE
        from mtl.use.run_page import write_run_page

        folder = Path(cfg.paths.run_dir)
        try:
            write_run_page(folder, cfg.get("trust") or (), caller.frames, places=places_of(cfg.data))
        except Exception as error:  # the run has ended well, and mtl report can write its page later
            log.warning("no page of the run: %s", error)
        else:
            log.info("%s: how good the network is, and where it is wrong", folder / PAGE)
    return best


def _run(cfg: DictConfig, caller: Caller, checkpoint: Checkpoint | None, ending: contextlib.ExitStack) -> float | None:
    check(cfg)
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    folder = Path(cfg.paths.run_dir)
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
    teacher = read_teacher(cfg)
    ending.callback(torch.set_num_threads, torch.get_num_threads())
    if cfg.get("threads"):
        torch.set_num_threads(cfg.threads)
    data: Any = build.build_data(cfg)
    if caller.frames:
        data.frames = caller.frames
    trainer = build.build_trainer(cfg, checkpoint, caller)
    for run_logger in run_loggers(trainer.loggers):
        ending.callback(run_logger.close)
    require(
        trainer.world_size == 1 or not caller.why_one_process,
        f"trainer.devices={cfg.trainer.devices} makes {trainer.world_size} processes: {caller.why_one_process}",
    )
    if checkpoint is not None:
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
        if source is not None:
            data.continue_from(source.data())
    data.setup()
    spec = checkpoint.calibrated(data.spec) if checkpoint is not None and cfg.evaluate else data.spec
    network = build.build_network(cfg, spec, load_pretrained=checkpoint is None)
    if source is not None:
        start_from(network, source, same_ids=data.earlier is not None)
    distillation = teacher.distillation(network, data.spec) if teacher else None
    module = build.build_module(cfg, network, spec, distillation)
    log.info("%s: %s parameters, run folder %s", cfg.run_name, f"{results.count_parameters(network):,}", folder)
    # Not above, where they would delay this first line by a second, nor after the training, when files may have changed
    from mtl.report.against import compare_with_baselines
    from mtl.use import run_page, slices  # noqa: F401
    from mtl.use.card import write_card

    if trainer.is_global_zero:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / CONFIG, OmegaConf.to_yaml(cfg, resolve=True))

    for logger in trainer.loggers:
        logger.log_hyperparams({**module.config, "command": run_command(cfg.overrides, caller.line.searched)})
    if trainer.world_size > 1:
        first = trainer.node_rank * trainer.num_devices
        ranks = range(first, first + trainer.num_devices)
        ending.enter_context(caller.signals.watching(getattr(trainer.strategy.launcher, "kill", None)))
        ending.enter_context(distributed.warn_if_waiting(ranks, trainer.world_size, silent=trainer.local_rank > 0))
    path = None if checkpoint is None else str(checkpoint.path)
    if cfg.evaluate:
        tested, best, monitor = path, None, "val/loss"
    else:
        with restoring(checkpoint):
            tested, best, monitor = _fit(cfg, trainer, module, data, path, caller)
    # Of the last epoch; those of the tested checkpoint are measured before its test
    module.measured = Measurements({key: value for key, value in module.measured.items() if key.split != "val"})
    fit_metrics, epochs = dict(trainer.callback_metrics), trainer.current_epoch
    seconds = fit_metrics.get("train/seconds_per_epoch")
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # not declared
    # The test restores the state of the best epoch
    progress = next((each.progress for each in callbacks if isinstance(each, EpochReport)), {})
    weights = cfg.evaluate or tested or folder / CHECKPOINTS / "last.ckpt"
    with restoring(checkpoint if cfg.evaluate else None), _with_others("test", caller.command("evaluate", weights)):
        trainer.test(module, datamodule=data, ckpt_path=tested, verbose=False, weights_only=True)
    # Lightning's test() returns only logged values, callback_metrics also has those of callbacks of one's own
    tests = {name: value for name, value in trainer.callback_metrics.items() if name.startswith("test/")}
    measured = Measurements.of(tests)
    measured.update(module.measured.rounded())
    record = results.collect(
        *(cfg, module, data, measured),
        monitor=monitor,
        best=best,
        epochs=epochs,
        checkpoint=tested or "last weights",
        seconds_per_epoch=None if seconds is None else float(seconds),
        versions=SOFTWARE,
        command=caller.typed(),
    )
    record = results.with_training(record, folder)
    if trainer.is_global_zero:
        record["advice"] = [*compare_with_baselines(measured, record["main_metrics"]), *advice(record, progress)]
        record["best_epochs"] = {
            task: {"epoch": int(seen["epoch"]), "val_loss": seen["val"]} for task, seen in progress.items()
        }
        tasks, predictions = module.tasks.values(), module.predictions
        row_info = {split: data.row_info(split) for split, _ in predictions}
        if cfg.data.get("slices"):
            cells = row_info["test"].select(polars.col(f"slice_{name}").alias(name) for name in cfg.data.slices)
            record["slices"] = slices.slices_of(tasks, predictions["test", NETWORK], cells, data.row_encoder)
            by_slice = slices.read(record["slices"])
            record["advice"] += slices.sentences(by_slice)
            for run_logger in run_loggers(trainer.loggers):
                run_logger.log_markdown("slices", slices.table_of(by_slice, record["main_metrics"]).markdown())
        if cfg.get("predictions") and not caller.trial:  # a search would write as many as it has trials
            digests = {split: data.rows_digest(split) for split in row_info}
            write_predictions(folder / PREDICTIONS, predictions, [*tasks], row_info, digests)
        write_json(folder / RESULTS, record)
        for run_logger in run_loggers(trainer.loggers) if not cfg.evaluate else ():
            run_logger.log_finished(partial(write_card, folder, trust=cfg.get("trust") or ()))
        if not isinstance(caller, PythonCaller):
            ends = caller.is_alone and not cfg.evaluate
            further = (record["advice"], next_commands(cfg, data, folder, caller.line)) if ends else ()
            results.print_results(record, folder, *further)
    return best if best is not None else measured.value("", "loss")


def _fit(
    cfg: DictConfig,
    trainer: pl.Trainer,
    module: pl.LightningModule,
    data: pl.LightningDataModule,
    ckpt: str | None,
    caller: Caller,
) -> tuple[str | None, float | None, str]:
    """Train; return the checkpoint to test, its monitored value, and the name of that value.

    The checkpoint is None for the last weights. After Ctrl-C in Python, the run goes on as if the training had ended.
    """
    last = Path(cfg.paths.run_dir) / CHECKPOINTS / "last.ckpt"
    try:
        with _with_others("resume", caller.command("ckpt", last)):
            trainer.fit(module, datamodule=data, ckpt_path=ckpt, weights_only=True)
    except Stopped as stopped:
        if not isinstance(caller, PythonCaller) or stopped.number != signal.SIGINT or not trainer.global_step:
            raise
        log.warning("stopped by Ctrl-C after step %d; the best state so far is kept", trainer.global_step)
    saved = trainer.checkpoint_callback
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
        best = float(trainer.callback_metrics[monitor]) if monitor in trainer.callback_metrics else None
    return checkpoint, best, monitor


@contextlib.contextmanager
def _with_others(what: str, again: str) -> Iterator[None]:
    """Raise InputError, with the command ``again``, if another process ends inside the block or does not answer.

    Lightning's strategies wait for 30 minutes.
    """
    try:
        yield
    except RuntimeError as error:
        if not errors.is_lost_peer(error):
            raise
        happened = "has not answered in time" if "Timed out" in str(error) else "has ended"
        raise InputError(f"another process of this run {happened}; {what} with: {again}") from error
