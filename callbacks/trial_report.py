"""Report the epochs of a trial to the study that it belongs to."""

from __future__ import annotations

import logging
import math

from pytorch_lightning import Callback, Trainer

from mtl.training.module import MultiTaskModule
from mtl.tune import channel

from .length import ends_epoch

log = logging.getLogger(__name__)


class TrialReport(Callback):
    """Report ``monitor`` to tune.py after each epoch with a validation, and stop the run if the study prunes it.

    In a run that tune.py did not start it does nothing. A value that is NaN or infinite is not reported.
    """

    def __init__(self) -> None:
        self._line: channel.RunEnd | None = None
        self._validated = False  # whether there was a validation since the value was last looked at

    def on_fit_start(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        if channel.started() and trainer.is_global_zero:
            self._line = channel.RunEnd()

    def on_validation_end(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        self._validated = self._validated or not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        if not channel.started() or not ends_epoch(trainer):
            return
        validated, self._validated = self._validated, False
        monitor = str(pl_module.config.get("monitor", "val/loss"))
        value = float(trainer.callback_metrics.get(monitor, math.nan))
        stop = False
        if self._line and validated and math.isfinite(value) and monitor not in pl_module.undefined:
            stop = self._line.report(trainer.current_epoch, value)
        if trainer.strategy.reduce_boolean_decision(stop, all=False):  # the first process alone has asked
            log.info("epoch %d: pruned by the study, with %s=%.5g", trainer.current_epoch, monitor, value)
            trainer.should_stop = True

    def on_fit_end(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        if self._line:
            self._line.fitted()
