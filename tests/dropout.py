"""Relu and dropout alone, as the experts' kernel does them after a map that changes nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from mtl.experts.kernels import linear_relu_dropout
from mtl.functional import draw_key


def relu_dropout(x: Tensor, p: float, training: bool, key: int | None = None, rows: Tensor | None = None) -> Tensor:
    """Return dropout(relu(x)) of ``x [..., H]``; ``rows`` are the ids of its rows (default 0, 1, ...)."""
    width, flat = x.shape[-1], x.reshape(-1, x.shape[-1])
    rows = torch.arange(len(flat)) if rows is None else rows
    weight, bias = torch.eye(width, dtype=x.dtype)[None], torch.zeros(1, width, dtype=x.dtype)
    key = draw_key() if key is None else key
    return linear_relu_dropout(flat, weight, bias, p if training else 0.0, key, rows[:, None]).view_as(x)
