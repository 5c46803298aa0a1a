"""Show how far a run is."""

from __future__ import annotations

import math
import time
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import RichProgressBar


class ProgressBar(RichProgressBar):
    """Lightning's bar, told of the training steps as often as it is drawn, ``refresh_rate`` times a second.

    To tell it of each step, values and all, takes a hundredth of a small one. Of an epoch's first and last it hears.
    """

    _told_at = -math.inf

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._told_at = -math.inf
        super().on_train_epoch_start(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        if trainer.is_last_batch or (now - self._told_at) * self.refresh_rate >= 1:
            self._told_at = now
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
