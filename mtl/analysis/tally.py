"""Accumulate routing statistics over an evaluation pass, and over training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from mtl.distributed import all_reduce_sum, gather, world_size
from mtl.gates.base import DrawsConnections
from mtl.nn.functional import entropy, float64_if_supported
from mtl.types import Routing

# The largest number of training batches that are kept; beyond it, every second one is dropped
MAX_SHARES = 1000
MAX_PROBABILITIES = 200
MIN_USED_WEIGHT = 1e-5  # weights from here on count as experts of a sample, as in the code of COMET's authors
MIN_ONE_HOT_FRACTION = 0.99  # of the selectors: in a large batch one soft example does not count


@dataclass
class RoutingStats:
    """Sums over samples of routing statistics of one gate with ``num_tasks`` tasks."""

    num_tasks: int
    static: bool = True  # whether no routing depended on the example
    rows: int = 0  # the number of samples
    task_rows: Any = 0.0  # [T] number of samples that had the task
    active: Any = 0.0  # [T] number of weights of at least MIN_USED_WEIGHT
    mixed: Any = 0.0  # [T] number of nonzero weights
    idle: float = 0.0  # samples for which a task uses no expert, mean over tasks
    share: Any = 0.0  # [T, E] weights
    union: float = 0.0  # number of experts that at least one task uses
    entropy: float = 0.0  # of the weights, mean over tasks
    binary: float = 0.0  # share of the selectors that are exactly one-hot
    selectors: float = 0.0  # number of samples whose gate has selectors
    active_fraction: float = 0.0  # share of the gate's products that a sample needs

    def add(self, routing: Routing, rows: int, active_fraction: float = 1.0) -> None:
        """Add a batch of ``rows`` samples; of texts, each token that is routed counts as a sample.

        ``active_fraction``: see ``Gate.active_fraction``.
        """
        if not rows:
            return
        weights = float64_if_supported(routing.weights.detach())  # the sums then hardly depend on how rows are batched
        self.static = self.static and weights.dim() == 2
        if weights.dim() == 3:
            rows, times = len(weights), 1
        else:  # [1, T, E], which stands for all samples
            weights, times = weights[None], rows
        active = weights > 0
        self.rows += rows
        self.task_rows = self.task_rows + self._spread(weights.new_full((weights.shape[1],), rows), routing.tasks)
        self.mixed = self.mixed + self._spread(float64_if_supported(active.sum((0, 2))) * times, routing.tasks)
        self.active = self.active + self._spread(
            float64_if_supported((weights >= MIN_USED_WEIGHT).sum((0, 2))) * times, routing.tasks
        )
        self.active_fraction += active_fraction * rows
        self.idle += float(float64_if_supported(~active.any(-1)).mean(-1).sum()) * times
        self.share = self.share + self._spread(weights.sum(0) * times, routing.tasks)
        self.union += float(active.any(1).sum()) * times
        self.entropy += float(entropy(weights).mean(-1).sum()) * times
        if routing.selectors is not None:
            self.binary += binary_share(routing.selectors) * rows
            self.selectors += rows

    def plus(self, other: RoutingStats) -> RoutingStats:
        """Return the sum of two tallies."""
        joined = {item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(self)}
        return RoutingStats(**(joined | {"num_tasks": self.num_tasks, "static": self.static and other.static}))

    def on_cpu(self) -> RoutingStats:
        """Return the tally with its tensors on the CPU."""
        tensors: dict[str, Any] = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: value.cpu() for name, value in tensors.items()})

    def shares(self) -> Tensor:
        """Return the mean weights ``[T, E]``."""
        return self.share / self.task_rows.clamp(min=1)[:, None]

    def _spread(self, values: Tensor, tasks: Sequence[int] | None) -> Tensor:
        """Return ``values [t, ...]`` of ``tasks`` (None: all) as ``[T, ...]``, with 0 for the other tasks."""
        if tasks is None:
            return values
        index = torch.tensor(tasks, device=values.device)
        return values.new_zeros(self.num_tasks, *values.shape[1:]).index_copy_(0, index, values)

    def values(self) -> dict[str, float]:
        """Return the statistics over all tasks and experts."""
        share = self.shares()
        values = {
            "experts_per_sample": float(self._active_by_task().mean()),
            "union_per_sample": self.union / self.rows,
            "routing_entropy": self.entropy / self.rows,
            "dead_experts": float((share.sum(0) == 0).sum()),
        }
        if self.idle:
            values["idle_tasks"] = self.idle / self.rows
        if self.selectors:
            values["binary_selectors"] = self.binary / self.selectors
        return values

    def parts(self, names: Sequence[str], limit: int) -> dict[tuple[str, str], float]:
        """Return the values of tasks, by task and name, of each kind only if there are at most ``limit``."""
        values: dict[tuple[str, str], float] = {}
        share = self.shares()
        if len(names) <= limit:
            active = self._active_by_task().tolist()
            values |= {(name, "experts_per_sample"): number for name, number in zip(names, active, strict=True)}
        if share.numel() <= limit:
            for name, row in zip(names, share.tolist(), strict=True):
                values |= {(name, f"expert_share_{expert:02d}"): value for expert, value in enumerate(row)}
        return values

    def _active_by_task(self) -> Tensor:
        """Return the mean number of experts of each task, ``[T]``."""
        return self.active / self.task_rows.clamp(min=1)


@dataclass
class History:
    """The routing of a layer's gate in the observed training batches."""

    steps: list[int] = field(default_factory=list)
    shares: list[Tensor] = field(default_factory=list)  # [T, E] mean weights, NaN for tasks that the batch lacks
    binary_since: int | None = None  # the step since which nearly all selectors are one-hot, or 0; None: no selectors
    batches: int = 0
    unused: float = 0.0  # experts that no task uses, mean over the samples of a batch, summed over batches
    unmixed: float = 0.0  # zero weights, mean over the samples of a batch, summed over batches

    def add(self, step: int, routings: Sequence[Routing], limit: int, num_tasks: int) -> None:
        """Add the training batches of ``step``, averaged over them and over all processes.

        ``shares`` gets an empty tensor if there are more than ``limit`` weights.
        """
        weights = [routing.weights.detach() for routing in routings]
        weights = [weight if weight.dim() == 3 else weight[None] for weight in weights]  # [B, T, E]
        figures = []  # [3] each: binary selectors, unused experts, zero weights
        for routing, idle in zip(routings, (weight <= 0 for weight in weights), strict=True):
            binary = math.nan if routing.selectors is None else binary_share(routing.selectors)
            counts = idle.all(1).sum(-1), idle.sum((1, 2))
            unused, unmixed = (float64_if_supported(count).mean() for count in counts)
            figures.append(torch.stack([unused.new_tensor(binary), unused, unmixed]))
        binary, unused, unmixed = (all_reduce_sum(torch.stack(figures).mean(0)) / world_size()).tolist()
        self.batches, self.unused, self.unmixed = self.batches + 1, self.unused + unused, self.unmixed + unmixed
        if not math.isnan(binary):
            self.binary_since = (self.binary_since or step) if binary >= MIN_ONE_HOT_FRACTION else 0
        shares = []  # [T, E] each, NaN for tasks that the batch lacks
        for routing, weight in zip(routings, weights, strict=True):
            share = weight.mean(0).float()
            if routing.tasks is not None:
                index = torch.tensor(routing.tasks, device=share.device)
                share = share.new_full((num_tasks, share.shape[1]), torch.nan).index_copy_(0, index, share)
            shares.append(share)
        self.steps.append(step)
        mean = torch.empty(0)
        if shares[0].numel() <= limit:
            mean = (all_reduce_sum(torch.stack(shares).nanmean(0)) / world_size()).cpu()
        self.shares.append(mean)
        if len(self.steps) > MAX_SHARES:
            indices = _evenly(self.steps, MAX_SHARES // 2)
            self.steps, self.shares = [self.steps[i] for i in indices], [self.shares[i] for i in indices]

    def shares_by_step(self) -> tuple[list[int], Tensor]:
        """Return the steps of batches whose weights were kept, and the weights ``[N, T, E]`` (or an empty tensor)."""
        pairs = [(step, share) for step, share in zip(self.steps, self.shares, strict=True) if share.numel()]
        return [step for step, _ in pairs], torch.stack([share for _, share in pairs]) if pairs else torch.empty(0)


@dataclass
class Probabilities:
    """The connection probabilities ``[T, C]`` of the gates in training, by layer."""

    steps: list[int] = field(default_factory=list)
    values: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, step: int, layers: Mapping[str, Any]) -> None:
        """Add the probabilities at ``step`` of the gates of those ``layers`` that draw connections at random."""
        gates = {name: layer.gate for name, layer in layers.items() if isinstance(layer.gate, DrawsConnections)}
        if not gates or (self.steps and step <= self.steps[-1]):
            return
        self.steps.append(step)
        for name, gate in gates.items():
            self.values.setdefault(name, []).append(gate.probabilities().detach().cpu().clone())
        if len(self.steps) > MAX_PROBABILITIES:
            indices = _evenly(self.steps, MAX_PROBABILITIES // 2)
            self.steps = [self.steps[i] for i in indices]
            self.values = {name: [records[i] for i in indices] for name, records in self.values.items()}


def _evenly(steps: Sequence[int], number: int) -> list[int]:
    """Return the indices of at most ``number`` + 1 of the ``steps``, about evenly apart."""
    gap, indices = (steps[-1] - steps[0]) / number, [0]
    for index, step in enumerate(steps):
        if step - steps[indices[-1]] >= gap:
            indices.append(index)
    return indices


def gather_routing_stats(tallies: Mapping[str, RoutingStats]) -> dict[str, RoutingStats]:
    """Return the tally of each layer, summed over all processes; every process must call this."""
    joined: dict[str, RoutingStats] = {}
    for part in gather({name: tally.on_cpu() for name, tally in tallies.items()}):
        for name, tally in part.items():
            if tally.rows:
                joined[name] = joined[name].plus(tally) if name in joined else tally
    return joined


def binary_share(selectors: Tensor) -> float:
    """Return the share of ``selectors [..., E]`` that are exactly one-hot."""
    return float((selectors.detach() == 1).any(-1).float().mean())
