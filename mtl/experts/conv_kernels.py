"""Compute what convolutional experts are made of on a CPU, forward and backward.

Written out since torch's pooling of few channels takes longer than their convolution, and its convolution of one
channel is far from what a matrix product reaches. Each can be differentiated once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtl.functional import apply
from mtl.products import product

CHUNK = 1 << 20  # numbers at a time: what a product writes is still in the cache when it is pooled


def pool_relu(x: Tensor, pool: int) -> Tensor:
    """Return relu(max-pooling) of ``x [N, C, H, W]`` in windows of ``pool`` x ``pool``; what fills none is left out."""
    if pool == 1:
        return F.relu(x)
    plain = x.device.type != "cpu" or torch.compiler.is_compiling()
    return F.relu(F.max_pool2d(x, pool)) if plain else apply(_PoolRelu, x, pool)


def channels_last(x: Tensor) -> Tensor:
    """Return images ``[N, C, H, W]`` with the channels last in memory, and in the strides that convolutions go by.

    torch leaves images of one channel as they are, and convolves them in the slower layout.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = x.shape
    return x if channels > 1 else x.as_strided(x.shape, (height * width, 1, width, 1))


def shared_conv_pool_relu(x: Tensor, weight: Tensor, bias: Tensor, pool: int) -> Tensor:
    """Return relu(max-pooling(convolution)) of ``x [N, C, H, W]`` by each of E experts, ``[E, N, O, H', W']``.

    ``weight [E, O, C, k, k]``, ``bias [E, O]``. No gradient passes to ``x``.
    """
    return apply(_SharedConvPoolRelu, x, weight, bias, pool).permute(0, 1, 4, 2, 3)


class _PoolRelu(torch.autograd.Function):
    """The maximum in each row of a window, then over its rows: of equal ones the first counts, as in torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pool: int) -> Tensor:
        height, width = (side // pool * pool for side in x.shape[2:])
        needed = ctx.needs_input_grad[0]
        rows, in_rows = _running_maximum([x[:, :, :height, k:width:pool] for k in range(pool)], needed)
        result, over_rows = _running_maximum([rows[:, :, k::pool] for k in range(pool)], needed)
        result.relu_()
        last = x.is_contiguous(memory_format=torch.channels_last)
        ctx.shape, ctx.pool, ctx.layout = x.shape, pool, torch.channels_last if last else torch.contiguous_format
        if needed:
            ctx.save_for_backward(result, *in_rows, *over_rows)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        result, *masks = ctx.saved_tensors
        pool = ctx.pool
        height, width = (side * pool for side in result.shape[2:])
        grad_x = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=ctx.layout)
        if grad_x.shape[2] != height or grad_x.shape[3] != width:
            grad_x.zero_()
        grad = torch.ops.aten.threshold_backward(grad, result, 0)
        rows = torch.empty_like(grad_x[:, :, :height, :width:pool])
        _spread(grad, masks[pool - 1 :], [rows[:, :, k::pool] for k in range(pool)])
        _spread(rows, masks[: pool - 1], [grad_x[:, :, :height, k:width:pool] for k in range(pool)])
        return grad_x, None


class _SharedConvPoolRelu(torch.autograd.Function):
    """Multiply the patches of the images, window place by window place, so that pooling is a maximum of blocks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, pool: int) -> Tensor:
        num_experts, out, _, kernel, _ = weight.shape
        x = x.permute(0, 2, 3, 1).contiguous()
        n, height, width = len(x), *((side - kernel + 1) // pool for side in x.shape[1:3])
        matrix = _matrix(weight)  # [K, E O]
        result = x.new_empty(num_experts, n, height, width, out)
        where = torch.ones(n, height * width, num_experts * out, dtype=torch.uint8)
        ctx.geometry = kernel, pool, height, width
        for rows in _chunks(n, pool * pool * height * width * num_experts * out):
            y = product(_patches(x[rows], *ctx.geometry), matrix).view(pool * pool, -1, num_experts * out)
            place = where[rows].view(-1, num_experts * out)
            _maximum(y[0], y[1:].unbind(), place)
            y[0].add_(bias.flatten()).relu_()
            place.mul_((y[0] > 0).view(torch.uint8))
            result[:, rows] = y[0].view(-1, height, width, num_experts, out).permute(3, 0, 1, 2, 4)
        ctx.save_for_backward(x, weight, where)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, None]:
        x, weight, where = ctx.saved_tensors
        num_experts, out, channels, kernel, _ = weight.shape
        places = ctx.geometry[1] ** 2
        grad_matrix = x.new_zeros(kernel * kernel * channels, num_experts * out)
        grad_bias = x.new_zeros(1, num_experts * out)
        for rows in _chunks(len(x), places * where[0].numel()):
            g = grad[:, rows].permute(1, 2, 3, 0, 4).reshape(-1, num_experts * out)
            place = where[rows].view_as(g)
            spread = g.new_empty(places, *g.shape)
            for number in range(places):
                torch.mul(g, place == number + 1, out=spread[number])
            spread = spread.flatten(0, 1)
            grad_matrix += product(_patches(x[rows], *ctx.geometry).t(), spread)
            grad_bias.addmm_(spread.new_ones(1, len(spread)), spread)
        grad_weight = grad_matrix.view(kernel, kernel, channels, num_experts, out).permute(3, 4, 2, 0, 1)
        return None, grad_weight, grad_bias.view(num_experts, out), None


