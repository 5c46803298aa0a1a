"""Simulated labels of a known mixture: does a gate find its experts (DSelect-k, supplement C.2.2)?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from data_modules.base import TensorDataModule
from data_modules.options import fits_memory, number, whole
from data_modules.splits import check_rows, split_rows
from data_modules.synthetic_moe import UNITS, draw_experts, relu_sum
from mtl.types import Batch, DataSpec, Numeric, TaskSpec


class SyntheticRecoveryDataModule(TensorDataModule):
    """Serve a binary task over ``x [B, D]`` ~ N(0, I), D = ``input_dim``, with labels of ``num_true`` experts.

    P(y = 1 | x) = sigmoid(``signal`` * m(x)), where m is the standardised mean of the true experts' outputs.
    ``extras["expert_weight"] [E, 4, D]`` are the weights of all ``num_experts`` experts, ``extras["true_experts"]``
    ``[num_true]`` the random indices of the true ones. The other experts have the same distribution and do not affect
    the labels.
    """

    def __init__(
        self,
        num_experts: int = 16,
        num_true: int = 4,
        rows: Sequence[int] = (20_000, 5_000, 5_000),
        signal: float = 4.0,
        input_dim: int = 10,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.num_experts, self.rows = whole("num_experts", num_experts, 1), check_rows(rows)
        self.num_true = whole("num_true", num_true, 1, self.num_experts)
        self.signal, self.input_dim = number("signal", signal, 1e-6, 1e6), whole("input_dim", input_dim, 1)
        size = (sum(self.rows) * (1 + UNITS * self.num_true) + UNITS * self.num_experts) * self.input_dim
        fits_memory("data.rows, data.input_dim and data.num_experts", 4 * size)

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(sum(self.rows), self.input_dim, generator=generator)
        weight = draw_experts(self.num_experts, self.input_dim, generator)
        true = torch.randperm(self.num_experts, generator=generator)[: self.num_true].sort().values
        mixture = relu_sum(x, weight[true]).mean(1)
        logits = self.signal * (mixture - mixture.mean()) / mixture.std()
        label = torch.bernoulli(logits.sigmoid(), generator=generator)
        extras = {"expert_weight": weight, "true_experts": true}
        spec = DataSpec({"x": Numeric(self.input_dim)}, [TaskSpec("label", "binary")], extras)
        return spec, split_rows(Batch({"x": x}, {"label": label}), self.rows)
