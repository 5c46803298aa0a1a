"""Stop a run whose loss, gradients or weights are NaN or infinite."""

from __future__ import annotations

import math
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from mtl.checks import InputError, check_whole


class FiniteGuard(Callback):
    """Raise InputError when the loss, a gradient or a weight is NaN or infinite.

    The message names the parameter and, if it is stacked, the expert or task. On a CPU the loss is checked before every
    update, so that a bad loss never changes the weights. On other devices the loss is checked every ``every_steps``
    steps, as are the gradients on all devices. Weights are checked before a checkpoint is written, so that a bad
    checkpoint never replaces the last good one.
    """

    def __init__(self, every_steps: int = 50) -> None:
        check_whole("callbacks.finite.every_steps", every_steps, at_least=1)
        self.every_steps = every_steps

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if loss.device.type != "cpu" and trainer.global_step % self.every_steps:
            return  # reading the loss would make the CPU wait for the device
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
    """Return the parameters that contain NaN or infinity, with the affected indices of their first dimension."""
    found = []
    for name, parameter in module.named_parameters():
        value = tensor_of(parameter)
        # Quick test: a finite sum implies finite elements. The sum of finite elements can overflow, so look again below
        if value is None or torch.isfinite(value.sum()):
            continue
        bad = ~torch.isfinite(value)
        if bad.any():
            indices = bad.flatten(1).any(1).nonzero().flatten().tolist() if value.dim() > 1 else []
            kind = "experts" if ".experts." in name else "tasks" if ".gate." in name or ".heads." in name else "rows"
            found.append(f"{name} ({kind} {', '.join(map(str, indices[:8]))})" if indices else name)
    return found


def _stop(trainer: Trainer, what: str, found: list[str]) -> None:
    where = f" in {'; '.join(found[:4])}" if found else "; all weights are finite"
    raise InputError(
        f"step {trainer.global_step}: {what}{where}. The last checkpoint was saved before that. Try a lower "
        "optimizer.lr or trainer.gradient_clip_val=1, and check the data for extreme values"
    )
