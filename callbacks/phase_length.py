"""Count optimiser steps, and convert the length of a training phase to them.

With ``trainer.accumulate_grad_batches=n`` an optimiser step takes n batches, or the fewer that are left at the end of
an epoch: Lightning always steps on the last batch. ``trainer.global_step`` counts steps.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pytorch_lightning import Trainer

from mtl.checks import require

Part = Annotated[float, Field(gt=0, le=1)]  # of a run


def did_step(trainer: Trainer, batch_idx: int) -> bool:
    """Return whether the optimiser stepped on batch ``batch_idx`` of the epoch; for use in ``on_train_batch_end``."""
    done = batch_idx + 1
    return done % trainer.accumulate_grad_batches == 0 or done >= trainer.num_training_batches


def ends_epoch(trainer: Trainer) -> bool:
    """Return whether the current batch is the last of its epoch."""
    return trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


def validates_within_epoch(trainer: Trainer) -> bool:
    """Return whether ``trainer.val_check_interval`` asks for a validation after this batch, not the epoch's last."""
    every = trainer.val_check_batch  # None or infinite: not counted in batches
    if ends_epoch(trainer) or not every or every == float("inf") or not trainer.enable_validation:
        return False
    loop, epochs = trainer.fit_loop.epoch_loop, trainer.check_val_every_n_epoch
    if epochs is None:
        return (loop.total_batch_idx + 1) % every == 0
    return (trainer.current_epoch + 1) % epochs == 0 and (loop.batch_idx + 1) % every == 0


def epochs_left(trainer: Trainer) -> float | None:
    """Return how many epochs are left at the end of one, at most; None without a limit. An epoch has equal steps."""
    done, left = trainer.current_epoch + 1, list[float]()
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        left.append(trainer.max_epochs - done)
    if trainer.max_steps > 0 and trainer.global_step:
        left.append((trainer.max_steps - trainer.global_step) * done / trainer.global_step)
    return min(left, default=None)


class PhaseLength:
    """Length of the phase ``name``: one of ``steps``, ``epochs`` (may be fractional) or ``fraction`` of the run."""

    def __init__(
        self, name: str, steps: int | None = None, epochs: float | None = None, fraction: float | None = None
    ) -> None:
        lengths = [value for value in (steps, epochs, fraction) if value is not None]
        require(len(lengths) == 1, f"{name}: give exactly one of steps, epochs, fraction")
        self.name, self.steps, self.epochs, self.fraction = name, steps, epochs, fraction

    def in_steps(self, trainer: Trainer) -> float:
        """Return the length in optimiser steps for the run of ``trainer``."""
        if self.steps is not None:
            return self.steps
        per_epoch = -(-int(trainer.num_training_batches) // trainer.accumulate_grad_batches)
        if self.epochs is not None:
            return self.epochs * per_epoch
        assert self.fraction is not None
        limits = []
        if trainer.max_steps > 0:
            limits.append(float(trainer.max_steps))
        if trainer.max_epochs is not None and trainer.max_epochs > 0:
            limits.append(float(trainer.max_epochs * per_epoch))
        require(bool(limits), f"{self.name}: a fraction needs trainer.max_epochs or trainer.max_steps")
        return self.fraction * min(limits)
