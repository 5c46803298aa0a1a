"""Simulated regression tasks in related groups, each a mixture of four experts (DSelect-k, supplement C.1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtl.options import Count, Fraction, validated
from mtl.types import Batch, DataSpec, Numeric, TaskSpec

from .base import TensorDataModule
from .splits import Rows, split_rows

EXPERTS_PER_GROUP = 4
UNITS = 4  # ReLU units summed in an expert


class SyntheticMoEDataModule(TensorDataModule):
    """Serve groups of related tasks over one input ``x [B, D]`` ~ N(0, I), D = ``input_dim``.

    Each group has its own four experts; an expert f(x) is a sum of 4 ReLU units with N(0, 1) weights. The target of
    task t is sum_e softmax(w_t)_e f_e(x). The entries of w_t are N(0, 1), with ``correlation`` between the tasks of a
    group. ``rows`` are the sizes of train, val and test. ``ground_truth["task_group"] [T]`` is the group of each task.
    """

    @validated
    def __init__(
        self,
        num_groups: Count = 1,
        tasks_per_group: Count = 16,
        rows: Rows = (10_000, 2_000, 2_000),
        correlation: Fraction = 0.8,
        input_dim: Count = 10,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.num_groups, self.tasks_per_group, self.correlation = num_groups, tasks_per_group, correlation
        self.rows, self.input_dim = rows, input_dim

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        generator = self.generator()
        x = draw_normal(sum(self.rows), self.input_dim, generator=generator)
        targets = []
        for _ in range(self.num_groups):
            weight = draw_normal(EXPERTS_PER_GROUP, UNITS, self.input_dim, generator=generator)
            outputs = relu_units(x, weight).sum(-1)  # [N, 4]
            shared = draw_normal(1, EXPERTS_PER_GROUP, generator=generator)
            task_specific = draw_normal(self.tasks_per_group, EXPERTS_PER_GROUP, generator=generator)
            logits = self.correlation**0.5 * shared + (1 - self.correlation) ** 0.5 * task_specific
            targets.append(outputs @ logits.softmax(-1).T)
        y = torch.cat(targets, 1).float()  # [N, T]
        tasks = [TaskSpec(f"task_{index:03d}", "regression") for index in range(y.shape[1])]
        group = torch.arange(self.num_groups).repeat_interleave(self.tasks_per_group)
        spec = DataSpec({"x": Numeric(self.input_dim)}, tasks, {"task_group": group})
        columns = {task.name: y[:, index].contiguous() for index, task in enumerate(tasks)}
        return spec, split_rows(Batch({"x": x.float()}, columns), self.rows)


def draw_normal(*shape: int, generator: torch.Generator) -> Tensor:
    """Draw numbers ~ N(0, 1) of ``shape``, in single precision but returned as float64.

    The targets are computed from them in double precision and then rounded to single. Processors multiply matrices in
    different orders, and in single precision they would not agree on the last digits of a data set.
    """
    return torch.randn(*shape, generator=generator).double()


def relu_units(x: Tensor, weight: Tensor) -> Tensor:
    """Return relu(w_eu . x), ``[N, E, U]``, for ``x [N, D]`` and ``weight [E, U, D]``."""
    return torch.einsum("nd,eud->neu", x, weight).relu()
