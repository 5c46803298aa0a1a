"""COMET gate (Ibrahim et al. 2023): k soft decision trees whose leaves are the experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mtl.gates.base import WEIGHT_RANGE, Gate, entropy_loss
from mtl.nn.functional import LOG_EPS, smooth_step
from mtl.options import Count, NonNegative, Positive, validated
from mtl.types import Routing


class CometGate(Gate):
    """weights_i = sum_j exp(a_ij) v_ij / sum_ij exp(a_ij) v_ij over K trees (equation 3 of the paper).

    A sample goes left at a split with probability h = S(w.x + b), with S the smooth step of width ``gamma``; v_ij is
    the product of the probabilities along the path to leaf i of tree j (equation 2). Splits have heap ids: the children
    of q are 2q+1 (left) and 2q+2 (right), and nodes with ids from E-1 on are leaves; expert i is the i-th leaf from the
    left. Parameters ``split_weight [T, E-1, K, D]``, ``split_bias [T, E-1, K]`` by heap id; ``leaf_weight [T, E, K,
    D]``, ``leaf_bias [T, E, K]`` in expert order; a static gate has only the biases. ``entropy_weight`` times the
    entropy of v drives each tree to one leaf.
    """

    entropy_weight: Tensor

    @validated
    def __init__(
        self,
        num_tasks: int,
        num_experts: int,
        input_dim: int | None = None,
        k: Count = 2,
        gamma: Positive = 1.0,
        entropy_weight: NonNegative = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(num_tasks, num_experts, input_dim, **common)
        self.k, self.gamma = k, gamma
        self.add_scheduled_buffer("entropy_weight", entropy_weight)
        self.add_linear("split_", (self.num_gates, num_experts - 1, k), gamma / 100)
        self.add_linear("leaf_", (self.num_gates, num_experts, k), WEIGHT_RANGE)

    def route(self, x: Tensor | None, inputs: Mapping[str, Tensor] | None, tasks: list[int] | None) -> Routing:
        split = self.affine(x, "split_", tasks)  # [B, T, E-1, K]
        leaf = self.affine(x, "leaf_", tasks)  # [B, T, E, K]
        weights, v = comet_weights(split, leaf, self.gamma)
        selectors = v.transpose(-1, -2)  # [B, T, K, E]
        losses = {"entropy": entropy_loss(selectors, self.entropy_weight)}
        return Routing(weights, losses, selectors, exact_zeros=True)  # S is flat where it is 0

    def active_fraction(self, selectors: Tensor | None) -> float:
        """Return the share of the splits and leaves on paths of nonzero probability (table 5: k log n of k n)."""
        if selectors is None or not selectors.numel():
            return 1.0
        lower = self.num_experts - upper_leaves(self.num_experts)
        leaves = torch.cat([selectors[..., lower:], selectors[..., :lower]], -1) > 0  # in heap order
        reached = dict(enumerate(leaves.unbind(-1), self.num_experts - 1))
        for split in reversed(range(self.num_experts - 1)):
            reached[split] = reached[2 * split + 1] | reached[2 * split + 2]
        return float(torch.stack(list(reached.values())).float().mean())


def comet_weights(split: Tensor, leaf: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Return the weights g ``[..., E]`` and each tree's probabilities v of its leaves, ``[..., E, K]``.

    ``split [..., E-1, K]``: the logits w.x + b of the splits, by heap id; ``leaf [..., E, K]``: the logits a of the
    leaves, by expert.
    """
    num_experts = leaf.shape[-2]
    left, right = smooth_step(split, gamma), smooth_step(-split, gamma)  # h (go left) and 1 - h (go right)
    levels = [split.new_ones(*split.shape[:-2], 1, split.shape[-1])]  # probability to reach each node; first: the root
    first = 0  # heap id of the first node of the level
    while first < num_experts - 1:
        last = min(2 * first + 1, num_experts - 1)  # nodes with ids from E-1 on are leaves
        reached = levels[-1][..., : last - first, :]
        children = reached * left[..., first:last, :], reached * right[..., first:last, :]
        levels.append(torch.stack(children, -2).flatten(-3, -2))  # in heap order: left, right, left, right, ...
        first = 2 * first + 1
    # The leaves lie on at most two levels. In heap order the leaves of the upper level come first; from left to right,
    # those of the lower level do, so the experts' order is the lower level, then the upper.
    upper = upper_leaves(num_experts)
    leaves = torch.cat(levels, -2)[..., num_experts - 1 :, :]
    v = torch.cat([leaves[..., upper:, :], leaves[..., :upper, :]], -2)  # v_ij (equation 2)
    logits = torch.where(v == 0, -torch.inf, leaf + torch.log(v + LOG_EPS))  # NaN stays NaN
    g = logits.flatten(-2).softmax(-1).view_as(v)  # one softmax over all leaves of all trees (equation 3)
    return g.sum(-1), v


def upper_leaves(num_experts: int) -> int:
    """Return how many leaves of a tree are on the upper one of its two lowest levels."""
    return int(2 ** (num_experts - 1).bit_length()) - num_experts
