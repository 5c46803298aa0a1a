"""Local search around any gate: a learnt permutation of the experts (COMET: Ibrahim et al. 2023, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import scipy  # imports its parts at their first use
import torch
from torch import Tensor, nn

from mtl.distributed import broadcast
from mtl.gates.base import Gate, GateWrapper
from mtl.nn.functional import KeepsBufferPrecision, at_least_float32, entropy, in_float64
from mtl.options import Count, NonNegative, Positive, validated
from mtl.types import Routing

LOGIT_RANGE = 0.05  # logits start U(-0.05, 0.05), as in the reference implementation


class Permutation(KeepsBufferPrecision):
    """Turn the weights g of a gate into out_j = sum_i g_i P_ij, with P a learnt permutation matrix of the experts.

    *Soft phase*: P = S^R(U / ``tau``), the result of R = ``rounds`` Sinkhorn normalizations of rows and columns; it
    becomes doubly stochastic as R grows. The permuted weights are renormalized if the gate's weights sum to one.
    ``entropy_weight`` (zeta) times the entropies of P and of its row-normalized form drives P to a permutation matrix.
    ``harden()`` ends the phase: P becomes the Hungarian assignment of the last soft P and is kept in a buffer; after
    that only network and gate are trained. Evaluation always uses the assignment, also during the soft phase.

    Parameters ``logits [P, E, E]`` with P = ``num_tasks`` if ``per_task``, else 1 for all tasks; buffers ``tau`` and
    ``rounds`` (schedulable), ``order [P, E]`` (output j takes weight ``order[j]``) and ``hardened``. ``noise`` scales
    standard Gumbel noise that is added to U in training.
    """

    tau: Tensor
    rounds: Tensor
    order: Tensor
    hardened: Tensor

    @validated
    def __init__(
        self,
        num_experts: int,
        num_tasks: int = 1,
        per_task: bool = False,
        tau: Positive = 1e-3,
        rounds: Count = 20,
        entropy_weight: NonNegative = 0.0,
        noise: NonNegative = 0.0,
    ) -> None:
        super().__init__()
        self.per_task, self.entropy_weight, self.noise = per_task, entropy_weight, noise
        count = num_tasks if per_task else 1
        self.logits = nn.Parameter(torch.empty(count, num_experts, num_experts).uniform_(-LOGIT_RANGE, LOGIT_RANGE))
        self.register_buffer("tau", torch.tensor(float(tau), dtype=torch.float64))  # not rounded to float32
        self.register_buffer("rounds", torch.tensor(float(rounds), dtype=torch.float64))
        self.register_buffer("order", torch.arange(num_experts).repeat(count, 1))
        self.register_buffer("hardened", torch.tensor(False))
        self.is_hard = False  # a copy of the buffer, to be read without waiting for the device

    def soft(self) -> Tensor:
        """Return the doubly stochastic matrices of the soft phase, ``[P, E, E]``."""
        logits = at_least_float32(self.logits)
        if self.noise and self.training:
            uniform = torch.rand_like(in_float64(logits)).clamp(1e-300, 1 - 1e-16)
            gumbel = -(-uniform.log()).log()
            logits = logits + self.noise * broadcast(gumbel).to(logits)  # equal on all processes
        return sinkhorn(logits, float(self.tau), int(self.rounds))

    def assignment(self) -> Tensor:
        """Return ``[P, E]``: the weight that each output takes, by the Hungarian assignment of the soft matrices."""
        if self.is_hard:
            return self.order
        matrices = sinkhorn(at_least_float32(self.logits.detach()), float(self.tau), int(self.rounds)).cpu().numpy()
        assign = scipy.optimize.linear_sum_assignment
        rows = [assign(matrix, maximize=True)[1] for matrix in matrices]  # column of each row
        return torch.as_tensor(np.stack(rows)).argsort(-1).to(self.order.device)

    def matrix(self) -> Tensor:
        """Return the permutation matrices that evaluation uses, ``[P, E, E]``: P_ij = 1 where output j takes i."""
        order = self.assignment()
        return torch.zeros_like(self.logits).scatter_(1, order[:, None], 1.0)

    @torch.no_grad()
    def harden(self, order: Tensor | None = None) -> float:
        """End the soft phase with ``order [P, E]`` (default: the current assignment); return how far P moved.

        The distance is the Frobenius norm of the soft minus the hard matrix, averaged over the matrices.
        """
        soft = sinkhorn(at_least_float32(self.logits), float(self.tau), int(self.rounds))
        self.order.copy_(self.assignment() if order is None else order)
        self.hardened.fill_(True)
        self.is_hard = True
        return float((soft - self.matrix()).flatten(1).norm(dim=1).mean())

    def forward(self, routing: Routing, tasks: Sequence[int] | None = None, sums_to_one: bool = True) -> Routing:
        """Permute ``routing.weights [B, T, E]`` or ``[T, E]`` of the wanted ``tasks`` (default all).

        ``sums_to_one``: the gate's weights sum to one; after a soft matrix they are renormalized.
        """
        weights = routing.weights
        rows = list(tasks) if self.per_task and tasks is not None else slice(None)
        if self.is_hard or not self.training:
            order = self.assignment()[rows]
            permuted = weights.gather(-1, order.expand(weights.shape))  # no product: a weight of 0 stays exactly 0
            selectors, losses = routing.selectors, routing.losses
            if selectors is not None:
                selectors = selectors.gather(-1, order[:, None].expand(selectors.shape))
            if self.training:  # give the logits a gradient of exactly 0: DDP expects a gradient of every parameter
                losses = {**losses, "permutation": 0.0 * self.logits.sum()}
            return replace(routing, weights=permuted, losses=losses, selectors=selectors)
        soft = self.soft()
        permuted = permute(weights, soft[rows], normalize=sums_to_one)
        losses = {**routing.losses, "permutation": self.entropy_weight * matrix_entropy(soft)}
        return replace(routing, weights=permuted, losses=losses, exact_zeros=False)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        if f"{prefix}order" not in state_dict:  # ``start_from`` leaves out an order of other experts
            state_dict = {name: value for name, value in state_dict.items() if name != f"{prefix}hardened"}
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.is_hard = bool(self.hardened)


class PermutedGate(GateWrapper):
    """Add local search to ``gate``: permute its weights by ``permutation``.

    The permuted weights are renormalized if those of ``gate`` sum to one.
    """

    @validated
    def __init__(self, gate: Gate, permutation: Permutation) -> None:
        super().__init__(gate)
        self.permutation = permutation

    def change(self, routing: Routing, tasks: list[int] | None) -> Routing:
        return self.permutation(routing, tasks, self.sums_to_one)

    def active_fraction(self, selectors: Tensor | None) -> float:
        if selectors is None:
            return self.gate.active_fraction(None)
        back = self.permutation.assignment().argsort(-1)[:, None]  # [P, 1, E]
        if len(back) not in (1, selectors.shape[-3]):
            return 1.0  # the selectors of some tasks, which are not named
        return self.gate.active_fraction(selectors.gather(-1, back.expand(selectors.shape)))

    def task_parameters(self) -> dict[nn.Parameter, Sequence[int]]:
        logits = [self.permutation.logits] if self.permutation.per_task else []
        return super().task_parameters() | dict.fromkeys(logits, range(self.num_tasks))


def permuted(gate: Gate, permutation: Callable[..., Permutation] | None) -> Gate:
    """Return ``gate``, inside local search if ``permutation(num_experts=, num_tasks=)`` is given."""
    if permutation is None:
        return gate
    return PermutedGate(gate, permutation(num_experts=gate.num_experts, num_tasks=gate.num_tasks))


def sinkhorn(logits: Tensor, tau: float, rounds: int) -> Tensor:
    """Return S^R(U / tau): R times, normalize the rows, then the columns (COMET, equation 8; Mena et al. 2018).

    ``logits U [..., E, E]``, ``rounds`` R. In log space and float64, since U / tau reaches 1e6. After the last step the
    columns sum to 1; at a low tau the rows need not.
    """
    x = in_float64(logits) / tau
    for _ in range(rounds):
        x = x - x.logsumexp(-1, keepdim=True)
        x = x - x.logsumexp(-2, keepdim=True)
    return x.exp().to(logits)  # back to the dtype and device of logits


def permute(weights: Tensor, matrices: Tensor, normalize: bool) -> Tensor:
    """Return out_j = sum_i g_i P_ij, divided by its sum if ``normalize``.

    ``weights [..., T, E]``, ``matrices [T, E, E]``, or ``[1, E, E]`` for all tasks.
    """
    permuted = (weights[..., None, :] @ matrices.to(weights.dtype)).squeeze(-2)
    return permuted / permuted.sum(-1, keepdim=True) if normalize else permuted


def matrix_entropy(matrices: Tensor) -> Tensor:
    """Return the entropy of P plus the entropy of row-normalized P; mean over the ``matrices [P, E, E]``."""
    by_row = matrices / matrices.sum(-1, keepdim=True)
    return (entropy(matrices, (-2, -1)) + entropy(by_row, (-2, -1))).mean()
