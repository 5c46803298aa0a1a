"""Switch the execution of experts to sparse when that is cheaper."""

from __future__ import annotations

from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from mtl.checks import check_whole
from mtl.networks.mixture import MixtureOfExperts

from .length import took_step


class ExecutionSwitch(Callback):
    """Let the mixture layers with ``execution=auto`` adapt to the routing in every ``every_steps``-th step.

    The choice depends on the routing alone, never on measured time, so a repeated run makes the same choices.
    """

    def __init__(self, every_steps: int = 50) -> None:
        check_whole("callbacks.execution.every_steps", every_steps, at_least=1)
        self.every_steps = every_steps

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not took_step(trainer, batch_idx) or (trainer.global_step - 1) % self.every_steps:
            return
        network: Any = pl_module.network
        for name, routings in outputs["routings"].items():
            layer = network.get_submodule(name)
            if isinstance(layer, MixtureOfExperts) and all(routing.exact_zeros for routing in routings):
                layer.dispatch.adapt(*(routing.weights.detach() for routing in routings))
