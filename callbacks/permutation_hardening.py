"""End the soft phase of a learnt permutation."""

from __future__ import annotations

import logging

from pytorch_lightning import Callback, LightningModule, Trainer

from mtl.checks import require
from mtl.distributed import summon_full_params
from mtl.gates.permuted import Permutation
from mtl.options import LargeCount, Positive, validated

from .phase_length import Part, PhaseLength

log = logging.getLogger(__name__)


class PermutationHardening(Callback):
    """Harden all learnt permutations before the first step after their soft phase.

    Give the length of the phase as one of ``steps``, ``epochs`` or ``fraction`` (of the run). Rank 0 computes the
    assignment and broadcasts it. The mean distance between the soft and the hard matrices is logged as
    ``train/permutation_soft_to_hard``. The optimiser's state of the permutation logits is dropped.
    """

    @validated
    def __init__(
        self, steps: LargeCount | None = None, epochs: Positive | None = None, fraction: Part | None = None
    ) -> None:
        self.length = PhaseLength("soft phase of the permutation", steps, epochs, fraction)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        name = type(pl_module.network).__name__
        has_permutation = bool(_permutations(pl_module))
        require(has_permutation, f"permutation=sinkhorn: {name} has no gate to permute; use permutation=none")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        soft = [permutation for permutation in _permutations(pl_module) if not permutation.is_hard]
        if not soft or trainer.global_step < self.length.in_steps(trainer):
            return
        distances = []
        with summon_full_params(trainer):
            for permutation in soft:
                distances.append(permutation.harden(trainer.strategy.broadcast(permutation.assignment())))
        for permutation in soft:
            for optimizer in trainer.optimizers:
                optimizer.state.pop(permutation.logits, None)
        distance = sum(distances) / len(distances)
        pl_module.log("train/permutation_soft_to_hard", distance, on_step=True, on_epoch=False)
        message = "step %d: permutation hardened, distance between soft and hard matrix %.3g"
        log.info(message, trainer.global_step, distance)


def _permutations(module: LightningModule) -> list[Permutation]:
    return [part for part in module.modules() if isinstance(part, Permutation)]
