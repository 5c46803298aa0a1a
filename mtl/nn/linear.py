"""Affine maps: one for all rows, or one for each group of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def matching(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x`` in the precision of ``weight``, unless ``x`` is already in autocast's precision."""
    device = x.device.type
    is_narrow = torch.is_autocast_enabled(device) and x.dtype == torch.get_autocast_dtype(device)
    return x if is_narrow else x.to(weight.dtype)


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply several affine maps in one matrix product: ``x [B, D]``, ``weight [T, ..., D]``, ``bias [T, ...]``.

    Returns ``[B, T, ...]``. For ``x [B, T, D]``, map t takes ``x[:, t]``; one map, ``weight [1, ..., D]``, takes all,
    and all maps take ``x [B, 1, D]``.
    """
    x = x.squeeze(1) if x.dim() == 3 and x.shape[1] == 1 else x
    if x.dim() == 2 or len(weight) == 1:
        count = len(weight) if x.dim() == 2 else x.shape[1]
        return F.linear(x, weight.flatten(0, -2), bias.flatten()).view(len(x), count, *bias.shape[1:])
    products = torch.baddbmm(bias.flatten(1)[:, None], x.transpose(0, 1), weight.flatten(1, -2).mT)  # [T, B, M]
    return products.transpose(0, 1).view(len(x), *bias.shape)


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor, expert: Tensor, counts: Sequence[int]) -> Tensor:
    """Apply to each row of ``x [P, D]`` the map of its ``expert [P]``, which are sorted; ``counts [E]`` rows each.

    ``weight [E, H, D]``, ``bias [E, H]``; returns ``[P, H]``.
    """
    x = matching(x, weight)
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weight.dtype
    aligned = weight.shape[1] % 8 == weight.shape[2] % 8 == 0  # in 16-byte units
    if x.is_cuda and dtype == torch.bfloat16 and aligned and torch.cuda.get_device_capability(x.device) >= (8, 0):
        return one_kernel(x.to(dtype), weight.to(dtype), bias.to(dtype), expert)
    groups = zip(torch.split(x, list(counts)), weight.unbind(), bias.unbind(), strict=True)
    return torch.cat([F.linear(rows, w, b) for rows, w, b in groups])


def one_kernel(x: Tensor, weight: Tensor, bias: Tensor, expert: Tensor) -> Tensor:
    """Return ``grouped_linear`` by one kernel for all experts, without waiting for the device."""
    one_hot = expert[:, None] == torch.arange(len(weight), device=x.device)  # [P, E]
    products = F.grouped_mm(x, weight.mT, offs=one_hot.sum(0).cumsum(0, dtype=torch.int32))
    # A product with the biases: its gradient is summed in float32, where an index would sum in bfloat16, row by row
    return torch.addmm(products, one_hot.to(x.dtype), bias)
