"""Report how the gates of a run route: figures and CSV tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from mtl.analysis import figures
from mtl.analysis.patterns import describe
from mtl.analysis.tally import History, Probabilities, Tally
from mtl.writing import write_csv

Permutations = list[tuple[Tensor, Tensor, bool]]  # hard matrices, soft matrices, and whether the soft phase is over


@dataclass
class Report:
    """Statistics of a network's routing, by layer name.

    For a routed network, ``connections[name]``, bool ``[T, C]``, says which components each task uses, and
    ``kinds[name]`` names the kind of each component; for other networks both are empty. ``permutations``: those of the
    gates that have one.
    """

    tasks: Sequence[str]
    tallies: Mapping[str, Tally]
    histories: Mapping[str, History]
    probabilities: Probabilities
    connections: Mapping[str, Tensor]
    kinds: Mapping[str, Sequence[str]] = field(default_factory=dict)
    permutations: Permutations = field(default_factory=list)

    def figures(self) -> dict[str, Figure]:
        """Return the figures by file name, without extension."""
        drawn: dict[str, Figure] = {}
        for suffix, name in self._layers_with_shares():
            shares, history = self.tallies[name].shares(), self.histories.get(name, History())
            names = self._row_names(len(shares))
            drawn[f"expert_share{suffix}"] = figures.heat_map(shares, names)
            if len(history.steps) > 1:
                course = torch.stack(history.shares)
                drawn[f"weights_over_training{suffix}"] = figures.courses(
                    history.steps, course, names, history.binary_since
                )
        binary = self._binary()
        if binary:
            drawn["selectors_over_training"] = figures.binary_selectors(binary)
        for suffix, matrices in self._permutations():
            drawn[f"permutation{suffix}"] = figures.permutation(*matrices, self.tasks)
        if self.connections:
            drawn["connections"] = figures.connections(list(self.connections.values()), self.tasks)
        courses = self._courses()
        if courses:
            drawn["connection_probabilities"] = figures.probabilities(self.probabilities.steps, courses, self.tasks)
        return drawn

    def write_tables(self, folder: Path) -> None:
        """Write the CSV tables into ``folder``."""
        for suffix, name in self._layers_with_shares():
            shares = self.tallies[name].shares().tolist()
            experts, names = [f"expert_{number:02d}" for number in range(len(shares[0]))], self._row_names(len(shares))
            rows = [[task, *row] for task, row in zip(names, shares, strict=True)]
            write_csv(folder / f"expert_share{suffix}.csv", ["task", *experts], rows)
            history = self.histories.get(name, History())
            rows = [
                [step, task, *values]
                for step, share in zip(history.steps, history.shares, strict=True)
                for task, values in zip(names, share.tolist(), strict=True)
                if not math.isnan(values[0])  # the batch has the task
            ]
            write_csv(folder / f"weights_over_training{suffix}.csv", ["step", "task", *experts], rows)
        binary = [[name, *pair] for name, pairs in self._binary().items() for pair in zip(*pairs, strict=True)]
        if binary:
            write_csv(folder / "selectors_over_training.csv", ["layer", "step", "share_of_binary_selectors"], binary)
        for suffix, (hard, _, _) in self._permutations():
            experts = [f"expert_{number:02d}" for number in range(hard.shape[-1])]
            rows = [[p, i, *row] for p, matrix in enumerate(hard.tolist()) for i, row in enumerate(matrix)]
            write_csv(folder / f"permutation{suffix}.csv", ["matrix", "gate_output", *experts], rows)
        if self.connections:
            rows = [
                [layer, number, self.kinds[name][number], *matrix[:, number].int().tolist()]
                for layer, (name, matrix) in enumerate(self.connections.items())
                for number in range(matrix.shape[1])
            ]
            write_csv(folder / "connections.csv", ["layer", "component", "kind", *self.tasks], rows)
        courses = self._courses()
        if courses:
            sizes = [course.shape[2] for course in courses]
            numbers = [(layer, task, n) for layer, size in enumerate(sizes) for task in self.tasks for n in range(size)]
            names = [f"{task}/{layer}/{n}" for layer, task, n in numbers]
            values = torch.cat([course.flatten(1) for course in courses], 1).tolist()
            steps = zip(self.probabilities.steps, values, strict=True)
            rows = [[step, *[f"{p:.6g}" for p in row]] for step, row in steps]
            write_csv(folder / "connection_probabilities.csv", ["step", *names], rows)

    def scalars(self) -> dict[str, float]:
        """Return what describes all tasks and experts together, of each layer."""
        if self.connections:
            return describe(list(self.connections.values()))
        layers = [tally.values() for tally in self.tallies.values()]
        if len(layers) == 1:
            return layers[0]
        return {f"{key}_layer_{index}": value for index, layer in enumerate(layers) for key, value in layer.items()}

    def binary_after(self, steps: int) -> dict[str, float]:
        """Return the share of the ``steps`` of training after which all selectors of a layer are one-hot, or NaN."""
        since = {suffix: self.histories[name].binary_since for suffix, name in self._layers_with_selectors()}
        return {f"binary_after{key}": step / steps if step >= 0 else math.nan for key, step in since.items() if steps}

    def parts(self, limit: int) -> dict[str, float]:
        """Return what describes single tasks and experts of the only layer, if there are at most ``limit`` of them."""
        if self.connections or len(self.tallies) != 1:
            return {}
        return next(iter(self.tallies.values())).parts(self.tasks, limit)

    def _row_names(self, rows: int) -> list[str]:
        """Return the names of the tasks of a layer, which may have one gate for all tasks."""
        return list(self.tasks) if rows == len(self.tasks) else ["all tasks"]

    def _layers_with_shares(self) -> list[tuple[str, str]]:
        """Return (file name suffix, layer name) for each layer whose shares are drawn; empty for a routed network."""
        if self.connections:
            return []
        if len(self.tallies) == 1:
            return [("", name) for name in self.tallies]
        return [(f"_layer_{index}", name) for index, name in enumerate(self.tallies)]

    def _layers_with_selectors(self) -> list[tuple[str, str]]:
        """Return (suffix, layer name) for each layer whose gate had selectors in training."""
        layers = self._layers_with_shares()
        return [(suffix, name) for suffix, name in layers if self.histories.get(name, History()).binary]

    def _binary(self) -> dict[str, tuple[list[int], list[float]]]:
        """Return steps and shares of binary selectors of each layer that has selectors, by its number or ""."""
        layers = {
            suffix.replace("_", " ").strip(): self.histories[name] for suffix, name in self._layers_with_selectors()
        }
        return {name: (history.binary_steps, history.binary) for name, history in layers.items()}

    def _permutations(self) -> list[tuple[str, tuple[Tensor, Tensor, bool]]]:
        """Return (suffix of file names, matrices) of each permutation."""
        if len(self.permutations) == 1:
            return [("", self.permutations[0])]
        return [(f"_layer_{index}", matrices) for index, matrices in enumerate(self.permutations)]

    def _courses(self) -> list[Tensor]:
        """Return the connection probabilities over training, ``[N, T, C]`` for each layer; empty if N would be 1."""
        return [torch.stack(records) for records in self.probabilities.values.values() if len(records) > 1]
