"""Relu and dropout alone, as an expert does them after an affine map that changes nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from mtl.dropout import Masks
from mtl.experts.dense import StackedDense


def relu_dropout(x: Tensor, p: float, training: bool, key: int | None = None, rows: Tensor | None = None) -> Tensor:
    """Return dropout(relu(x)) of ``x [..., H]``; ``rows`` are the ids of its rows (default 0, 1, ...)."""
    width = x.shape[-1]
    expert = StackedDense(1, width, [width]).to(x.dtype)
    with torch.no_grad():
        expert.layers[0].weight.copy_(torch.eye(width))
    masks = Masks(p, 1, rows, None if key is None else {0: torch.tensor(key)}) if training else None
    return expert.outputs(x.reshape(-1, width), None, masks).view_as(x)
