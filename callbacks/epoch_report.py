"""Log one line per epoch, and measure how long an epoch takes."""

from __future__ import annotations

import logging
import statistics
import time
from typing import Any

from pytorch_lightning import Callback, Trainer

from mtl.training.module import MultiTaskModule
from mtl.training.values import log_values

log = logging.getLogger(__name__)


class EpochReport(Callback):
    """Log the losses and duration of each epoch in one line, and ``train/seconds_per_epoch``, the median so far.

    The duration is wall time. It includes validation, but not the saving of checkpoints.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0
        self._before = 0.0  # seconds of the current epoch before the run was stopped and resumed

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
        shown = [f"train/loss {pl_module.train_meter.compute()['loss']:.4f}"]  # not logged yet: callbacks run first
        monitor = pl_module.config.get("monitor", "val/loss")
        for name in dict.fromkeys(("val/loss", "val/average", monitor)):
            if name in values:
                shown.append(f"{name} {float(values[name]):.4f}")
        if "val/experts_per_sample" in values:
            shown.append(f"experts per sample {float(values['val/experts_per_sample']):.2f}")
        log.info("epoch %d: %s, %.1f s", trainer.current_epoch, ", ".join(shown), self.seconds[-1])

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": list(self.seconds), "elapsed": time.perf_counter() - self._start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds = list(state_dict["seconds"])
        self._before = state_dict.get("elapsed", 0.0)
