"""Stop a run that no longer improves."""

from __future__ import annotations

import logging
from typing import Any, Literal

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import EarlyStopping

from mtl.checks import check_choice, check_name, check_number, check_switch, check_whole
from mtl.kinds import CountOrZero
from mtl.training.metrics import mode_of
from mtl.training.module import MultiTaskModule

from .length import ends_epoch
from .monitored import Watcher

log = logging.getLogger(__name__)


class EarlyStop(Watcher, EarlyStopping):
    """Stop after ``patience`` epochs with a validation in which ``monitor`` did not improve by more than ``min_delta``.

    An epoch without a validation (``trainer.check_val_every_n_epoch``) does not count, and neither does one in which
    ``monitor`` is a metric that is undefined on the rows. ``mode``: auto: see ``mode_of``. The run also stops when the
    value is otherwise NaN or infinite (``check_finite``), better than ``stopping_threshold`` or worse than
    ``divergence_threshold``. The log says why it stopped.
    """

    section = "callbacks.early_stopping"

    def __init__(
        self,
        monitor: str = "val/loss",
        mode: Literal["min", "max", "auto"] = "auto",
        patience: CountOrZero = 3,
        min_delta: float = 0.0,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        verbose: bool = False,
    ) -> None:
        check_name("callbacks.early_stopping.monitor", monitor)
        check_choice("callbacks.early_stopping.mode", mode, ("min", "max", "auto"))
        check_whole("callbacks.early_stopping.patience", patience, at_least=0)
        check_number("callbacks.early_stopping.min_delta", min_delta, at_least=0)
        check_switch("callbacks.early_stopping.check_finite", check_finite)
        check_number("callbacks.early_stopping.stopping_threshold", stopping_threshold, or_null=True)
        check_number("callbacks.early_stopping.divergence_threshold", divergence_threshold, or_null=True)
        check_switch("callbacks.early_stopping.verbose", verbose)
        super().__init__(
            monitor,
            min_delta,
            patience,
            verbose,
            mode_of(monitor, mode),
            strict=False,  # there is no value yet if the run ends within its first epoch
            check_finite=check_finite,
            stopping_threshold=stopping_threshold,
            divergence_threshold=divergence_threshold,
            check_on_train_epoch_end=True,
        )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        if not ends_epoch(trainer) or not self.is_fresh(trainer, pl_module):
            return
        before = trainer.should_stop
        super().on_train_epoch_end(trainer, pl_module)
        if trainer.should_stop and not before and self.stopping_reason_message:
            log.info("early stopping: %s", self.stopping_reason_message.removesuffix(" Signaling Trainer to stop."))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})  # a resumed run may get another patience
