"""Customized gate control (CGC): a layer of shared experts and experts of each task (Tang et al. 2020, section 4.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from mtl.experts.assignments import Assignments
from mtl.experts.base import Experts
from mtl.gates.base import Gate, GateWrapper
from mtl.nn.dropout import Masks
from mtl.types import Routing


class TaskExperts(Experts):
    """Experts of several owners as one stack; each part of it reads its own input.

    ``parts``: the experts of each owner, in the order of the stack. Of ``x [B, O, D]`` part p reads ``x[:, rows[p]]``.
    ``x [B, D]``, or images, is the input of all parts.
    """

    def __init__(self, parts: Sequence[Experts], rows: Sequence[int]) -> None:
        self.counts = [part.num_experts for part in parts]
        super().__init__(sum(self.counts), parts[0].output_dim, parts[0].dropout)
        self.parts, self.rows = nn.ModuleList(parts), list(rows)
        self.first = [0, *accumulate(self.counts)][:-1]  # the number of the first expert of each part

    def outputs(self, x: Tensor, subset: Sequence[int] | None = None, masks: Masks | None = None) -> Tensor:
        """Map ``x [B, O, D]``, or ``x [B, ...]`` of all parts, to ``[B, E, H]``."""
        ordered = sorted(subset or [])
        local = [None] * len(self.rows) if subset is None else self._local(ordered)
        parts = zip(self._with_inputs(x, masks), local, strict=True)
        outputs = torch.cat([part._outputs(x_part, numbers, drop) for (part, x_part, drop), numbers in parts], 1)
        if subset is None or ordered == list(subset):
            return outputs
        return outputs[:, [ordered.index(expert) for expert in subset]]

    def sparse_mixture(self, x: Tensor, weights: Tensor, pairs: Assignments, masks: Masks | None = None) -> Tensor:
        """See ``Experts``. The mixture is the sum of the mixtures of the parts."""
        columns = zip(torch.split(weights, self.counts, -1), torch.split(pairs.nonzero, self.counts, -1), strict=True)
        parts = zip(self._with_inputs(x, masks), columns, strict=True)
        return sum(part.sparse_mixture(x_part, w, Assignments(used), drop) for (part, x_part, drop), (w, used) in parts)

    @torch.no_grad()
    def subset(self, used: Sequence[int]) -> TaskExperts:
        """See ``Experts``; parts that have none of the experts ``used`` are left out."""
        local: Any = zip(self.parts, self._local(used), self.rows, strict=True)
        parts = [(part.subset(numbers), row) for part, numbers, row in local if numbers]
        return TaskExperts([part for part, _ in parts], [row for _, row in parts])

    def _with_inputs(self, x: Tensor, masks: Masks | None) -> Iterator[tuple[Any, Tensor, Masks | None]]:
        """Yield each part with its input and its dropout masks."""
        for part, row, first in zip(self.parts, self.rows, self.first, strict=True):
            yield part, x[:, row] if x.dim() == 3 else x, masks and masks.from_expert(first)

    def _local(self, experts: Sequence[int]) -> list[list[int]]:
        """Return those of ``experts`` that each part has, as numbers within the part."""
        ends = [first + count for first, count in zip(self.first, self.counts, strict=True)]
        return [[e - first for e in experts if first <= e < end] for first, end in zip(self.first, ends, strict=True)]


class SpreadGate(GateWrapper):
    """The gates of T tasks, each of which sees the shared experts and its own, as gates over all experts.

    Of the E experts the first S are shared, and ``num_task_experts`` O of each task follow; ``gate`` has S + O. The
    weights ``[B, T, E]`` are 0 where a task does not see an expert.
    """

    columns: Tensor

    def __init__(self, gate: Gate, num_task_experts: int) -> None:
        num_tasks, num_shared_experts = gate.num_tasks, gate.num_experts - num_task_experts
        super().__init__(gate, num_shared_experts + num_tasks * num_task_experts)
        task_columns = num_shared_experts + torch.arange(num_tasks * num_task_experts).view(num_tasks, num_task_experts)
        columns = torch.cat([torch.arange(num_shared_experts).expand(num_tasks, -1), task_columns], 1)  # [T, S + O]
        self.register_buffer("columns", columns, persistent=False)

    def change(self, routing: Routing, tasks: list[int] | None) -> Routing:
        columns = self.columns if tasks is None else self.columns[tasks]  # [t, S + O]

        def spread(values: Tensor, index: Tensor) -> Tensor:
            return values.new_zeros(*values.shape[:-1], self.num_experts).scatter(-1, index.expand_as(values), values)

        selectors = routing.selectors
        selectors = None if selectors is None else spread(selectors, columns[:, None])
        return replace(routing, weights=spread(routing.weights, columns), selectors=selectors)

    def active_fraction(self, selectors: Tensor | None) -> float:
        if selectors is None or selectors.shape[-3] < self.num_tasks:  # of some tasks only: count all products
            return 1.0
        return super().active_fraction(selectors.gather(-1, self.columns[:, None].expand(*selectors.shape[:-1], -1)))
