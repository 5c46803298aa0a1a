"""Cosine router (X-MoE: Chi et al. 2022): logits that do not depend on the lengths of vectors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtl.checks import require
from mtl.gates.balance import balance_loss
from mtl.gates.base import WEIGHT_RANGE, Gate, check_k
from mtl.gates.topk import top_k_weights
from mtl.nn.functional import at_least_float32
from mtl.nn.linear import affine
from mtl.options import Count, NonNegative, Positive, validated
from mtl.types import Routing

EPS = 1e-4  # shorter vectors are not scaled to length 1, so that the gradient stays finite at 0
MAX_SCALE = 100.0  # of the logits: 1 / temperature


class CosineGate(Gate):
    """Keep the ``k`` largest of the logits cos(W x, e_i) / tau (section 3.2 of the paper).

    x is projected to ``dim`` numbers (default E / 2 as in the paper, at least 2) and compared with the embedding e_i of
    each expert. The temperature tau starts at ``temperature``, is learnt, one for each task, and stays above 0.01.
    ``normalize="before"``, as in the paper: softmax over all logits, then keep; ``"after"``: softmax over the kept.
    ``balance_weight`` adds the Switch Transformer's balance loss. Parameters ``project_weight [T, dim, D]``,
    ``embedding [T, E, dim]``, and ``log_scale [T]``, which is -log tau. There is no static version.
    """

    @validated
    def __init__(
        self,
        num_tasks: int,
        num_experts: int,
        input_dim: int | None = None,
        k: Count = 2,
        dim: Count | None = None,
        temperature: Positive = 0.3,
        normalize: Literal["before", "after"] = "before",
        balance_weight: NonNegative = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(num_tasks, num_experts, input_dim, **common)
        check_k(k, num_experts)
        require(input_dim is not None, "the cosine gate compares examples with experts, so it cannot be static")
        assert self.width is not None
        self.k, self.dim = k, dim or max(2, num_experts // 2)
        self.normalize, self.balance_weight = normalize, balance_weight
        self.sums_to_one = normalize == "after"
        shapes = {"project_weight": (self.dim, self.width), "embedding": (num_experts, self.dim)}
        for name, shape in shapes.items():
            values = torch.empty(self.num_gates, *shape).uniform_(-WEIGHT_RANGE, WEIGHT_RANGE)
            self.register_parameter(name, nn.Parameter(values))
        self.log_scale = nn.Parameter(torch.full((self.num_gates,), -math.log(temperature)))

    def route(self, x: Tensor | None, inputs: Mapping[str, Tensor] | None, tasks: list[int] | None) -> Routing:
        assert x is not None
        logits = self._logits(x, slice(None) if tasks is None else tasks)
        weights, index = top_k_weights(logits, logits.softmax(-1), self.k, self.normalize)
        losses = {}
        if self.balance_weight > 0:
            selected = torch.zeros_like(logits).scatter(-1, index, 1.0)
            losses["balance"] = self.balance_weight * balance_loss(logits.softmax(-1), selected)
        return Routing(weights, losses, exact_zeros=True)

    def _logits(self, x: Tensor, tasks: list[int] | slice) -> Tensor:
        """Return cos(W x, e_i) / tau, ``[B, T, E]``, in float32 at least."""
        weight, embedding, log_scale = (
            at_least_float32(self.get_parameter(name))[tasks] for name in ("project_weight", "embedding", "log_scale")
        )
        projected = F.normalize(affine(x, weight, weight.new_zeros(weight.shape[:-1])), dim=-1, eps=EPS)  # [B, T, dim]
        cosine = torch.einsum("btd,ted->bte", projected, F.normalize(embedding, dim=-1, eps=EPS))
        return cosine * log_scale.clamp(max=math.log(MAX_SCALE)).exp()[:, None]
