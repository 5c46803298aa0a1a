"""Choose how the experts of a mixture layer are executed: all of them, or those that some weight asks for."""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mtl.experts.kernels import mix_pairs
from mtl.experts.pairs import Pairs
from mtl.types import Routing, require

log = logging.getLogger(__name__)

EXECUTIONS = ("auto", "dense", "sparse")
SPARSE_BELOW, DENSE_ABOVE = 0.6, 0.75  # share of (sample, expert) pairs; sparse costs as much as dense at about 0.7
STEPS_BETWEEN_CHECKS = 50
CHUNK = 512  # rows at a time without gradient: what a larger batch writes has left the cache when it is read


class Experts(Protocol):
    """What ``Dispatch`` needs of stacked experts; ``StackedDense`` says more."""

    num_experts: int
    output_dim: int

    def draw_keys(self) -> list[int]: ...

    def mixture(
        self, x: Tensor, weights: Tensor, subset: list[int] | None = None, keys: list[int] | None = None
    ) -> Tensor: ...

    def on_pairs(self, x: Tensor, pairs: Pairs, keys: list[int] | None = None) -> Tensor: ...


class Dispatch(nn.Module):
    """Mix the experts' outputs: ``dispatch(experts, x, routing) -> [B, T, H]``.

    ``execution="dense"`` computes every expert on every sample, ``"sparse"`` each (sample, expert) pair of nonzero
    weight once for all tasks; results and gradients are the same, also with dropout at the same seed. ``"auto"``
    looks every 50 training steps at the share of pairs that are used, turns sparse below 0.6 and dense above 0.75;
    which of the two is in use is part of the state, so that a resumed run takes the same path. Evaluation decides
    batch by batch. A routing whose zeros still carry a gradient is always executed dense.
    """

    def __init__(self, execution: str = "auto") -> None:
        super().__init__()
        require(execution in EXECUTIONS, f"network.execution={execution}: accepted are {', '.join(EXECUTIONS)}")
        self.execution = execution
        self.sparse, self.steps = False, 0

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

    def get_extra_state(self) -> dict[str, Any]:
        return {"sparse": self.sparse, "steps": self.steps}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.sparse, self.steps = bool(state["sparse"]), int(state["steps"])

    def _mix(self, experts: Experts, x: Tensor, weights: Tensor, sparse: bool, keys: list[int]) -> Tensor:
        if not sparse:
            return experts.mixture(x, weights, None, keys)
        if weights.dim() == 2:  # every sample uses the same experts
            used = (weights != 0).any(0).nonzero().flatten().tolist()
            return experts.mixture(x, weights[:, used], used, keys)
        pairs = Pairs.of(weights.detach())
        return mix_pairs(experts.on_pairs(x, pairs, keys), weights, pairs)

    def _is_sparse(self, routing: Routing) -> bool:
        if self.execution == "dense" or not routing.exact_zeros:
            return False
        if self.execution == "sparse":
            return True
        if not self.training:
            return used_share(routing.weights) < DENSE_ABOVE
        if self.steps % STEPS_BETWEEN_CHECKS == 0:
            share = used_share(routing.weights)
            sparse = share < (DENSE_ABOVE if self.sparse else SPARSE_BELOW)
            if sparse != self.sparse:
                kind = "sparse" if sparse else "dense"
                log.info("experts are executed %s: %.0f %% of their evaluations are needed", kind, 100 * share)
            self.sparse = sparse
        self.steps += 1
        return self.sparse


def used_share(weights: Tensor) -> float:
    """Return the share of (sample, expert) pairs of ``weights [..., T, E]`` that at least one task weighs."""
    return float((weights != 0).any(-2).float().mean())
