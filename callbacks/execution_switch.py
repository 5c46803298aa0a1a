"""Switch the execution of experts to sparse when that is cheaper."""

from __future__ import annotations

from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from mtl.networks.mixture import MixtureOfExperts


class ExecutionSwitch(Callback):
    """Let the mixture layers with ``execution=auto`` adapt to the routing of every ``every_steps``-th training batch.

    The choice depends on the routing alone, never on measured time, so a repeated run makes the same choices.
    """

    def __init__(self, every_steps: int = 50) -> None:
        self.every_steps = every_steps

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (trainer.global_step - 1) % self.every_steps:
            return
        network: Any = pl_module.network
        for name, routing in outputs["routings"].items():
            layer = network.get_submodule(name)
            if isinstance(layer, MixtureOfExperts) and routing.exact_zeros:
                layer.dispatch.adapt(routing.weights.detach())
