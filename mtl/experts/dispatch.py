"""Choose how the experts of a mixture layer are executed: all of them, or those that some weight asks for."""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mtl.experts.pairs import Pairs
from mtl.functional import Key
from mtl.products import onednn_multiplies
from mtl.types import Routing, require

log = logging.getLogger(__name__)

EXECUTIONS = ("auto", "dense", "sparse")
SPARSE_BELOW, DENSE_ABOVE = 0.6, 0.75  # share of (sample, expert) pairs; sparse costs as much as dense at about 0.7
CHUNK = 512  # rows at a time without gradient: what a larger batch writes has left the cache when it is read


class Experts(Protocol):
    """What ``Dispatch`` needs of stacked experts; ``StackedDense`` says more."""

    num_experts: int
    output_dim: int

    def draw_keys(self) -> list[Key]: ...

    def mixture(
        self, x: Tensor, weights: Tensor, subset: list[int] | None = None, keys: list[Key] | None = None
    ) -> Tensor: ...

    def pairs_mixture(self, x: Tensor, weights: Tensor, pairs: Pairs, keys: list[Key] | None = None) -> Tensor: ...


class Dispatch(nn.Module):
    """Mix the experts' outputs: ``dispatch(experts, x, routing) -> [B, T, H]``.

    ``execution="dense"`` computes every expert on every sample, ``"sparse"`` each (sample, expert) pair of nonzero
    weight once for all tasks; results and gradients are the same, also with dropout at the same seed. ``"auto"`` trains
    in the way that ``adapt`` last found cheaper, dense at first, and evaluates batch by batch in the cheaper way. What
    ``adapt`` found is part of the state, so that a resumed run takes the same path. A routing whose zeros still carry
    a gradient is always executed dense.
    """

    def __init__(self, execution: str = "auto") -> None:
        super().__init__()
        require(execution in EXECUTIONS, f"network.execution={execution}: accepted are {', '.join(EXECUTIONS)}")
        self.execution, self.sparse = execution, False

    def forward(self, experts: Experts, x: Tensor, routing: Routing) -> Tensor:
        """Mix by ``routing.weights [B, T, E]`` or ``[T, E]`` what the experts make of ``x [B, D]``."""
        sparse, keys, weights = self._is_sparse(routing), experts.draw_keys(), routing.weights
        if torch.is_grad_enabled() or len(x) <= CHUNK:
            return self._mix(experts, x, weights, sparse, keys)
        static = weights.dim() == 2
        chunks = [slice(start, start + CHUNK) for start in range(0, len(x), CHUNK)]
        return torch.cat(
            [self._mix(experts, x[rows], weights if static else weights[rows], sparse, keys) for rows in chunks]
        )

    def adapt(self, weights: Tensor) -> None:
        """Choose how to train on from what share of pairs these weights use: sparse below 0.6, dense above 0.75."""
        if self.execution != "auto":
            return
        share = used_share(weights)
        sparse = share < (DENSE_ABOVE if self.sparse else SPARSE_BELOW)
        if sparse != self.sparse:
            kind = "sparse" if sparse else "dense"
            log.info("experts are executed %s: %.0f %% of their evaluations are needed", kind, 100 * share)
        self.sparse = sparse

    def get_extra_state(self) -> dict[str, Any]:
        return {"sparse": self.sparse}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.sparse = bool(state["sparse"])

    def _mix(self, experts: Experts, x: Tensor, weights: Tensor, sparse: bool, keys: list[Key]) -> Tensor:
        if not sparse:
            return experts.mixture(x, weights, None, keys)
        if weights.dim() == 2:  # every sample uses the same experts
            used = (weights != 0).any(0).nonzero().flatten().tolist()
            return experts.mixture(x, weights[:, used], used, keys)
        pairs = Pairs(weights.detach(), fill=onednn_multiplies(x))
        return experts.pairs_mixture(x, weights, pairs, keys)

    def _is_sparse(self, routing: Routing) -> bool:
        if self.execution == "dense" or not routing.exact_zeros:
            return False
        if self.execution == "sparse":
            return True
        return self.sparse if self.training else used_share(routing.weights) < DENSE_ABOVE


def used_share(weights: Tensor) -> float:
    """Return the share of (sample, expert) pairs of ``weights [..., T, E]`` that at least one task weighs."""
    return float((weights != 0).any(-2).float().mean())
