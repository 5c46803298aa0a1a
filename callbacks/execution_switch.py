"""Execute experts sparse where this is cheaper."""

from __future__ import annotations

from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from mtl.experts.dispatch import Dispatch
from mtl.hooks import need_hook


class ExecutionSwitch(Callback):
    """Let the mixture layers with ``execution=auto`` adapt to the routing of every ``every_steps``-th training batch.

    Counted in steps, never timed: the same run takes the same path.
    """

    def __init__(self, every_steps: int = 50) -> None:
        self.every_steps = every_steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        need_hook(trainer, self, "on_train_batch_end", any(layer.execution == "auto" for layer in _layers(pl_module)))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        routing = outputs["routing"]
        if routing is None or not routing.exact_zeros or (trainer.global_step - 1) % self.every_steps:
            return
        for layer in _layers(pl_module):
            layer.adapt(routing.weights.detach())


def _layers(module: LightningModule) -> list[Dispatch]:
    return [part for part in module.modules() if isinstance(part, Dispatch)]