def _maximum(result: Tensor, others: Any, where: Tensor) -> None:
    """Bring ``result`` to the maximum of itself and ``others``; count in ``where``, 1 before, which of them it is."""
    for number, other in enumerate(others, start=2):
        # arithmetic on bytes: filling by a mask takes ten times as long
        torch.maximum(where, (other > result).view(torch.uint8).mul_(number), out=where)
        torch.maximum(result, other, out=result)


def _running_maximum(parts: list[Tensor], needed: bool) -> tuple[Tensor, list[Tensor]]:
    """Return the maximum of ``parts`` and, if ``needed``, for each after the first where it exceeds those before."""
    result, masks = parts[0], []
    for part in parts[1:]:
        if needed:
            masks.append((part > result).view(torch.uint8))
        result = torch.maximum(result, part)
    return result, masks


def _spread(grad: Tensor, masks: Sequence[Tensor], parts: list[Tensor]) -> None:
    """Fill the gradients of the parts of a maximum from its own: each where it was the last to exceed."""
    for place in range(len(masks), 0, -1):
        torch.mul(grad, masks[place - 1].to(grad.dtype), out=parts[place])
        grad = torch.sub(grad, parts[place], out=parts[0] if place == 1 else None)


def _patches(x: Tensor, kernel: int, pool: int, height: int, width: int) -> Tensor:
    """Return what the kernel sees of ``x [N, H, W, C]``: ``[pool pool N height width, kernel kernel C]``."""
    sample, row, pixel, _ = x.stride()
    size = (pool, pool, len(x), height, width, kernel, kernel * x.shape[3])
    stride = (row, pixel, sample, pool * row, pool * pixel, row, 1)
    return x.as_strided(size, stride, x.storage_offset()).reshape(-1, kernel * kernel * x.shape[3])


def _matrix(weight: Tensor) -> Tensor:
    """Return ``weight [E, O, C, k, k]`` as ``[k k C, E O]``."""
    return weight.permute(3, 4, 2, 0, 1).reshape(-1, weight.shape[0] * weight.shape[1])


def _chunks(n: int, numbers: int) -> Iterator[slice]:
    """Yield slices of ``n`` samples, each of which takes so many ``numbers``."""
    step = max(1, CHUNK // numbers)
    for start in range(0, n, step):
        yield slice(start, start + step)
