"""DSelect-k gate (Hazimeh et al. 2021): k selectors, each a binary code of an expert's index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mtl.functional import samples_first
from mtl.gates.base import WEIGHT_RANGE, Gate, check_count, check_number
from mtl.gates.kernels import dselect_route
from mtl.types import Routing

_REACH_EPS = 1e-6


class DSelectKGate(Gate):
    """weights_i = sum_j softmax(w)_j s_j(i), with s_j(i) = prod over the bits of i of S(z_j) or 1 - S(z_j).

    Equations 5 to 8 of the paper, with bit 0 the most significant. ``gamma`` is the width of the smooth step S.
    Parameters, with m = ceil(log2 E) bits: ``selector_weight [T, K, m, D]``, ``selector_bias [T, K, m]``,
    ``mix_weight [T, K, D]``, ``mix_bias [T, K]``; a static gate has the biases alone.

    ``entropy_weight`` times the selectors' entropy drives them to binary values. When E is no power of two, codes
    from E on select nothing, and ``reachability_weight`` times 1 / (sum of a selector) drives them out of use.
    """

    sums_to_one = False  # where E is no power of two; the reference never normalises
    entropy_weight: Tensor

    def __init__(
        self,
        num_tasks: int,
        num_experts: int,
        input_dim: int | None = None,
        k: int = 2,
        gamma: float = 1.0,
        entropy_weight: float = 0.0,
        reachability_weight: float = 1.0,
        **common: Any,
    ) -> None:
        super().__init__(num_tasks, num_experts, input_dim, **common)
        check_count("k", k)  # selectors may agree, so k may exceed E
        check_number("gamma", gamma, above=True)
        check_number("entropy_weight", entropy_weight)
        check_number("reachability_weight", reachability_weight)
        self.k, self.gamma, self.reachability_weight = k, gamma, reachability_weight
        self.num_bits = (num_experts - 1).bit_length()
        self.add_schedulable("entropy_weight", entropy_weight)
        self.add_affine("selector_", (self.num_gates, k, self.num_bits), gamma / 100)
        self.add_affine("mix_", (self.num_gates, k), WEIGHT_RANGE)

    def route(self, x: Tensor | None, inputs: Mapping[str, Tensor] | None, tasks: list[int] | None) -> Routing:
        bits, mix = self.affines(x, ["selector_", "mix_"], tasks)
        weights, selectors, entropies = dselect_route(bits, mix.softmax(1), self.gamma, self.num_experts)
        losses = {"entropy": self.entropy_weight.to(entropies.dtype) * self.sample_mean(entropies)}
        if 2**self.num_bits > self.num_experts:
            unreached = 1 / (_REACH_EPS + selectors.sum(2))  # [T, K, B]
            losses["reachability"] = self.reachability_weight * self.sample_mean(unreached.sum(1))
        if self.input_dim is None:
            return Routing(weights[..., 0], losses, selectors[..., 0])
        return Routing(samples_first(weights), losses, selectors.permute(3, 0, 1, 2))
