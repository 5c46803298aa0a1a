"""Report on a run while it trains: a line per epoch, values for a study."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Mapping
from typing import Any

from pytorch_lightning import Trainer
from torch import Tensor

from mtl.files.formatting import duration, number
from mtl.runs.trial import TrialEnd
from mtl.training.measurements import log_values
from mtl.training.metrics import mean_of_defined
from mtl.training.module import MultiTaskModule

from .monitoring import MonitoringCallback
from .phase_length import epochs_left

log = logging.getLogger(__name__)


class EpochReport(MonitoringCallback):
    """Log a line for each epoch: losses, main metric, duration; log the median duration, ``train/seconds_per_epoch``.

    The duration is wall time. It includes validation, but not the saving of checkpoints. ``progress``: of each task the
    losses in its best epoch and since, by which the end of a run gives advice.
    """

    monitor = "val/loss"

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.progress: dict[str, dict[str, float]] = {}
        self._start = 0.0
        self._before = 0.0  # seconds of the current epoch before the run was stopped and resumed
        self._told = False  # how long the run will take
        self._train_means: dict[str, Tensor] = {}  # of the epoch that ends; a task without a label has none

    def logged_names(self) -> list[str]:
        """Return the names of the values that are logged at the end of an epoch."""
        return ["train/seconds_per_epoch"]

    def on_train_start(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        self._start = time.perf_counter() - self._before  # a run that resumes within an epoch does not start it again

    def on_train_epoch_start(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        log_values(trainer, {"train/seconds_per_epoch": statistics.median(self.seconds)})
        values = trainer.callback_metrics
        self._train_means = pl_module.train_meter.means()
        values.update(self._train_means)  # callbacks run before the module logs them
        super().on_train_epoch_end(trainer, pl_module)
        phrases = [f"train {number(float(values['train/loss']), 4)}"]
        if "val/loss" in values:
            phrases.append(f"val {number(float(values['val/loss']), 4)}")
            phrases.append(main_metric(pl_module, values))
        if "val/experts_per_sample" in values:
            count = f"{number(float(values['val/experts_per_sample']), 3)}"
            phrases.append(f"{count} expert{'s' * (count != '1')}")
        phrases.append(f"{number(self.seconds[-1], 3)} s")
        log.info("epoch %d: %s", trainer.current_epoch, ", ".join(filter(None, phrases)))
        left = epochs_left(trainer)
        if left and not self._told:
            self._told = True
            log.info("time left: %s", time_left(self.seconds[-1], left, bool(trainer.early_stopping_callbacks)))

    def on_value(self, trainer: Trainer, pl_module: MultiTaskModule, value: float) -> None:
        """Compare the losses of each task in a validated epoch with those of its best one."""
        for task in pl_module.tasks:
            train = float(self._train_means.get(f"train/{task}/loss", math.nan))
            val = float(trainer.callback_metrics.get(f"val/{task}/loss", math.nan))
            if math.isnan(val) or math.isnan(train):  # without a label
                continue
            progress = self.progress.get(task)
            if progress is None or val < progress["val"]:
                progress = {"epoch": trainer.current_epoch, "val": val, "train": train, "since": 0, "later_val": 0.0}
                self.progress[task] = progress
            else:
                after = progress["since"] = progress["since"] + 1
                progress["later_val"] += (val - progress["later_val"]) / after  # the mean since the best epoch
            progress["last_train"] = train

    def state_dict(self) -> dict[str, Any]:
        progress = {task: dict(losses) for task, losses in self.progress.items()}
        times = {"seconds": list(self.seconds), "elapsed": time.perf_counter() - self._start}
        return {**super().state_dict(), **times, "progress": progress}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.seconds, self._before = list(state_dict["seconds"]), state_dict["elapsed"]
        self.progress = dict(state_dict["progress"])


def time_left(seconds: float, epochs: float, stops_early: bool) -> str:
    """Say how long ``epochs`` of ``seconds`` take."""
    many = f"{math.ceil(epochs)} epochs" if epochs > 1 else "1 epoch"
    early = "; early stopping may end it sooner" if stops_early else ""
    return f"{'at most' if early else 'about'} {duration(epochs * seconds)} ({many} of {duration(seconds)}{early})"


def main_metric(module: MultiTaskModule, values: Mapping[str, Any]) -> str:
    """Return the metric of the line of an epoch with its value; "" if there is none.

    It is the monitored one, else the average of a benchmark, else the main metric of the first task, as the mean over
    the tasks that have the same one.
    """
    monitor = module.config.get("monitor", "val/loss")
    name = monitor if monitor != "val/loss" else "val/average"
    if name in values:
        return f"{name.removeprefix('val/')} {number(float(values[name]), 4)}"
    mains = {f"val/{task}/{main}": main for task, main in module.evaluation.main_metrics().items()}
    logged = {name: main for name, main in mains.items() if name in values}
    chosen = next(iter(logged.values()), "")
    names = [name for name, main in logged.items() if main == chosen]
    if not names:
        return ""
    numbers = [float(values[name]) for name in names]
    total, defined = [*mains.values()].count(chosen), sum(not math.isnan(value) for value in numbers)
    of_all = f"mean {chosen} of {total if defined == total else f'{defined} of {total}'} tasks"
    mean = number(mean_of_defined(numbers), 4)
    return f"{of_all if total > 1 else names[0].removeprefix('val/')} {mean}"


class TrialReport(MonitoringCallback):
    """Report the monitored value to mtl tune after each epoch with a validation; stop the run if the study prunes it.

    It does nothing in a run that mtl tune did not start. NaN and infinite values are not reported. ``trial``: the pipe
    to the worker, which only the first process has.
    """

    monitor = None  # set from the configuration when the training starts

    def __init__(self, trial: TrialEnd | None = None) -> None:
        super().__init__()
        self._trial, self._is_trial = trial, False

    def on_fit_start(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        self.monitor = str(pl_module.config.get("monitor", "val/loss"))
        self._is_trial = trainer.strategy.broadcast(self._trial is not None)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        if self._is_trial:  # another run need not log the value
            super().on_train_epoch_end(trainer, pl_module)

    def on_value(self, trainer: Trainer, pl_module: MultiTaskModule, value: float) -> None:
        stop = self._trial is not None and math.isfinite(value) and self._trial.report(trainer.current_epoch, value)
        if trainer.strategy.reduce_boolean_decision(stop, all=False):  # only the first process has asked
            log.info("epoch %d: pruned by the study, with %s=%.5g", trainer.current_epoch, self.monitor, value)
            trainer.should_stop = True

    def on_fit_end(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        if self._trial:
            self._trial.fitted()
