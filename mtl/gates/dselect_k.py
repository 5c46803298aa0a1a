"""DSelect-k gate (Hazimeh et al. 2021): k selectors, each a binary code of an expert's index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mtl.distributed import batch_mean
from mtl.gates.base import WEIGHT_RANGE, Gate, entropy_loss
from mtl.nn.functional import smooth_step
from mtl.options import Count, NonNegative, Positive, validated
from mtl.types import Routing

REACH_EPS = 1e-6  # as in the reference implementation


class DSelectKGate(Gate):
    """weights_i = sum_j softmax(w)_j s_ji, with s_ji = prod over the bits of i of S(z_j) or 1 - S(z_j).

    s_j is the paper's single expert selector r(S(z_j)), the weights are its gate q(alpha, Z) with alpha = w (section 3;
    supplement B.2 if E is not a power of two). Bit 0 is the most significant; ``gamma`` is the width
    of the smooth step S. Parameters, with m = ceil(log2 E) bits: ``selector_weight [T, K, m, D]``, ``selector_bias
    [T, K, m]``, ``mix_weight [T, K, D]``, ``mix_bias [T, K]``; a static gate has only the biases.

    ``entropy_weight`` times the selectors' entropy drives them to binary values. If E is not a power of two,
    codes >= E select no expert, and ``reachability_weight`` times 1 / (sum of a selector) penalises their use.
    """

    sums_to_one = False  # if E is not a power of two; the reference never normalizes
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
        reachability_weight: NonNegative = 1.0,
        **common: Any,
    ) -> None:
        super().__init__(num_tasks, num_experts, input_dim, **common)
        self.k, self.gamma, self.reachability_weight = k, gamma, reachability_weight
        self.num_bits = (num_experts - 1).bit_length()
        self.add_scheduled_buffer("entropy_weight", entropy_weight)
        self.add_linear("selector_", (self.num_gates, k, self.num_bits), gamma / 100)
        self.add_linear("mix_", (self.num_gates, k), WEIGHT_RANGE)

    def route(self, x: Tensor | None, inputs: Mapping[str, Tensor] | None, tasks: list[int] | None) -> Routing:
        bits = self.affine(x, "selector_", tasks)  # [B, T, K, m]
        mix = self.affine(x, "mix_", tasks)  # [B, T, K]
        weights, selectors = dselect_weights(bits, mix, self.gamma, self.num_experts)
        losses = {"entropy": entropy_loss(selectors, self.entropy_weight)}
        if 2**self.num_bits > self.num_experts:  # sum over selectors of 1 / (probability of a code < E)
            unreached = (1 / (REACH_EPS + selectors.sum(-1))).sum((-2, -1))  # [B] or []
            losses["reachability"] = self.reachability_weight * batch_mean(unreached)
        return Routing(weights, losses, selectors, exact_zeros=True)  # S is flat where it is 0


def dselect_weights(bits: Tensor, mix: Tensor, gamma: float, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the weights ``[..., E]`` and the selectors s ``[..., K, E]``.

    ``bits [..., K, m]``: the logits z of the binary codes, the first bit the most significant; ``mix [..., K]``: the
    logits w of the selectors' shares.
    """
    p_one, p_zero = smooth_step(bits, gamma), smooth_step(-bits, gamma)  # S(z) and 1 - S(z)
    s = bits.new_ones(*bits.shape[:-1], 1)  # the empty code
    for j in range(bits.shape[-1]):  # each bit doubles the number of codes: ...0, ...1
        codes = s * p_zero[..., j, None], s * p_one[..., j, None]
        s = torch.stack(codes, -1).flatten(-2)  # [..., K, 2^(j+1)]
    s = s[..., :num_experts]  # codes >= E select no expert
    return (mix.softmax(-1)[..., None] * s).sum(-2), s  # sum_j softmax(w)_j s_j
