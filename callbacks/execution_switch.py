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
        self._layers: list[Dispatch] = []  # those that have a choice

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = [module for module in pl_module.modules() if isinstance(module, Dispatch)]
        self._layers = [layer for layer in found if layer.execution == "auto"]
        need_hook(trainer, self, "on_train_batch_end", bool(self._layers))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        routing = outputs["routing"]
        if routing is None or not routing.exact_zeros or (trainer.global_step - 1) % self.every_steps:
            return
        for layer in self._layers:
            layer.adapt(routing.weights.detach())
