"""Stop a run whose numbers are no longer numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from mtl.types import InputError


class FiniteGuard(Callback):
    """End the run with InputError when the loss, a gradient or a weight is NaN or infinite.

    The message names the parameter, and of stacked ones the expert or task. On a CPU the loss is looked at before each
    update, so that the weights stay what they were; elsewhere, and the gradients, every ``every_steps`` steps. Weights
    are looked at before a checkpoint is written: a bad one never takes the place of the last good one.
    """

    def __init__(self, every_steps: int = 50) -> None:
        self.every_steps = every_steps

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if loss.device.type != "cpu" and trainer.global_step % self.every_steps:
            return  # looking at it would make the processor wait for the device
        value = float(loss.detach())
        if not math.isfinite(value):
            _stop(trainer, f"the loss is {value}", _culprits(pl_module, lambda p: p))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if trainer.global_step % self.every_steps == 0:
            found = _culprits(pl_module, lambda p: p.grad)
            if found:
                _stop(trainer, "a gradient is not finite", found)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        found = _culprits(pl_module, lambda p: p)
        if found:
            _stop(trainer, "a weight is not finite", found)


def _culprits(module: nn.Module, tensor_of: Any) -> list[str]:
    """Return the parameters in which something is not finite, with the places along the first dimension."""
    found = []
    for name, parameter in module.named_parameters():
        value = tensor_of(parameter)
        if value is None or torch.isfinite(value.sum()):  # one number per parameter; a sum can only add doubt
            continue
        bad = ~torch.isfinite(value)
        if bad.any():
            places = bad.flatten(1).any(1).nonzero().flatten().tolist() if value.dim() > 1 else []
            kind = "experts" if ".experts." in name else "tasks" if ".gate." in name or ".heads." in name else "rows"
            found.append(f"{name} ({kind} {', '.join(map(str, places[:8]))})" if places else name)
    return found


def _stop(trainer: Trainer, what: str, found: list[str]) -> None:
    where = f" in {'; '.join(found[:4])}" if found else ", all weights are finite"
    raise InputError(
        f"step {trainer.global_step}: {what}{where}. The last checkpoint is from before. A lower optimizer.lr or "
        "trainer.gradient_clip_val=1 may help; so may a look at the data's ranges"
    )
