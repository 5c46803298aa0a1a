"""Write the results of a run, print its table, and say what can be done next."""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

import polars
import pytorch_lightning as pl
from omegaconf import DictConfig

from mtl.checks import InputError
from mtl.config.portable import places_of
from mtl.files.run_files import PREDICTIONS, RESULTS
from mtl.files.writing import write_json
from mtl.loggers.base import MAX_LISTED_TASKS, run_loggers
from mtl.pipeline.advice import advice, never_predicted, unhelpful_calibration
from mtl.pipeline.next_commands import next_commands
from mtl.pipeline.run import SOFTWARE, Fitted
from mtl.report.baseline_comparison import compare_with_baselines
from mtl.report.page import PAGE
from mtl.runs import results
from mtl.runs.caller import Caller, PythonCaller
from mtl.runs.predictions_file import read_predictions, write_predictions
from mtl.training.fit_calibration import measure_calibration, measure_intervals
from mtl.training.measurements import BLEND, NETWORK, Measurements
from mtl.training.thresholds import decisions
from mtl.use import slices
from mtl.use.card import write_card
from mtl.use.run_page import write_run_page

log = logging.getLogger("mtl")


def write(
    cfg: DictConfig,
    trainer: pl.Trainer,
    module: Any,
    data: Any,
    measured: Measurements,
    fitted: Fitted,
    caller: Caller,
) -> None:
    """Write ``results.json`` and the predictions, hand them to the loggers, and print the table."""
    folder, loggers = Path(cfg.paths.run_dir), run_loggers(trainer.loggers)
    tasks, predictions = module.tasks.values(), module.predictions
    row_info = {split: data.row_info(split) for split, _ in predictions}
    record = results.collect(
        *(cfg, module, data, measured),
        monitor=fitted.monitor,
        best=fitted.best,
        epochs=fitted.epochs,
        tested_epoch=module.loaded_epoch,
        checkpoint=fitted.checkpoint or "last weights",
        seconds_per_epoch=fitted.seconds_per_epoch,
        versions=SOFTWARE,
        command=caller.typed(),
    )
    record = results.with_training(record, folder)
    in_use, others = NETWORK, module.other_models
    if others is not None:
        in_use, record["blend"] = BLEND, others.weights
    record["advice"] = [
        *compare_with_baselines(measured, record["main_metrics"], record.get("blend")),
        *advice(record, fitted.progress),
        *never_predicted([*tasks], predictions.get(("test", in_use), {})),
    ]
    record["best_epochs"] = {
        task: {"epoch": int(losses["epoch"]), "val_loss": losses["val"]} for task, losses in fitted.progress.items()
    }
    specs = {task.name: task for task in (tasks if others is None else others.tasks.values())}  # with calibrations
    record["calibration"] = measure_calibration(specs, predictions.get(("test", in_use), {}))
    record["advice"] += unhelpful_calibration(record["calibration"])
    try:
        if cfg.get("threshold"):
            validation = predictions.get(("val", in_use))
            if validation is None:  # of mtl evaluate, whose checkpoint is in the folder of the training
                validation = read_predictions(Path(str(fitted.checkpoint)).parent.parent, "val", in_use)[1]
            record["thresholds"] = decisions(specs, validation, predictions["test", in_use], cfg.threshold)
    except InputError as error:  # the results of a training are worth more
        log.warning("%s", error)
    if cfg.get("interval"):
        record["intervals"] = measure_intervals(specs, predictions["test", in_use], cfg.interval)
    if cfg.data.get("slices"):
        cells = row_info["test"].select(polars.col(f"slice_{name}").alias(name) for name in cfg.data.slices)
        labelled = predictions["test", in_use]
        if len(tasks) > MAX_LISTED_TASKS:  # each slice of a task is resampled
            most = sorted(labelled, key=lambda name: -len(labelled[name]))[: results.MOST_TASKS]
            log.info("slices: of the %d tasks with the most labels", len(most))
            labelled = {name: labelled[name] for name in most}
        record["slices"] = slices.slices_of(tasks, labelled, cells, data.row_encoder)
        by_slice = slices.read(record["slices"])
        record["advice"] += slices.sentences(by_slice)
        for run_logger in loggers:
            run_logger.log_markdown("slices", slices.tables_of(by_slice, record["main_metrics"])[0].markdown())
    if cfg.get("predictions") and not caller.trial:  # a search would write as many as it has trials
        digests = {split: data.rows_digest(split) for split in row_info}
        write_predictions(folder / PREDICTIONS, predictions, [*tasks], row_info, digests)
    write_json(folder / RESULTS, record)
    for run_logger in loggers if not cfg.evaluate else ():
        run_logger.log_finished(partial(write_card, folder, trust=cfg.get("trust") or ()))
    if not isinstance(caller, PythonCaller):
        ends = caller.is_alone and not cfg.evaluate
        # A run that was resumed has taken longer than since it was
        seconds = max(time.monotonic() - caller.began, record["epochs"] * (record["seconds_per_epoch"] or 0.0))
        further = (record["advice"], next_commands(cfg, data, folder, caller, seconds)) if ends else ()
        results.print_results(record, folder, *further)


def write_page(cfg: DictConfig, caller: Caller) -> None:
    """Write ``report.html``; a failure is a warning, since the run has ended well and mtl report can write it later."""
    folder = Path(cfg.paths.run_dir)
    try:
        write_run_page(folder, cfg.get("trust") or (), caller.frames, places=places_of(cfg.data))
    except Exception as error:
        log.warning("no page of the run: %s", error)
    else:
        log.info("%s: how good the network is, and where it is wrong", folder / PAGE)
