"""Describe the connections of a routed network (Maziarz et al. 2019, section 5 and figure 3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mtl.analysis.selection import jaccard, jaccard_by_group
from mtl.networks.routed import RoutedLayer


def routed_layers(network: nn.Module) -> list[RoutedLayer]:
    """Return the routed layers of a network, in order."""
    return [module for module in network.modules() if isinstance(module, RoutedLayer)]


@torch.no_grad()
def connections(layer: RoutedLayer) -> Tensor:
    """Return which components each task uses in evaluation, bool ``[T, C]``."""
    training = layer.gate.training
    try:
        weights: Tensor = layer.gate.eval()(None, None, None).weights
        return weights != 0
    finally:
        layer.gate.train(training)


def component_names(layer: RoutedLayer) -> list[str]:
    """Return a short name for the kind of each component, as ``3x3-3x3`` or ``max``."""
    return [str(getattr(component, "kind", type(component).__name__)) for component in layer.components]


def describe(matrices: list[Tensor]) -> dict[str, float]:
    """Return numbers about the connections ``[T, C]`` of each layer.

    ``active_connections``: the share of all that are on, and of each layer; ``distinct_patterns``: how many different
    global patterns (a task's rows of all layers, one after the other) the tasks have; ``pattern_jaccard``: mean Jaccard
    index of the patterns of two tasks; ``idle_tasks``: rows without a connection, of all rows.
    """
    pattern = torch.cat(matrices, 1)  # [T, all components]
    values = {
        "active_connections": float(pattern.double().mean()),
        "distinct_patterns": float(len(torch.unique(pattern, dim=0))),
        "idle_tasks": float(torch.stack([~matrix.any(1) for matrix in matrices]).double().mean()),
    }
    tasks = len(pattern)
    if tasks > 1:
        index = jaccard(pattern)
        values["pattern_jaccard"] = float((index.sum() - index.trace()) / (tasks * (tasks - 1)))
    for place, matrix in enumerate(matrices):
        values[f"active_connections_layer_{place}"] = float(matrix.double().mean())
    return values


def compare_groups(matrices: list[Tensor], group: Tensor) -> dict[str, float]:
    """Return how the global patterns fit what is known of the tasks, ``group [T]``.

    ``jaccard_related`` and ``jaccard_unrelated``: see ``jaccard_by_group``. ``groups_recovered``: 1 if two tasks have
    the same pattern exactly when they are of the same group, else 0.
    """
    pattern = torch.cat(matrices, 1)
    values = {name: float(value) for name, value in jaccard_by_group(pattern, group).items()}
    same = (pattern[:, None] == pattern).all(-1)
    group = group.to(pattern.device)
    return values | {"groups_recovered": float(torch.equal(same, group[:, None] == group))}


def active_by_kind(layers: list[RoutedLayer], matrices: list[Tensor]) -> dict[str, float]:
    """Return the share of active connections of each kind of component, over all layers."""
    counts: dict[str, list[float]] = {}
    for layer, matrix in zip(layers, matrices, strict=True):
        for name, column in zip(component_names(layer), matrix.double().mean(0).tolist(), strict=True):
            counts.setdefault(name, []).append(column)
    return {name: sum(shares) / len(shares) for name, shares in counts.items()}
