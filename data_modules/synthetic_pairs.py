"""Simulated pairs of regression tasks of given relatedness (Ma et al. 2018, section 3.2; Maziarz et al. 2019)."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from mtl.checks import require
from mtl.options import Count, validated
from mtl.types import Batch, DataSpec, Numeric, TaskSpec

from .splits import SPLITS, Rows, split_rows
from .synthetic_moe import draw_normal
from .task_batches import TasksDataModule


class SyntheticPairsDataModule(TasksDataModule):
    """Serve pairs of related regression tasks; each task has its own inputs ``x [B, D]`` ~ N(0, I).

    y = w.x + sum_i sin(alpha_i w.x + beta_i) + e, i = 1..``num_sines``, e ~ N(0, ``noise``^2). The tasks ``task_p_0``
    and ``task_p_1`` of pair p have w = u and w = ``rho`` u + sqrt(1 - ``rho``^2) v. The vectors u and v of all pairs
    are orthonormal, so tasks of different pairs are unrelated. Ma et al. publish neither alpha nor beta; alpha_i = i
    and beta_i = (i - 1)^2, the same for all tasks, are from Maziarz et al. ``rows`` are the sizes of train, val and
    test of each task. ``ground_truth["task_group"] [T]`` is the pair of each task, ``ground_truth["task_weight"] [T,
    D]`` its w.
    """

    @validated
    def __init__(
        self,
        num_pairs: Count = 1,
        rho: Annotated[float, Field(ge=-1, le=1)] = 1.0,
        rows: Rows = (10_000, 2_000, 2_000),
        input_dim: Count = 128,
        num_sines: Annotated[int, Field(ge=0, le=100_000)] = 6,
        noise: Annotated[float, Field(ge=0, le=1e6)] = 0.01,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.num_pairs, self.rho, self.rows = num_pairs, rho, rows
        self.input_dim, self.num_sines, self.noise = input_dim, num_sines, noise
        need = f"data.input_dim={input_dim}: must be at least {2 * num_pairs}, two for each of {num_pairs} pairs"
        require(input_dim >= 2 * num_pairs, need)

    def load_tasks(self) -> tuple[DataSpec, dict[str, dict[str, Batch]]]:
        generator = self.generator()
        weight = draw_weights(self.num_pairs, self.input_dim, self.rho, generator)  # [T, D]
        names = [f"task_{pair}_{member}" for pair in range(self.num_pairs) for member in range(2)]
        tasks: dict[str, dict[str, Batch]] = {split: {} for split in SPLITS}
        for name, vector in zip(names, weight, strict=True):
            x = draw_normal(sum(self.rows), self.input_dim, generator=generator)
            y = compute_response(x @ vector, self.num_sines) + self.noise * draw_normal(len(x), generator=generator)
            rows = Batch({"x": x.float()}, {name: y.float()})
            for split, part in split_rows(rows, self.rows).items():
                tasks[split][name] = part
        group = torch.arange(self.num_pairs).repeat_interleave(2)
        specs = [TaskSpec(name, "regression") for name in names]
        ground_truth = {"task_group": group, "task_weight": weight.float()}
        return DataSpec({"x": Numeric(self.input_dim)}, specs, ground_truth), tasks


def draw_weights(pairs: int, input_dim: int, rho: float, generator: torch.Generator) -> Tensor:
    """Return unit vectors ``[2 * pairs, input_dim]``: dot product ``rho`` within a pair, 0 between pairs."""
    numbers = torch.randn(input_dim, 2 * pairs, generator=generator, dtype=torch.float64)
    first, second = torch.linalg.qr(numbers).Q.T.reshape(pairs, 2, input_dim).unbind(1)
    related = rho * first + (1 - rho**2) ** 0.5 * second
    return torch.stack([first, related], 1).flatten(0, 1)


def compute_response(projection: Tensor, num_sines: int) -> Tensor:
    """Return z + sum_i sin(i z + (i - 1)^2), i = 1..``num_sines``, for ``projection`` z ``[N]``."""
    i = torch.arange(1, num_sines + 1)
    return projection + torch.sin(projection[:, None] * i + (i - 1) ** 2).sum(1)
