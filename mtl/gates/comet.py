"""COMET gate (Ibrahim et al. 2023): k soft decision trees whose leaves are the experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mtl.functional import smooth_step
from mtl.gates.base import WEIGHT_RANGE, Gate, check_count, check_number, entropy_loss
from mtl.types import Routing

_LOG_EPS = 1e-8  # inside log(v), as in the reference implementation


class CometGate(Gate):
    """weights_i = sum_j exp(a_ij) v_ij / sum_ij exp(a_ij) v_ij over K trees (equations 3 to 5 of the paper).

    A sample goes left at a split with probability h = S(w.x + b), S the smooth step of width ``gamma``; v_j(i) is
    the product along the path to leaf i. Splits have heap ids: children 2q+1 (left) and 2q+2; ids from E-1 on are
    leaves; expert i is the i-th leaf, left first. Parameters ``split_weight [T, E-1, K, D]``, ``split_bias
    [T, E-1, K]`` by heap id; ``leaf_weight [T, E, K, D]``, ``leaf_bias [T, E, K]`` in expert order; a static gate
    has the biases alone. ``entropy_weight`` times the entropy of v drives each tree to one leaf.
    """

    entropy_weight: Tensor
    leaf_order: Tensor

    def __init__(
        self,
        num_tasks: int,
        num_experts: int,
        input_dim: int | None = None,
        k: int = 2,
        gamma: float = 1.0,
        entropy_weight: float = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(num_tasks, num_experts, input_dim, **common)
        check_count("k", k)  # selectors may agree, so k may exceed E
        check_number("gamma", gamma, above=True)
        check_number("entropy_weight", entropy_weight)
        self.k, self.gamma = k, gamma
        self.add_schedulable("entropy_weight", entropy_weight)
        self.add_affine("split_", (self.num_gates, num_experts - 1, k), gamma / 100)
        self.add_affine("leaf_", (self.num_gates, num_experts, k), WEIGHT_RANGE)
        # A heap's leaves stand on at most two levels. By id, those of the upper level come first; from left to
        # right, those of the lower level do: rotating by the number of upper leaves gives the experts' order.
        depth = (num_experts - 1).bit_length()
        upper = 2**depth - num_experts
        self.register_buffer("leaf_order", torch.arange(num_experts).roll(-upper), persistent=False)

    def route(self, x: Tensor | None, inputs: Mapping[str, Tensor] | None, tasks: list[int] | None) -> Routing:
        split = self.affine(x, "split_", tasks)  # [B, T, E-1, K]
        v = self._leaf_probabilities(smooth_step(split, self.gamma), smooth_step(-split, self.gamma))  # [B, T, E, K]
        scores = self.affine(x, "leaf_", tasks)  # [B, T, E, K]
        scores = torch.where(v > 0, scores + torch.log(v + _LOG_EPS), -torch.inf)
        weights = scores.flatten(-2).softmax(-1).view_as(v).sum(-1)  # one softmax over all leaves of all trees
        selectors = v.transpose(-1, -2)  # [B, T, K, E]
        return Routing(weights, {"entropy": entropy_loss(selectors, self.entropy_weight)}, selectors)

    def _leaf_probabilities(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the probability of each leaf, ``[B, T, E, K]``, one step per level of the tree.

        ``left``, ``right`` ``[B, T, E-1, K]``: the probability of going there at each split.
        """
        level = left.new_ones(*left.shape[:-2], 1, left.shape[-1])  # the root
        leaves, first = [], 0  # first: heap id of the level's first node
        while first < self.num_experts - 1:
            last = min(first + level.shape[-2], self.num_experts - 1)
            inner, outer = level[..., : last - first, :], level[..., last - first :, :]
            leaves.append(outer)
            children = (inner * left[..., first:last, :], inner * right[..., first:last, :])
            first += level.shape[-2]
            level = torch.stack(children, -2).flatten(-3, -2)
        leaves.append(level)
        return torch.cat(leaves, -2).index_select(-2, self.leaf_order)
