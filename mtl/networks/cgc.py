"""Customized gate control (CGC): a layer of shared experts and experts of each task (Tang et al. 2020, section 4.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from mtl.experts.base import Experts
from mtl.experts.pairs import Pairs
from mtl.gates.base import Gate
from mtl.gates.separate import joined
from mtl.nn.dropout import Masks
from mtl.types import Routing


class OwnedExperts(Experts):
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
        parts = zip(self._each(x, masks), local, strict=True)
        outputs = torch.cat([part._outputs(own, numbers, drop) for (part, own, drop), numbers in parts], 1)
        if subset is None or ordered == list(subset):
            return outputs
        return outputs[:, [ordered.index(expert) for expert in subset]]

    def pairs_mixture(self, x: Tensor, weights: Tensor, pairs: Pairs, masks: Masks | None = None) -> Tensor:
        """See ``Experts``. The mixture is the sum of the mixtures of the parts."""
        columns = zip(torch.split(weights, self.counts, -1), torch.split(pairs.nonzero, self.counts, -1), strict=True)
        parts = zip(self._each(x, masks), columns, strict=True)
        return sum(part.pairs_mixture(own, w, Pairs(used), drop) for (part, own, drop), (w, used) in parts)

    @torch.no_grad()
    def subset(self, used: Sequence[int]) -> OwnedExperts:
        """See ``Experts``; parts that have none of the experts ``used`` are left out."""
        local: Any = zip(self.parts, self._local(used), self.rows, strict=True)
        parts = [(part.subset(numbers), row) for part, numbers, row in local if numbers]
        return OwnedExperts([part for part, _ in parts], [row for _, row in parts])

    def _each(self, x: Tensor, masks: Masks | None) -> Iterator[tuple[Any, Tensor, Masks | None]]:
        """Yield each part with its input and its dropout masks."""
        for part, row, first in zip(self.parts, self.rows, self.first, strict=True):
            yield part, x[:, row] if x.dim() == 3 else x, masks and masks.from_expert(first)

    def _local(self, experts: Sequence[int]) -> list[list[int]]:
        """Return those of ``experts`` that each part has, as numbers within the part."""
        ends = [first + count for first, count in zip(self.first, self.counts, strict=True)]
        return [[e - first for e in experts if first <= e < end] for first, end in zip(self.first, ends, strict=True)]


class CGCGate(Gate):
    """The gates of a CGC layer: a task chooses among the shared and its own experts, the shared gate among all.

    Of the E experts the first S are shared, and O of each task follow. ``tasks``: the gates of T tasks over S + O
    experts; ``shared``: the gate of the shared experts of the next level, over all E; None in the last level, where no
    shared experts follow. Weights ``[B, T, E]``, and with ``shared`` ``[B, T + 1, E]``, are 0 where a task does not see
    an expert. With ``own_inputs``, x holds the inputs of the T tasks and of the shared gate one after another,
    ``[B, (T + 1) D]``; otherwise all gates read the same ``x [B, D]``.
    """

    columns: Tensor

    def __init__(self, tasks: Gate, shared: Gate | None, num_own: int, own_inputs: bool) -> None:
        num_tasks, num_shared = tasks.num_tasks, tasks.num_experts - num_own
        width = tasks.input_dim and tasks.input_dim * (num_tasks + 1 if own_inputs else 1)
        super().__init__(num_tasks + (shared is not None), num_shared + num_tasks * num_own, width)
        self.task_gate, self.shared_gate, self.own_inputs = tasks, shared, own_inputs
        self.reads_inputs = tasks.reads_inputs
        own = num_shared + torch.arange(num_tasks * num_own).view(num_tasks, num_own)
        columns = torch.cat([torch.arange(num_shared).expand(num_tasks, -1), own], 1)  # [T, S + O]
        self.register_buffer("columns", columns, persistent=False)

    def route(self, x: Tensor | None, inputs: Mapping[str, Tensor] | None, tasks: list[int] | None) -> Routing:
        count = self.task_gate.num_tasks
        wanted = None if tasks is None else [task for task in tasks if task < count]
        own = shared = x
        if x is not None and self.own_inputs:
            each = x.view(len(x), count + 1, x.shape[1] // (count + 1))  # [B, T + 1, D]
            own, shared = each[:, :count] if wanted is None else each[:, wanted], each[:, count]
        routings = []
        if wanted != []:
            columns = self.columns if wanted is None else self.columns[wanted]
            routings.append(self._spread(self.task_gate(own, inputs, wanted), columns))
        if self.shared_gate is not None and (tasks is None or count in tasks):
            routings.append(self.shared_gate(shared, inputs))
        return joined(routings)

    def _spread(self, routing: Routing, columns: Tensor) -> Routing:
        """Return ``routing`` over the ``columns [t, S + O]`` as one over all experts."""

        def spread(values: Tensor, index: Tensor) -> Tensor:
            return values.new_zeros(*values.shape[:-1], self.num_experts).scatter(-1, index.expand_as(values), values)

        selectors = routing.selectors
        selectors = None if selectors is None else spread(selectors, columns[:, None])
        return replace(routing, weights=spread(routing.weights, columns), selectors=selectors)

    def needed(self, selectors: Tensor | None) -> float:
        if selectors is None or selectors.shape[-3] < self.num_tasks:  # of some tasks only: count all products
            return 1.0
        own, shared = selectors[..., : len(self.columns), :, :], selectors[..., len(self.columns) :, :, :]
        index = self.columns[:, None].expand(*own.shape[:-1], -1)
        parts = [(self.task_gate, own.gather(-1, index))]
        parts += [] if self.shared_gate is None else [(self.shared_gate, shared)]
        products = [sum(p.numel() for p in gate.parameters()) for gate, _ in parts]
        return sum(n * gate.needed(s) for n, (gate, s) in zip(products, parts, strict=True)) / sum(products)

    def task_parameters(self) -> dict[nn.Parameter, Sequence[int]]:
        return self.task_gate.task_parameters()
