"""Save the state of a run so that it can be resumed, and stop the run cleanly on a signal."""

from __future__ import annotations

import logging
import re
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.trainer.states import TrainerFn

from mtl.checkpoints.files import keep_previous
from mtl.checkpoints.shards import SHARDED
from mtl.distributed import gather
from mtl.options import LargeCount, Positive, validated
from mtl.runs.caller import Caller
from mtl.runs.signals import Stopped

from .phase_length import did_step, ends_epoch, validates_within_epoch

log = logging.getLogger(__name__)

# Several processes must agree on rank 0's clock. This takes a collective operation, so it is not done in every step
STEPS_BETWEEN_CLOCKS = 20
LARGEST_SHARE = 0.05  # of the time, for saving
PARTIAL = re.compile(r"\..+\.ckpt\.\d+")  # a checkpoint that was being written: .last.ckpt.<process id>


class LastCheckpoint(Checkpoint):
    """Write ``dirpath/last.ckpt`` every ``every_n_steps`` steps, every ``every_n_minutes`` minutes and at the end.

    The first epoch is saved too, however short it is. Where saving takes long, it is done less often, so that it takes
    at most a twentieth of the time. The previous checkpoint is kept as ``last.previous.ckpt``. On SIGTERM, SIGHUP or
    SIGINT (Ctrl-C) the run completes the current step, saves and raises ``Stopped``; a second Ctrl-C stops it
    immediately.

    A checkpoint is written only between two optimiser steps, since it does not contain accumulated gradients. If a
    validation follows a step, it is written after the validation, which a resumed run would skip. A run that ends
    within an epoch (``trainer.max_steps``, ``trainer.max_time``) is saved after its last step and resumes from there.
    ``caller``: who gets the signals, and knows the command that resumes the run.
    """

    @validated
    def __init__(
        self, dirpath: str, every_n_steps: LargeCount | None = None, every_n_minutes: Positive | None = None
    ) -> None:
        self.path, self.every_n_steps = Path(dirpath) / "last.ckpt", every_n_steps
        self.every_n_minutes = every_n_minutes
        self.caller = Caller()
        self._listening = ExitStack()
        self._stopped: Stopped | None = None  # set when the run is saved; it stops after this step's values are logged
        self._ends = False  # trainer.should_stop was set inside an accumulation window
        self._max_steps: int | None = None  # the trainer's, while a checkpoint is loaded
        self._saved_at, self._seconds = 0.0, 0.0  # when it was saved, and how long that took

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero and self.path.parent.is_dir():
            for file in self.path.parent.iterdir():
                if PARTIAL.fullmatch(file.name):  # of a run that was killed while it saved
                    file.unlink(missing_ok=True)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Hide ``trainer.max_steps`` until training starts, so that a run saved at an epoch's end can continue."""
        if trainer.state.fn == TrainerFn.FITTING:
            loop = trainer.fit_loop.epoch_loop
            self._max_steps, loop.max_steps = loop.max_steps, -1

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_at = time.monotonic()
        self._stopped, self._ends = None, False
        if self._max_steps is not None:
            trainer.fit_loop.epoch_loop.max_steps = self._max_steps
        self._listen(always=True)
        self.caller.signals.training_starts(self.caller.command("ckpt", self.path))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._stop_if_saved()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_if_saved()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not did_step(trainer, batch_idx):
            self._ends = self._ends or trainer.should_stop
            trainer.should_stop = False  # finish the optimiser step first
            return
        trainer.should_stop = trainer.should_stop or self._ends
        if not ends_epoch(trainer) and not validates_within_epoch(trainer):  # validation comes first
            self._save_if_asked(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING or not validates_within_epoch(trainer):
            return
        if did_step(trainer, trainer.fit_loop.epoch_loop.batch_idx):
            self._save_if_asked(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if ends_epoch(trainer):  # otherwise the run ended within the epoch and was saved after its last step
            ends = trainer.current_epoch in (0, (trainer.max_epochs or 0) - 1)
            self._save_if_asked(trainer, ends)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listening.close()
        best = [path for path in (getattr(c, "best_model_path", "") for c in trainer.checkpoint_callbacks) if path]
        if self.caller.signals.is_listening:
            weights = best[0] if best else str(self.path)
            self.caller.signals.training_ends(weights, self.caller.command("evaluate", weights))
        self._stop_if_saved()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listening.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._listening.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._listening.close()

    def _listen(self, always: bool = False) -> None:
        """Install our signal handlers again, since Lightning sets its own before each loop."""
        self._listening.close()
        if always or self.caller.signals.is_listening:
            self._listening.enter_context(self.caller.signals.listening())

    def _is_due(self, trainer: Trainer) -> bool:
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            return True
        if self.every_n_minutes is None:
            return False
        if trainer.world_size > 1 and trainer.global_step % STEPS_BETWEEN_CLOCKS and not ends_epoch(trainer):
            return False
        late = time.monotonic() - self._saved_at >= max(60 * self.every_n_minutes, self._seconds / LARGEST_SHARE)
        return trainer.strategy.broadcast(late)

    def _save_if_asked(self, trainer: Trainer, ends: bool = False) -> None:
        due, number = ends or self._is_due(trainer), _largest(self.caller.signals.number, trainer)
        if due or number or trainer.should_stop or trainer.global_step == trainer.max_steps:
            self._save(trainer, number)

    def _save(self, trainer: Trainer, number: int) -> None:
        """Save; if ``number`` is a signal, the run stops as soon as Lightning has logged this step's values."""
        began = time.monotonic()
        if trainer.is_global_zero:
            keep_previous(self.path)
        # With the states of optimiser and loops
        trainer.save_checkpoint(self.path, weights_only=False, storage_options=SHARDED)
        self._saved_at = time.monotonic()
        self._seconds = self._saved_at - began
        if number:
            self._stopped = Stopped(
                f"stopped by {signal.Signals(number).name} after step {trainer.global_step}, saved; "
                f"resume with: {self.caller.command('ckpt', self.path)}",
                number,
            )

    def _stop_if_saved(self) -> None:
        stopped, self._stopped = self._stopped, None
        if stopped is not None:
            raise stopped


def _largest(number: int, trainer: Trainer) -> int:
    """Return the largest of the processes' signals ``number``; 0 if none has received one."""
    if not trainer.strategy.reduce_boolean_decision(bool(number), all=False):
        return 0
    return max(gather(number))
