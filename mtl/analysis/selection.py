"""Compare which experts, or components, tasks select."""

from __future__ import annotations

import torch
from torch import Tensor

from mtl.types import Routing, widest


def selected_experts(routing: Routing) -> Tensor:
    """Return which experts each task selects, bool ``[..., T, E]``.

    If the gate has selectors, these are the most probable expert of each selector, else the experts of nonzero weight.
    """
    if routing.selectors is None:
        return routing.weights > 0
    best = routing.selectors.argmax(-1)  # [..., T, K]
    return torch.zeros_like(routing.weights, dtype=torch.bool).scatter_(-1, best, True)


def heaviest_experts(weights: Tensor, count: int) -> Tensor:
    """Return which experts have the ``count`` largest weights, bool ``[..., E]``; experts of weight 0 never count."""
    mask = torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, weights.topk(count, -1).indices, True)
    return mask & (weights > 0)


def jaccard(chosen: Tensor) -> Tensor:
    """Return the Jaccard index of each pair of tasks, bool ``[B, T, E] -> [B, T, T]``."""
    chosen = widest(chosen)
    common = chosen @ chosen.transpose(-1, -2)
    size = chosen.sum(-1)
    return common / (size[..., :, None] + size[..., None, :] - common).clamp(min=1)


def jaccard_by_group(chosen: Tensor, group: Tensor) -> dict[str, Tensor]:
    """Return ``jaccard_related`` and, if there are several groups, ``jaccard_unrelated``.

    These are the mean Jaccard indices, over samples, of two tasks in the same group and in different groups (DSelect-k,
    supplement C.1). ``chosen``: bool ``[B, T, E]`` or ``[T, E]``; ``group [T]``: the group of each task.
    """
    group = group.to(chosen.device)
    related = (group[:, None] == group).fill_diagonal_(False)
    different = group[:, None] != group
    index = jaccard(chosen if chosen.dim() == 3 else chosen[None]).mean(0)
    values = {"jaccard_related": index[related].mean()} if related.any() else {}
    return values | ({"jaccard_unrelated": index[different].mean()} if different.any() else {})
