"""Simulated labels of a known mixture: does a gate find its experts (DSelect-k, supplement C.2.2)?"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from mtl.checks import require
from mtl.options import Count, validated
from mtl.types import Batch, DataSpec, Numeric, TaskSpec

from .base import TensorDataModule
from .splits import Rows, split_rows
from .synthetic_moe import UNITS, draw_normal, relu_units


class SyntheticRecoveryDataModule(TensorDataModule):
    """Serve a binary task over ``x [B, D]`` ~ N(0, I), D = ``input_dim``, with labels of ``num_true`` experts.

    An expert has 4 ReLU units with N(0, 1) weights. ``design`` says how the labels come from the true experts:

    * ``sampled``: P(y = 1 | x) = sigmoid(``signal`` * m(x)), where m is the standardized mean of the true experts'
      outputs, which are the sums of their units.
    * ``published``: an expert's output is its 4 units; a logistic unit with N(0, 1) weights and a bias sees their mean
      over the true experts, and its sign is the label. The bias makes half of the labels positive: without one, units
      whose weights have the same sign, one in eight, would have labels of one class.

    ``ground_truth["expert_weight"] [E, 4, D]`` are the weights of all ``num_experts`` experts,
    ``ground_truth["true_experts"]`` ``[num_true]`` the random indices of the true ones; if published, ``unit_weight
    [4]`` and ``unit_bias []`` those of the logistic unit. The other experts have the same distribution and do not
    affect the labels.
    """

    @validated
    def __init__(
        self,
        num_experts: Count = 16,
        num_true: Count = 4,
        rows: Rows = (20_000, 5_000, 5_000),
        signal: Annotated[float, Field(ge=1e-6, le=1e6)] = 4.0,
        design: Literal["sampled", "published"] = "sampled",
        input_dim: Count = 10,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        require(num_true <= num_experts, f"data.num_true={num_true}: must be at most data.num_experts={num_experts}")
        self.num_experts, self.num_true, self.rows = num_experts, num_true, rows
        self.signal, self.input_dim, self.design = signal, input_dim, design

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        generator = self.generator()
        x = draw_normal(sum(self.rows), self.input_dim, generator=generator)
        weight = draw_normal(self.num_experts, UNITS, self.input_dim, generator=generator)
        true = torch.randperm(self.num_experts, generator=generator)[: self.num_true].sort().values
        ground_truth = {"expert_weight": weight.float(), "true_experts": true}
        if self.design == "published":
            unit = draw_normal(UNITS, generator=generator)
            score = relu_units(x, weight[true]).mean(1) @ unit
            bias = -score.median()
            label = (score + bias > 0).float()
            ground_truth |= {"unit_weight": unit.float(), "unit_bias": bias.float()}
        else:
            mixture = relu_units(x, weight[true]).sum(-1).mean(1)
            logits = self.signal * (mixture - mixture.mean()) / mixture.std()
            label = torch.bernoulli(logits.sigmoid().float(), generator=generator)
        spec = DataSpec({"x": Numeric(self.input_dim)}, [TaskSpec("label", "binary")], ground_truth)
        return spec, split_rows(Batch({"x": x.float()}, {"label": label}), self.rows)
