"""Task-aware top-1 gate (MT-TaG: Gupta et al. 2022): each task sends a sample to one expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mtl.checks import require
from mtl.gates.balance import balance_loss
from mtl.gates.base import WEIGHT_RANGE, Gate
from mtl.options import NonNegative, Positive, validated
from mtl.types import Routing


class TaskTop1Gate(Gate):
    """Send a sample to the most probable expert of softmax(W_t x + b_t), weighted by that probability.

    The probability is not renormalized, since the gate gets its gradient through it. With ``keep_scale`` the weight is
    1, with the gradient of the probability: a mixture whose experts start as copies of a dense layer then starts equal
    to it, not at about 1/E of its output. ``shared=True`` is the Switch gate without task awareness (MT-Switch).
    ``balance_weight`` adds the Switch Transformer's balance loss. ``initial_std``: weights start N(0, initial_std^2),
    0.001 in the paper (None: uniform, as in the other gates). Parameters ``weight [T, E, D]`` and, unless ``bias`` is
    false as in the paper, ``bias [T, E]``; a static gate has only the bias.
    """

    @validated
    def __init__(
        self,
        num_tasks: int,
        num_experts: int,
        input_dim: int | None = None,
        balance_weight: NonNegative = 0.0,
        bias: bool = True,
        initial_std: Positive | None = None,
        keep_scale: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(num_tasks, num_experts, input_dim, **common)
        require(bias or input_dim is not None, "bias=false: a static gate has nothing but its bias")
        self.balance_weight, self.keep_scale, self.sums_to_one = balance_weight, keep_scale, keep_scale
        self.add_linear("", (self.num_gates, num_experts), WEIGHT_RANGE)
        if initial_std is not None and input_dim is not None:
            nn.init.normal_(self.get_parameter("weight"), std=initial_std)
            nn.init.zeros_(self.get_parameter("bias"))
        if not bias:
            del self.bias
            self.register_buffer("bias", torch.zeros(self.num_gates, num_experts), persistent=False)

    def route(self, x: Tensor | None, inputs: Mapping[str, Tensor] | None, tasks: list[int] | None) -> Routing:
        probabilities = self.affine(x, "", tasks).softmax(-1)  # [B, T, E]
        best = probabilities.argmax(-1, keepdim=True)
        selected = torch.zeros_like(probabilities, dtype=torch.bool).scatter_(-1, best, True)
        losses = {}
        if self.balance_weight > 0:
            shape = (-1, *selected.shape[-2:])
            losses["balance"] = self.balance_weight * balance_loss(probabilities.view(shape), selected.view(shape))
        if self.keep_scale:
            probabilities = 1.0 + (probabilities - probabilities.detach())
        return Routing(probabilities.masked_fill(~selected, 0.0), losses, exact_zeros=True)
