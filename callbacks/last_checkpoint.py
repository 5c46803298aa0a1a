"""Save the state of a run so that it can be resumed, and stop the run cleanly on a signal."""

from __future__ import annotations

import logging
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint

from mtl.distributed import all_reduce_sum, world_size
from mtl.run.checkpoint import keep_previous
from mtl.types import Stopped, require

log = logging.getLogger(__name__)

# Several processes must agree on rank 0's clock, which takes a collective operation, so they do so only now and then
STEPS_BETWEEN_CLOCKS = 20


class LastCheckpoint(Checkpoint):
    """Write ``dirpath/last.ckpt`` after each epoch, every ``every_steps`` steps and every ``every_minutes`` minutes.

    The previous checkpoint is kept as ``last.previous.ckpt``. On SIGTERM or SIGINT (Ctrl-C) the run completes the
    current step, saves and raises ``Stopped``; a second Ctrl-C stops it immediately.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, dirpath: str, every_steps: int | None = None, every_minutes: float | None = None) -> None:
        require(
            every_steps is None or every_steps >= 1,
            f"callbacks.last.every_steps={every_steps}: must be at least 1 or null",
        )
        require(
            every_minutes is None or every_minutes > 0,
            f"callbacks.last.every_minutes={every_minutes}: must be greater than 0 or null",
        )
        self.path, self.every_steps, self.every_minutes = Path(dirpath) / "last.ckpt", every_steps, every_minutes
        self._signal = 0
        self._handlers: dict[int, Any] = {}
        self._saved_at = 0.0
        self._alone = True  # whether this is the only process

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._alone = world_size() == 1
        self._saved_at = time.monotonic()
        self._signal = 0
        for number in self.SIGNALS:
            try:
                self._handlers[number] = signal.signal(number, self._ask_to_stop)
            except ValueError:  # signal handlers can be set in the main thread only
                return

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            return  # validation comes first; then on_train_epoch_end saves
        number = self._agreed(self._signal, pl_module.device)
        if number or self._is_due(trainer):
            self._save(trainer)
        if number:
            self._stop(trainer, number)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)
        number = self._agreed(self._signal, pl_module.device)
        if number:
            self._stop(trainer, number)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        if self._signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number

    def _agreed(self, value: int, device: torch.device) -> int:
        """Return the maximum of ``value`` over all processes."""
        if self._alone:
            return value
        everyone = torch.zeros(world_size(), dtype=torch.int64)
        everyone[torch.distributed.get_rank()] = value
        return int(all_reduce_sum(everyone.to(device)).max())

    def _is_due(self, trainer: Trainer) -> bool:
        if self.every_steps and trainer.global_step % self.every_steps == 0:
            return True
        if self.every_minutes is None:
            return False
        late = time.monotonic() - self._saved_at >= 60 * self.every_minutes
        if self._alone:
            return late
        if trainer.global_step % STEPS_BETWEEN_CLOCKS:
            return False
        return bool(self._agreed(int(late and trainer.is_global_zero), trainer.strategy.root_device))

    def _save(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            keep_previous(self.path)
        trainer.save_checkpoint(self.path, weights_only=False)  # includes the states of optimiser and loops
        self._saved_at = time.monotonic()

    def _stop(self, trainer: Trainer, number: int) -> None:
        raise Stopped(
            f"stopped by {signal.Signals(number).name} after step {trainer.global_step}, saved; "
            f"resume with: python train.py ckpt={self.path}",
            number,
        )
