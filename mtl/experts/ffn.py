"""Feed-forward layers of a Transformer as experts (Shazeer et al. 2017; MT-TaG: Gupta et al. 2022, equation 1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtl.experts.assignments import Assignments, mix_assigned
from mtl.experts.base import Experts
from mtl.experts.dense import StackedLinear
from mtl.nn.dropout import Masks
from mtl.nn.linear import grouped_linear
from mtl.options import Count, Dropout, validated


class StackedFFN(Experts):
    """E experts E_i(x) = W_out GELU(W_in x + b_in) + b_out with ``width`` hidden units (default: 4 ``input_dim``).

    With ``own_norm``, an expert ends with the residual connection and a LayerNorm of its own, LN_i(x + E_i(x)), and the
    normalized outputs are mixed (MoEBERT: Zuo et al. 2022); otherwise the layer adds x to the mixture and normalizes
    the sum. ``dropout`` acts on E_i(x). Parameters ``up.weight [E, W, D]``, ``up.bias [E, W]``, ``down.weight
    [E, D, W]``, ``down.bias [E, D]`` and, with ``own_norm``, ``norm_weight [E, D]`` and ``norm_bias [E, D]``.
    """

    @validated
    def __init__(
        self,
        num_experts: Count,
        input_dim: Count,
        width: Count | None = None,
        dropout: Dropout = 0.0,
        own_norm: bool = False,
        norm_eps: float = 1e-12,
    ) -> None:
        super().__init__(num_experts, input_dim, dropout)
        self.input_dim, self.width, self.own_norm, self.norm_eps = input_dim, width or 4 * input_dim, own_norm, norm_eps
        self.up = StackedLinear(num_experts, input_dim, self.width)
        self.down = StackedLinear(num_experts, self.width, input_dim)
        if own_norm:
            self.norm_weight = nn.Parameter(torch.ones(num_experts, input_dim))
            self.norm_bias = nn.Parameter(torch.zeros(num_experts, input_dim))

    def outputs(self, x: Tensor, subset: Sequence[int] | None = None, masks: Masks | None = None) -> Tensor:
        """Map ``x [B, D]`` to ``[B, E, D]``."""
        out = self.down(F.gelu(self.up(x, subset)), subset)  # [B, E, D]
        out = out if masks is None else masks(out, 0, subset)
        if not self.own_norm:
            return out
        index = slice(None) if subset is None else list(subset)
        return self._normalized(x[:, None] + out, self.norm_weight[index], self.norm_bias[index])

    def sparse_mixture(self, x: Tensor, weights: Tensor, pairs: Assignments, masks: Masks | None = None) -> Tensor:
        """See ``Experts``."""
        rows = x.index_select(0, pairs.sample)  # [P, D]
        hidden = F.gelu(grouped_linear(rows, self.up.weight, self.up.bias, pairs.expert, pairs.counts))  # [P, W]
        out = grouped_linear(hidden, self.down.weight, self.down.bias, pairs.expert, pairs.counts)  # [P, D]
        out = out if masks is None else masks.of_pairs(out, 0, pairs.sample, pairs.expert)
        if self.own_norm:
            out = self._normalized(rows + out, self.norm_weight[pairs.expert], self.norm_bias[pairs.expert])
        return mix_assigned(out, weights, pairs)

    def _normalized(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (self.input_dim,), eps=self.norm_eps) * weight + bias
