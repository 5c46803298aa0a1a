"""Routings to try experts on."""

from __future__ import annotations

import torch
from torch import Tensor


def random_weights(rows: int, tasks: int, experts: int, k: int) -> Tensor:
    """Return weights ``[rows, tasks, experts]``, ``k`` of each row and task not 0."""
    weights = torch.rand(rows, tasks, experts)
    keep = torch.zeros_like(weights).scatter_(-1, weights.topk(k, -1).indices, 1.0)
    return weights * keep
