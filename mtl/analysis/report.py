"""Report how the gates of a run route: figures and CSV tables. Matplotlib is imported only to draw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtl.analysis.patterns import describe
from mtl.analysis.tally import History, Probabilities, RoutingStats
from mtl.files.escaping import escape_mathtext
from mtl.files.writing import write_csv
from mtl.training.measurements import Key, Measurement, Measurements

Permutations = list[tuple[Tensor, Tensor, bool]]  # hard matrices, soft matrices, and whether the soft phase is over


@dataclass
class Report:
    """Statistics of a network's routing, by layer name.

    For a routed network, ``connections[name]``, bool ``[T, C]``, says which components each task uses, and
    ``kinds[name]`` names the kind of each component; for other networks both are empty. ``permutations``: the learnt
    permutations of gates.
    """

    tasks: Sequence[str]
    tallies: Mapping[str, RoutingStats]
    histories: Mapping[str, History]
    probabilities: Probabilities
    connections: Mapping[str, Tensor]
    kinds: Mapping[str, Sequence[str]] = field(default_factory=dict)
    permutations: Permutations = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """Return matplotlib's figures by file name, without extension."""
        from mtl.analysis import figures

        drawn: dict[str, Any] = {}
        tasks = [escape_mathtext(task) for task in self.tasks]
        for suffix, name in self._layers():
            shares = self.tallies[name].shares()
            names = [escape_mathtext(name) for name in self._row_names(shares)]
            drawn[f"expert_share{suffix}"] = figures.heat_map(shares, names)
            steps, shares_over_time = self._history(name).shares_by_step()
            if len(steps) > 1:
                since = self._history(name).binary_since
                drawn[f"weights_over_training{suffix}"] = figures.curves(steps, shares_over_time, names, since)
        for suffix, (hard, soft, is_hard) in _numbered(self.permutations):
            drawn[f"permutation{suffix}"] = figures.permutation(hard, soft, is_hard, tasks)
        if self.connections:
            drawn["connections"] = figures.connections(list(self.connections.values()), tasks)
        if curves := self._curves():
            drawn["connection_probabilities"] = figures.probabilities(self.probabilities.steps, curves, tasks)
        return drawn

    def write_tables(self, folder: Path) -> None:
        """Write the CSV tables into ``folder``."""
        for suffix, name in self._layers():
            shares = self.tallies[name].shares()
            experts, names = _expert_names(shares), self._row_names(shares)
            rows = [[task, *row] for task, row in zip(names, shares.tolist(), strict=True)]
            write_csv(folder / f"expert_share{suffix}.csv", ["task", *experts], rows)
            rows = [
                [step, task, *values]
                for step, share in zip(*self._history(name).shares_by_step(), strict=True)
                for task, values in zip(names, share.tolist(), strict=True)
                if not math.isnan(values[0])  # the batch has the task
            ]
            write_csv(folder / f"weights_over_training{suffix}.csv", ["step", "task", *experts], rows)
        for suffix, (hard, _, _) in _numbered(self.permutations):
            rows = [[p, i, *row] for p, matrix in enumerate(hard.tolist()) for i, row in enumerate(matrix)]
            write_csv(folder / f"permutation{suffix}.csv", ["matrix", "gate_output", *_expert_names(hard)], rows)
        if self.connections:
            rows = [
                [layer, number, self.kinds[name][number], *matrix[:, number].int().tolist()]
                for layer, (name, matrix) in enumerate(self.connections.items())
                for number in range(matrix.shape[1])
            ]
            write_csv(folder / "connections.csv", ["layer", "component", "kind", *self.tasks], rows)
        if curves := self._curves():
            sizes = [curve.shape[2] for curve in curves]
            numbers = [(layer, task, n) for layer, size in enumerate(sizes) for task in self.tasks for n in range(size)]
            names = [f"{task}/{layer}/{n}" for layer, task, n in numbers]
            values = torch.cat([curve.flatten(1) for curve in curves], 1).tolist()
            steps = zip(self.probabilities.steps, values, strict=True)
            rows = [[step, *[f"{p:.6g}" for p in row]] for step, row in steps]
            write_csv(folder / "connection_probabilities.csv", ["step", *names], rows)

    def scalars(self) -> dict[str, float]:
        """Return the statistics of each layer over all tasks and experts."""
        if self.connections:
            return describe(list(self.connections.values()))
        tallies = [(suffix, self.tallies[name].values()) for suffix, name in self._layers()]
        return {f"{key}{suffix}": value for suffix, values in tallies for key, value in values.items()}

    def binary_after(self, steps: int) -> dict[str, float]:
        """Return, by layer, the share of ``steps`` after which 99 % of its selectors stay one-hot; NaN: not yet."""
        since = {suffix: self._history(name).binary_since for suffix, name in self._layers() if steps}
        return {f"binary_after{suffix}": s / steps if s else math.nan for suffix, s in since.items() if s is not None}

    def parts(self, limit: int) -> Measurements:
        """Return the statistics of single tasks and experts of the only layer, if there are at most ``limit``."""
        if self.connections or len(self.tallies) != 1:
            return Measurements()
        values = next(iter(self.tallies.values())).parts(self.tasks, limit)
        return Measurements({Key("test", *pair): Measurement(value) for pair, value in values.items()})

    def _row_names(self, shares: Tensor) -> list[str]:
        """Return the names of the gates of a layer: one per task and perhaps one of shared experts, or one for all."""
        return [*self.tasks, "shared experts"][: len(shares)] if len(shares) >= len(self.tasks) else ["all tasks"]

    def _history(self, name: str) -> History:
        return self.histories.get(name, History())

    def _layers(self) -> list[tuple[str, str]]:
        """Return (file name suffix, layer name) for each layer with shares; empty for a routed network."""
        return [] if self.connections else _numbered(list(self.tallies))

    def _curves(self) -> list[Tensor]:
        """Return the connection probabilities over training, ``[N, T, C]`` for each layer; empty if N would be 1."""
        return [torch.stack(records) for records in self.probabilities.values.values() if len(records) > 1]


def _numbered(items: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return each item with a suffix for its names, which is empty for a single item."""
    return [("" if len(items) == 1 else f"_layer_{index}", item) for index, item in enumerate(items)]


def _expert_names(values: Tensor) -> list[str]:
    return [f"expert_{number:02d}" for number in range(values.shape[-1])]
