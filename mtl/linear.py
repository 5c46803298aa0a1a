"""Affine maps: one for all rows, or one for each group of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mtl.fast import accelerated, grouped, matmul


def matching(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x`` in the precision of ``weight``, unless it is in that in which autocast computes already."""
    device = x.device.type
    narrow = torch.is_autocast_enabled(device) and x.dtype == torch.get_autocast_dtype(device)
    return x if narrow else x.to(weight.dtype)


@accelerated(matmul.affine)
def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply several affine maps in one matrix product: ``x [B, D]``, ``weight [..., D]``, ``bias [...]``.

    Returns ``[B, ...]``.
    """
    return F.linear(x, weight.flatten(0, -2), bias.flatten()).view(len(x), *bias.shape)


@accelerated(grouped.grouped_linear, cuda=grouped.cuda_grouped_linear)
def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor, counts: Sequence[int]) -> Tensor:
    """Apply to each row of ``x [P, D]`` the map of its expert; rows are sorted by expert, ``counts [E]`` rows each.

    ``weight [E, H, D]``, ``bias [E, H]``; returns ``[P, H]``.
    """
    groups = zip(torch.split(matching(x, weight), list(counts)), weight.unbind(), bias.unbind(), strict=True)
    return torch.cat([F.linear(rows, w, b) for rows, w, b in groups])
