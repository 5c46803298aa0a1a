"""Choose how the experts of a mixture layer are executed: all experts, or only experts of nonzero weight."""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mtl.distributed import all_reduce_sum, world_size
from mtl.experts.assignments import Assignments
from mtl.experts.base import Experts
from mtl.options import validated
from mtl.types import Routing

log = logging.getLogger(__name__)

Execution = Literal["auto", "dense", "sparse"]
# Shares of (sample, expert) pairs in use. Sparse and dense cost the same at about 0.7; the gap prevents switching
# back and forth
SPARSE_BELOW, DENSE_ABOVE = 0.6, 0.75


class Dispatch(nn.Module):
    """Mix the experts' outputs: ``dispatch(experts, x, routing) -> [B, T, H]``.

    ``execution="dense"`` computes every expert on every sample, ``"sparse"`` each (sample, expert) pair of nonzero
    weight once for all tasks; results and gradients are the same, also with dropout at the same seed. ``"auto"`` starts
    dense and trains in the mode that ``adapt`` last chose; in evaluation it chooses the cheaper mode for each batch.
    The choice of ``adapt`` is saved in checkpoints, so that a resumed run executes the same operations. Where gradients
    are taken, a routing whose zeros are not exact is executed dense.
    """

    @validated
    def __init__(self, execution: Execution = "auto") -> None:
        super().__init__()
        self.execution, self.sparse = execution, False

    def forward(self, experts: Experts, x: Tensor, routing: Routing) -> Tensor:
        """Mix the experts' outputs on ``x [B, ...]`` by ``routing.weights [B, T, E]`` or ``[T, E]``."""
        sparse, masks, weights = self._is_sparse(routing), experts.masks(), routing.weights
        if not sparse:
            return experts.mixture(x, weights, None, masks)
        if weights.dim() == 2:  # every sample uses the same experts
            used = (weights != 0).any(0).nonzero().flatten().tolist()
            return experts.mixture(x, weights[:, used], used, masks)
        return experts.sparse_mixture(x, weights, Assignments(weights.detach()), masks)

    def adapt(self, *weights: Tensor) -> None:
        """Choose the mode for training by the share of pairs in use: sparse below 0.6, dense above 0.75.

        ``weights``: the weights of each batch of a step. All processes of a run call this, and choose alike: the one
        that writes the checkpoint saves the mode of all.
        """
        if self.execution != "auto":
            return
        share = float(all_reduce_sum(torch.tensor(used_share(*weights), device=weights[0].device))) / world_size()
        sparse = share < (DENSE_ABOVE if self.sparse else SPARSE_BELOW)
        if sparse != self.sparse:
            where = "only where they are used" if sparse else "for all rows"
            log.info("experts are computed %s: a row uses %.0f %% of them", where, 100 * share)
        self.sparse = sparse

    def get_extra_state(self) -> dict[str, Any]:
        return {"sparse": self.sparse}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.sparse = bool(state["sparse"])

    def _is_sparse(self, routing: Routing) -> bool:
        exact = routing.exact_zeros or not torch.is_grad_enabled()
        if self.execution == "dense" or not exact:
            return False
        if self.execution == "sparse":
            return True
        return self.sparse if self.training else used_share(routing.weights) < DENSE_ABOVE


def used_share(*weights: Tensor) -> float:
    """Return the share of (sample, expert) pairs for which some task's weight in ``weights [..., T, E]`` is not 0."""
    return float(torch.cat([(weight != 0).any(-2).flatten() for weight in weights]).float().mean())
