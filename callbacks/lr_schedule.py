"""Schedule the learning rate: warm-up, then constant, decaying, or lower when the validation stalls; or one cycle."""

from __future__ import annotations

import math
from typing import Any, Literal

from pytorch_lightning import Callback, LightningModule, Trainer

from mtl.checks import check_choice, check_name, check_number, check_whole, require
from mtl.kinds import Count, CountOrZero, InnerShare, Share
from mtl.training.metrics import mode_of
from mtl.training.module import is_logged
from mtl.training.schedules import one_cycle_factor, rate_factor

from .length import Length

WHERE = "callbacks.lr_schedule"


class ConstantRate(Callback):
    """Raise the learning rate linearly from 0 in the warm-up, then keep it; log it as ``while_training/lr``.

    The warm-up takes ``warmup``, a fraction of the run, or ``warmup_steps`` optimiser steps. Before each step each
    parameter group gets its base rate times a factor, a function of ``trainer.global_step``: a resumed run goes on in
    the right phase. The base rates are kept in the optimiser's groups as ``initial_lr``, as by torch's own schedulers:
    a checkpoint holds them beside the current rates.
    """

    def __init__(self, warmup: Share = 0.0, warmup_steps: CountOrZero | None = None) -> None:
        check_number(f"{WHERE}.warmup", warmup, at_least=0, at_most=1)
        check_whole(f"{WHERE}.warmup_steps", warmup_steps, at_least=0, or_null=True)
        both = f"{WHERE}.warmup={warmup} and {WHERE}.warmup_steps={warmup_steps}: one of them must be 0"
        require(not (warmup and warmup_steps), both)
        what = "warm-up of the learning rate"
        self._warmup: Length | None = None
        if warmup_steps:
            self._warmup = Length(what, steps=warmup_steps)
        elif warmup:
            self._warmup = Length(what, fraction=warmup)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for group in _groups(trainer):
            group.setdefault("initial_lr", group["lr"])  # a resumed run has it from its checkpoint

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        step = trainer.global_step
        factor = self.factor_at(trainer, step)
        for group in _groups(trainer):
            group["lr"] = factor * group["initial_lr"]
        if is_logged(trainer, step):  # the rate of a group without a factor of its own
            pl_module.log(
                "while_training/lr", factor * trainer.optimizers[0].defaults["lr"], on_step=True, on_epoch=False
            )

    def factor_at(self, trainer: Trainer, step: int) -> float:
        """Return the factor of all rates at optimiser step ``step``."""
        return rate_factor(step, self.warmup_length(trainer), math.inf, "constant", 1.0)

    def warmup_length(self, trainer: Trainer) -> float:
        """Return the number of optimiser steps of the warm-up."""
        return self._warmup.in_steps(trainer) if self._warmup else 0.0


class DecayingRate(ConstantRate):
    """After the warm-up, lower the learning rate to ``end_factor`` of its base value at the end of the run."""

    def __init__(
        self,
        shape: Literal["linear", "cosine"] = "linear",
        end_factor: Share = 0.0,
        warmup: Share = 0.0,
        warmup_steps: CountOrZero | None = None,
    ) -> None:
        super().__init__(warmup, warmup_steps)
        check_choice(f"{WHERE}.shape", shape, ("linear", "cosine"))
        check_number(f"{WHERE}.end_factor", end_factor, at_least=0, at_most=1)
        self.shape, self.end_factor = shape, end_factor
        self._run = Length(f"lr_schedule={shape}, which ends with the run", fraction=1.0)

    def factor_at(self, trainer: Trainer, step: int) -> float:
        length = self._run.in_steps(trainer)
        return rate_factor(step, self.warmup_length(trainer), length, self.shape, self.end_factor)


class OneCycleRate(ConstantRate):
    """Raise the learning rate from ``start_factor`` of its base value, which is the highest, and lower it again.

    It rises in the fraction ``peak`` of the run and falls to ``end_factor`` of the base value at its end, by cosines.
    The momentum is left alone.
    """

    def __init__(self, peak: InnerShare = 0.3, start_factor: Share = 0.04, end_factor: Share = 1e-4) -> None:
        super().__init__()
        check_number(f"{WHERE}.peak", peak, above=0, at_most=1)
        check_number(f"{WHERE}.start_factor", start_factor, at_least=0, at_most=1)
        check_number(f"{WHERE}.end_factor", end_factor, at_least=0, at_most=1)
        self.peak, self.start_factor, self.end_factor = peak, start_factor, end_factor
        self._run = Length("lr_schedule=one_cycle, which ends with the run", fraction=1.0)

    def factor_at(self, trainer: Trainer, step: int) -> float:
        return one_cycle_factor(step, self._run.in_steps(trainer), self.peak, self.start_factor, self.end_factor)


class PlateauRate(ConstantRate):
    """Multiply the learning rate by ``factor`` whenever ``patience`` validations did not improve ``monitor``.

    ``mode``: auto: see ``mode_of``.

    Every checkpoint holds the best value, the validations since, and the product of the factors so far.
    """

    def __init__(
        self,
        monitor: str = "val/loss",
        mode: Literal["min", "max", "auto"] = "auto",
        factor: InnerShare = 0.5,
        patience: Count = 5,
        warmup: Share = 0.0,
        warmup_steps: CountOrZero | None = None,
    ) -> None:
        super().__init__(warmup, warmup_steps)
        check_name(f"{WHERE}.monitor", monitor)
        of_validation = monitor.startswith("val/")
        require(of_validation, f"{WHERE}.monitor={monitor}: must be a value of the validation, such as val/loss")
        check_choice(f"{WHERE}.mode", mode, ("min", "max", "auto"))
        check_number(f"{WHERE}.factor", factor, above=0, at_most=1)
        check_whole(f"{WHERE}.patience", patience, at_least=1)
        self.monitor, self.mode = monitor, mode_of(monitor, mode)
        self.patience, self.reduction = patience, factor
        self.best: float | None = None
        self.waited, self.scale = 0, 1.0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or self.monitor not in trainer.callback_metrics:
            return
        value = float(trainer.callback_metrics[self.monitor])
        if math.isnan(value):  # a metric that is undefined on the rows
            return
        if self.best is None or (value < self.best if self.mode == "min" else value > self.best):
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            self.waited, self.scale = 0, self.scale * self.reduction

    def factor_at(self, trainer: Trainer, step: int) -> float:
        return self.scale * super().factor_at(trainer, step)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "scale": self.scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.waited, self.scale = (state_dict[name] for name in ("best", "waited", "scale"))


def _groups(trainer: Trainer) -> list[dict[str, Any]]:
    return [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
