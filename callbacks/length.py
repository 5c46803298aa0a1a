"""Convert the length of a training phase to optimiser steps."""

from __future__ import annotations

from pytorch_lightning import Trainer

from mtl.types import require


class Length:
    """Length of the phase ``what``: one of ``steps``, ``epochs`` (may be fractional) or ``fraction`` of the run."""

    def __init__(
        self, what: str, steps: int | None = None, epochs: float | None = None, fraction: float | None = None
    ) -> None:
        given = [value for value in (steps, epochs, fraction) if value is not None]
        require(len(given) == 1, f"{what}: give exactly one of steps, epochs, fraction")
        require(given[0] > 0, f"{what}: the length {given[0]} must be greater than 0")
        require(fraction is None or fraction <= 1, f"{what}: fraction={fraction} must be at most 1, the whole run")
        self.what, self.steps, self.epochs, self.fraction = what, steps, epochs, fraction

    def in_steps(self, trainer: Trainer) -> float:
        """Return the length in optimiser steps for the run of ``trainer``."""
        if self.steps is not None:
            return self.steps
        per_epoch = trainer.num_training_batches
        if self.epochs is not None:
            return self.epochs * per_epoch
        assert self.fraction is not None
        limits = []
        if trainer.max_steps > 0:
            limits.append(float(trainer.max_steps))
        if trainer.max_epochs is not None and trainer.max_epochs > 0:
            limits.append(float(trainer.max_epochs * per_epoch))
        require(limits, f"{self.what}: a fraction needs trainer.max_epochs or trainer.max_steps")
        return self.fraction * min(limits)
