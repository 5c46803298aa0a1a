"""Compare which experts, or components of a routed network, tasks select (Maziarz et al. 2019, section 6, figure 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import scipy  # imports its parts at their first use
import torch
from torch import Tensor, nn

from mtl.gates.base import Gate
from mtl.networks.mixture import MixtureOfExperts
from mtl.networks.routed import RoutedLayer
from mtl.nn.functional import float64_if_supported
from mtl.types import Routing


def layers_with_gates(network: nn.Module) -> dict[str, Any]:
    """Return the mixture and routed layers of a network by name, in order."""
    return {name: layer for name, layer in network.named_modules() if isinstance(layer, MixtureOfExperts | RoutedLayer)}


def is_routed(layers: Mapping[str, Any]) -> bool:
    """Return whether ``layers`` are several, or one routed layer; a single mixture has no patterns to report."""
    return len(layers) > 1 or any(isinstance(layer, RoutedLayer) for layer in layers.values())


@torch.no_grad()
def connections(gate: Gate, num_tasks: int) -> Tensor:
    """Return which experts a static gate gives each task in evaluation, bool ``[T, E]``.

    A gate of one task serves all tasks. A gate of shared experts, after those of the tasks, is left out.
    """
    training = gate.training
    try:
        weights: Tensor = gate.eval()(None, None, None).weights
        return (weights != 0)[:num_tasks].expand(num_tasks, -1)
    finally:
        gate.train(training)


def component_names(layer: nn.Module) -> list[str]:
    """Return a short name for the kind of each component of a routed layer, such as ``3x3``; "expert" in a mixture."""
    if isinstance(layer, MixtureOfExperts):
        return ["expert"] * layer.experts.num_experts
    components: Any = layer.components
    return [component.kind or type(component).__name__ for component in components]


def describe(matrices: Sequence[Tensor]) -> dict[str, float]:
    """Return statistics of the connections ``[T, C]`` of each layer.

    A task's global pattern is the concatenation of its rows in all layers. ``active_connections``: the share of
    connections that are on, in total and for each layer; ``distinct_patterns``: the number of different global
    patterns; ``pattern_jaccard``: the mean Jaccard index of the patterns of two tasks; ``idle_tasks``: the share of
    rows without a connection.
    """
    pattern = torch.cat(list(matrices), 1)  # [T, all components]
    values = {
        "active_connections": float(float64_if_supported(pattern).mean()),
        "distinct_patterns": float(len(torch.unique(pattern, dim=0))),
        "idle_tasks": float(float64_if_supported(torch.stack([~matrix.any(1) for matrix in matrices])).mean()),
    }
    tasks = len(pattern)
    if tasks > 1:
        overlap = jaccard(pattern)
        values["pattern_jaccard"] = float((overlap.sum() - overlap.trace()) / (tasks * (tasks - 1)))
    for index, matrix in enumerate(matrices):
        values[f"active_connections_layer_{index}"] = float(float64_if_supported(matrix).mean())
    return values


def compare_groups(matrices: Sequence[Tensor], group: Tensor) -> dict[str, float]:
    """Return how well the global patterns fit the known groups of the tasks, ``group [T]``.

    ``jaccard_related`` and ``jaccard_unrelated``: see ``jaccard_by_group``. ``groups_recovered``: 1 if any two
    tasks have the same pattern if and only if they are in the same group, else 0.
    """
    pattern = torch.cat(list(matrices), 1)
    values = {name: float(value) for name, value in jaccard_by_group(pattern, group).items()}
    same = (pattern[:, None] == pattern).all(-1)
    group = group.to(pattern.device)
    return values | {"groups_recovered": float(torch.equal(same, group[:, None] == group))}


def active_by_kind(kinds: Sequence[Sequence[str]], matrices: Sequence[Tensor]) -> dict[str, float]:
    """Return the share of active connections of each kind of component: KIND over all layers, and KIND_layer_N."""
    columns: dict[str, list[float]] = {}
    for layer, (names, matrix) in enumerate(zip(kinds, matrices, strict=True)):
        for kind, column in zip(names, float64_if_supported(matrix).mean(0).tolist(), strict=True):
            for name in (kind, f"{kind}_layer_{layer}"):
                columns.setdefault(name, []).append(column)
    return {name: sum(shares) / len(shares) for name, shares in columns.items()}


def selected_experts(routing: Routing) -> Tensor:
    """Return which experts each task selects, bool ``[..., T, E]``.

    If the gate has selectors, these are the most probable expert of each selector, else the experts of nonzero weight.
    """
    if routing.selectors is None:
        return routing.weights > 0
    best = routing.selectors.argmax(-1)  # [..., T, K]
    return torch.zeros_like(routing.weights, dtype=torch.bool).scatter_(-1, best, True)


def compare_selections(routing: Routing, ground_truth: Mapping[str, Tensor]) -> dict[str, float]:
    """Compare the selections of a network's only mixture layer with the ground truth of simulated data, if it has one.

    ``true_experts_found``: how many of the N experts in ``ground_truth["true_experts"]`` are among the N with the
    largest nonzero weights, mean over samples and tasks. With ``ground_truth["task_group"]``: see ``jaccard_by_group``,
    and ``distinct_experts``: how many experts a task selects, where selectors that agree count once.
    """
    values: dict[str, Tensor] = {}
    if "true_experts" in ground_truth:
        true = ground_truth["true_experts"].to(routing.weights.device)
        hits = heaviest_experts(routing.weights, len(true))[..., true].sum(-1)
        values["true_experts_found"] = float64_if_supported(hits).mean()
    if "task_group" in ground_truth:
        selected = selected_experts(routing)
        values |= jaccard_by_group(selected, ground_truth["task_group"])
        values["distinct_experts"] = float64_if_supported(selected.sum(-1)).mean()
    return {name: float(value) for name, value in values.items()}


def heaviest_experts(weights: Tensor, count: int) -> Tensor:
    """Return which experts have the ``count`` largest weights, bool ``[..., E]``; experts of weight 0 never count."""
    mask = torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, weights.topk(count, -1).indices, True)
    return mask & (weights > 0)


def jaccard(selected: Tensor) -> Tensor:
    """Return the Jaccard index of each pair of tasks, bool ``[B, T, E] -> [B, T, T]``."""
    selected = float64_if_supported(selected)
    common = selected @ selected.transpose(-1, -2)
    size = selected.sum(-1)
    return common / (size[..., :, None] + size[..., None, :] - common).clamp(min=1)


def random_jaccard(num_experts: int, k: int) -> float:
    """Return the expected Jaccard index of two tasks that each select ``k`` of the experts at random."""
    common = range(k + 1)
    return float(sum(scipy.stats.hypergeom.pmf(c, num_experts, k, k) * c / (2 * k - c) for c in common))


def jaccard_by_group(selected: Tensor, group: Tensor) -> dict[str, Tensor]:
    """Return ``jaccard_related`` and, if there are several groups, ``jaccard_unrelated``.

    These are the mean Jaccard indices, over samples, of two tasks in the same group and in different groups (DSelect-k,
    supplement C.1). ``selected``: bool ``[B, T, E]`` or ``[T, E]``; ``group [T]``: the group of each task.
    """
    group = group.to(selected.device)
    related = (group[:, None] == group).fill_diagonal_(False)
    different = group[:, None] != group
    index = jaccard(selected if selected.dim() == 3 else selected[None]).mean(0)
    values = {"jaccard_related": index[related].mean()} if related.any() else {}
    return values | ({"jaccard_unrelated": index[different].mean()} if different.any() else {})
