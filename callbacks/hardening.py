"""End the soft phase of a learnt permutation."""

from __future__ import annotations

import logging

import torch
from pytorch_lightning import Callback, LightningModule, Trainer

from callbacks.length import Length
from mtl.permutation import Permutation
from mtl.types import require

log = logging.getLogger(__name__)


class PermutationHardening(Callback):
    """Harden the module ``target`` before the first step after its soft phase of ``steps``, ``epochs`` or ``fraction``.

    The first process decides and the others take its matrix. The distance between the soft and the hard matrix is
    logged as ``permutation/soft_to_hard``, and the optimiser forgets what it knew of the logits.
    """

    def __init__(
        self,
        target: str = "network.permutation",
        steps: int | None = None,
        epochs: float | None = None,
        fraction: float | None = None,
    ) -> None:
        self.target, self.length = target, Length("soft phase of the permutation", steps, epochs, fraction)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        modules = dict(pl_module.named_modules())
        found = isinstance(modules.get(self.target), Permutation)
        require(found, f"permutation=sinkhorn: {type(pl_module.network).__name__} has no gate whose experts to permute")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        permutation = pl_module.get_submodule(self.target)
        assert isinstance(permutation, Permutation)
        if permutation.is_hard or trainer.global_step < self.length.in_steps(trainer):
            return
        distance = permutation.harden(trainer.strategy.broadcast(permutation.assignment()))
        for optimizer in trainer.optimizers:
            optimizer.state.pop(permutation.logits, None)
        pl_module.log("permutation/soft_to_hard", distance, on_step=True, on_epoch=False)
        moved = int((permutation.order != torch.arange(permutation.order.shape[-1], device=pl_module.device)).sum())
        log.info(
            "step %d: permutation hardened, %d of %d experts moved, distance of soft to hard matrix %.3g",
            trainer.global_step,
            moved,
            permutation.order.numel(),
            distance,
        )
