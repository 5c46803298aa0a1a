"""Top-k gate (Shazeer et al. 2017): keep the k largest logits. With DeepSeek-V3's scores and balance, if asked."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mtl.checks import require
from mtl.gates.adaptive import AdaptiveGate
from mtl.gates.balance import balance_loss, importance_loss, load_loss, z_loss
from mtl.gates.base import WEIGHT_RANGE, check_k
from mtl.options import Count, NonNegative, Positive, validated
from mtl.types import Routing

log = logging.getLogger(__name__)


class TopKGate(AdaptiveGate):
    """Keep the ``k`` largest of the logits W x + b and drop the other experts.

    ``normalize="after"``: softmax over the kept logits; ``"before"``: softmax over all, then keep, so that the weights
    sum to less than 1 but have a gradient even at k = 1. ``noisy`` adds N(0, 1) softplus(W_n x + b_n) in training.
    Parameters ``weight [T, E, D]``, ``bias [T, E]``, and ``noise_weight``, ``noise_bias`` of the same shapes.

    ``scores="sigmoid"``: the scores are s = sigmoid(logits) in place of their softmax. The weights are the kept scores,
    divided by their sum if ``normalize="after"`` (DeepSeek-V3: DeepSeek-AI 2024, equations 13 to 15).

    ``bias_rate`` u > 0 balances the load without a loss (Wang et al. 2024, algorithm 1): the k experts with the largest
    scores plus ``expert_bias [T, E]`` are kept, and their weights are computed without it. After each step,
    choice_bias_i += u sign(mean load - load_i), where the load is the number of rows that keep expert i for the task.

    W and b start U(-``initial_range``, ``initial_range``). With None they start as in COMET's repository, by the
    defaults of Keras: W Glorot uniform, U(+-sqrt(6 / (D + E))), and b = 0; the logits b of a static gate, to Keras a
    weight of shape [E], U(+-sqrt(3 / E)).
    """

    @validated
    def __init__(
        self,
        num_tasks: int,
        num_experts: int,
        input_dim: int | None = None,
        k: Count = 2,
        noisy: bool = False,
        normalize: Literal["before", "after"] = "after",
        scores: Literal["softmax", "sigmoid"] = "softmax",
        bias_rate: NonNegative = 0.0,
        importance_weight: NonNegative = 0.0,
        load_weight: NonNegative = 0.0,
        balance_weight: NonNegative = 0.0,
        z_weight: NonNegative = 0.0,
        initial_range: Positive | None = WEIGHT_RANGE,
        **common: Any,
    ) -> None:
        super().__init__(num_tasks, num_experts, input_dim, **common)
        check_k(k, num_experts)
        self.loss_weights = {
            "importance": importance_weight,
            "load": load_weight,
            "balance": balance_weight,
            "z": z_weight,
        }
        message = f"load_weight={load_weight}: the load loss needs noise; set noisy=true, or load_weight=0"
        require(load_weight == 0 or noisy, message)
        if k == 1 and normalize == "after" and num_experts > 1:
            log.warning("top-k with k=1 and normalize=after gives the gate no gradient; normalize=before does")
        message = f"bias_rate={bias_rate}: needs a gate that depends on the example, and load_weight=0"
        require(bias_rate == 0 or (load_weight == 0 and input_dim is not None), message)
        self.k, self.noisy, self.normalize, self.scores, self.bias_rate = k, noisy, normalize, scores, bias_rate
        self.expert_bias: Tensor | None
        self.register_buffer("expert_bias", torch.zeros(self.num_gates, num_experts) if bias_rate else None)
        self.sums_to_one = normalize == "after"
        shape = (self.num_gates, num_experts)
        if initial_range is not None:
            self.add_linear("", shape, initial_range)
        elif self.width is None:
            self.add_linear("", shape, (3 / num_experts) ** 0.5)
        else:
            self.add_linear("", shape, (6 / (self.width + num_experts)) ** 0.5, bias_bound=0.0)
        if noisy:
            self.add_linear("noise_", shape, WEIGHT_RANGE)

    def route(self, x: Tensor | None, inputs: Mapping[str, Tensor] | None, tasks: list[int] | None) -> Routing:
        clean = logits = self.affine(x, "", tasks)  # [B, T, E] or [T, E]
        stddev = clean.new_ones(()).expand_as(clean)
        if self.noisy and self.training:
            stddev = F.softplus(self.affine(x, "noise_", tasks))
            logits = clean + torch.randn_like(clean) * stddev
        logs = F.logsigmoid(logits) if self.scores == "sigmoid" else logits  # log s, up to a constant
        scores = logs.exp() if self.scores == "sigmoid" else logs.softmax(-1)
        choice = None
        if self.expert_bias is not None:
            choice = scores.detach() + (self.expert_bias if tasks is None else self.expert_bias[tasks])
        weights, index = top_k_weights(logs, scores, self.k, self.normalize, choice)
        routing = Routing(weights, self._losses(clean, logits, stddev, weights, index), exact_zeros=True)
        if self.expert_bias is None:
            return routing
        load = torch.zeros_like(scores).scatter_(-1, index, 1.0).sum(0)  # [T, E]
        return replace(routing, measured=self.measure(load, tasks))

    def state(self) -> Tensor | None:
        return self.expert_bias

    def adapt(self, measured: Tensor) -> None:
        assert self.expert_bias is not None
        mean = measured.sum(-1, keepdim=True)  # E times the mean: whole numbers have no rounding
        self.expert_bias.add_(self.bias_rate * (mean - measured * self.num_experts).sign())

    def _losses(
        self, clean: Tensor, logits: Tensor, stddev: Tensor, weights: Tensor, index: Tensor
    ) -> dict[str, Tensor]:
        shape = (-1, *clean.shape[-2:])  # a static gate is a batch of one
        clean, logits, stddev = clean.view(shape), logits.view(shape), stddev.view(shape)
        weights, index = weights.view(shape), index.view(-1, *index.shape[-2:])
        has_load = self.training and self.k < self.num_experts
        terms = {
            "importance": lambda: importance_loss(weights),
            # 0 in evaluation, which has no noise, and if k = E, where every expert gets every sample
            "load": lambda: load_loss(clean, logits, stddev, self.k) if has_load else clean.new_zeros(()),
            "balance": lambda: balance_loss(logits.softmax(-1), torch.zeros_like(logits).scatter(-1, index, 1.0)),
            "z": lambda: z_loss(logits),
        }
        return {name: weight * terms[name]() for name, weight in self.loss_weights.items() if weight > 0}


def top_k_weights(
    logs: Tensor, scores: Tensor, k: int, normalize: Literal["before", "after"], choice: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weights ``[..., E]`` of the k experts with the largest ``choice``, and their numbers ``[..., k]``.

    ``logs [..., E]``: the logarithms of the ``scores [..., E]``, up to a constant for each row. The weights are the
    kept scores, divided by their sum if ``normalize="after"``. ``choice``: by default the scores.
    """
    index = (logs if choice is None else choice).topk(k, dim=-1).indices  # exactly k, even if some tie
    top = logs.gather(-1, index).softmax(-1) if normalize == "after" else scores.gather(-1, index)
    return torch.zeros_like(logs).scatter_(-1, index, top), index
