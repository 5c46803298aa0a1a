"""Schedule the learning rate: warm-up, then constant, decaying, or lower when the validation stalls; or one cycle."""

from __future__ import annotations

import math
from typing import Any, Literal

from pytorch_lightning import Callback, LightningModule, Trainer

from mtl.checks import require
from mtl.options import Count, Fraction, LargeCountOrZero, Name, OpenFraction, validated
from mtl.training.metrics import mode_of
from mtl.training.module import MultiTaskModule, is_logged
from mtl.training.schedules import lr_factor_at

from .monitoring import MonitoringCallback
from .phase_length import PhaseLength

SECTION = "callbacks.lr_schedule"


class LearningRate(Callback):
    """Raise the learning rate in the warm-up, then keep it or lower it; log it as ``train/lr``.

    It rises from ``start_factor`` times its base value in the shape ``rise``, for ``warmup``, a fraction of the run, or
    for ``warmup_steps`` optimiser steps. Then it is constant, or falls in the given ``shape`` to ``end_factor`` times
    its base value at the end of the run. The momentum does not change.

    Before each step, each parameter group gets its base rate times a factor, a function of ``trainer.global_step``. A
    resumed run therefore continues in the right phase, even with another length or schedule; torch's schedulers would
    keep the old rate. The base rates are stored in the optimiser's groups as ``initial_lr``, and so in checkpoints.
    """

    @validated
    def __init__(
        self,
        shape: Literal["constant", "linear", "cosine"] = "constant",
        end_factor: Fraction = 0.0,
        warmup: Fraction = 0.0,
        warmup_steps: LargeCountOrZero | None = None,
        rise: Literal["linear", "cosine"] = "linear",
        start_factor: Fraction = 0.0,
    ) -> None:
        both = f"{SECTION}.warmup={warmup} and {SECTION}.warmup_steps={warmup_steps}: one of them must be 0"
        require(not (warmup and warmup_steps), both)
        self.shape, self.end_factor, self.rise, self.start_factor = shape, end_factor, rise, start_factor
        self._run = PhaseLength(f"lr_schedule={shape}, which ends with the run", fraction=1.0)
        self._warmup: PhaseLength | None = None
        if warmup or warmup_steps:
            self._warmup = PhaseLength("warm-up of the learning rate", warmup_steps or None, None, warmup or None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for group in _groups(trainer):
            group.setdefault("initial_lr", group["lr"])  # a resumed run has it from its checkpoint

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        step = trainer.global_step
        factor = self.factor_at(trainer, step)
        for group in _groups(trainer):
            group["lr"] = factor * group["initial_lr"]
        if is_logged(trainer, step):  # the rate of a group without its own factor
            rate = factor * trainer.optimizers[0].defaults["lr"]
            pl_module.log("train/lr", rate, on_step=True, on_epoch=False)

    def factor_at(self, trainer: Trainer, step: int) -> float:
        """Return the factor of all rates at optimiser step ``step``."""
        warmup = self._warmup.in_steps(trainer) if self._warmup else 0.0
        length = math.inf if self.shape == "constant" else self._run.in_steps(trainer)
        return lr_factor_at(step, warmup, length, self.shape, self.end_factor, self.rise, self.start_factor)


class PlateauRate(MonitoringCallback, LearningRate):
    """Multiply the learning rate by ``factor`` whenever ``patience`` validations did not improve ``monitor``.

    ``mode``: auto: see ``mode_of``. Every checkpoint holds the best value, the number of validations since, and the
    product of the factors so far.
    """

    section, within_epochs = SECTION, True

    @validated
    def __init__(
        self,
        monitor: Name = "val/loss",
        mode: Literal["min", "max", "auto"] = "auto",
        factor: OpenFraction = 0.5,
        patience: Count = 5,
        warmup: Fraction = 0.0,
        warmup_steps: LargeCountOrZero | None = None,
    ) -> None:
        super().__init__(warmup=warmup, warmup_steps=warmup_steps)
        of_validation = monitor.startswith("val/")
        require(of_validation, f"{SECTION}.monitor={monitor}: must be a value of the validation, such as val/loss")
        self.monitor, self.mode = monitor, mode_of(monitor, mode)
        self.patience, self.reduction = patience, factor
        self.best = math.inf if self.mode == "min" else -math.inf
        self.waited, self.scale = 0, 1.0

    def on_value(self, trainer: Trainer, pl_module: MultiTaskModule, value: float) -> None:
        if math.isnan(value):  # it is neither better nor worse
            return
        if value < self.best if self.mode == "min" else value > self.best:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            self.waited, self.scale = 0, self.scale * self.reduction

    def factor_at(self, trainer: Trainer, step: int) -> float:
        return self.scale * super().factor_at(trainer, step)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "best": self.best, "waited": self.waited, "scale": self.scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.best, self.waited, self.scale = (state_dict[name] for name in ("best", "waited", "scale"))


def _groups(trainer: Trainer) -> list[dict[str, Any]]:
    return [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
