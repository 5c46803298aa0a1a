"""Stop a run that no longer improves."""

from __future__ import annotations

import logging
from typing import Any, Literal

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import EarlyStopping

from mtl.files.formatting import number
from mtl.options import CountOrZero, Name, NonNegative, validated
from mtl.training.metrics import mode_of
from mtl.training.module import MultiTaskModule

from .monitoring import MonitoringCallback

log = logging.getLogger(__name__)


class EarlyStop(MonitoringCallback, EarlyStopping):  # type: ignore[misc]  # its monitor is never None
    """Stop after ``patience`` validated epochs in which ``monitor`` did not improve by more than ``min_delta``.

    An epoch without a validation (``trainer.check_val_every_n_epoch``) does not count, nor does an epoch in which
    ``monitor`` is a metric that is undefined on the rows. ``mode``: auto: see ``mode_of``. The run also stops when the
    value is NaN or infinite for another reason. The log says why it stopped.
    """

    section = "callbacks.early_stopping"

    @validated
    def __init__(
        self,
        monitor: Name = "val/loss",
        mode: Literal["min", "max", "auto"] = "auto",
        patience: CountOrZero = 3,
        min_delta: NonNegative = 0.0,
    ) -> None:
        super().__init__(
            monitor,
            min_delta,
            patience,
            mode=mode_of(monitor, mode),
            strict=False,  # there is no value yet if the run ends within its first epoch
            check_on_train_epoch_end=True,
        )

    def on_value(self, trainer: Trainer, pl_module: MultiTaskModule, value: float) -> None:
        before = trainer.should_stop
        EarlyStopping.on_train_epoch_end(self, trainer, pl_module)
        reason = self.stopping_reason_message
        if trainer.should_stop and not before and reason:
            if "did not improve" in reason:
                epochs = f"{self.wait_count} epoch{'s' * (self.wait_count != 1)}"
                best = number(float(self.best_score), 4)
                reason = f"{self.monitor} has not improved for {epochs}; its best is {best}"
            log.info("early stopping: %s", reason.removesuffix(" Signaling Trainer to stop."))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})  # a resumed run may get another patience
