"""Compute what convolutional experts are made of on a CPU, forward and backward.

Written out since torch's convolution of few channels is far from what a matrix product reaches. It can be
differentiated once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtl.functional import apply
from mtl.products import product

CHUNK = 1 << 20  # numbers at a time: what a product writes is still in the cache when it is pooled


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


class _SharedConvPoolRelu(torch.autograd.Function):
    """Multiply the patches of the images, window place by window place, so that pooling is a maximum of blocks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, pool: int) -> Tensor:
        num_experts, out, _, kernel, _ = weight.shape
        x = x.permute(0, 2, 3, 1).contiguous()
        n, height, width = len(x), *((side - kernel + 1) // pool for side in x.shape[1:3])
        matrix = _matrix(weight)  # [K, E O]
        result = x.new_empty(num_experts, n, height, width, out)
        exceeds = torch.empty(pool * pool - 1, n, height * width, num_experts * out, dtype=torch.bool)
        ctx.geometry = kernel, pool, height, width
        for rows in _chunks(n, pool * pool * height * width * num_experts * out):
            y = product(_patches(x[rows], *ctx.geometry), matrix).view(pool * pool, -1, num_experts * out)
            highest = y[0]
            for place, other in enumerate(y[1:]):
                torch.gt(other, highest, out=exceeds[place, rows].view_as(other))
                torch.maximum(highest, other, out=highest)
            highest.add_(bias.flatten()).relu_()
            result[:, rows] = highest.view(-1, height, width, num_experts, out).permute(3, 0, 1, 2, 4)
        ctx.save_for_backward(x, weight, result, exceeds)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, None]:
        x, weight, result, exceeds = ctx.saved_tensors
        num_experts, out, channels, kernel, _ = weight.shape
        places = ctx.geometry[1] ** 2
        grad_matrix = x.new_zeros(kernel * kernel * channels, num_experts * out)
        grad_bias = x.new_zeros(num_experts * out)
        for rows in _chunks(len(x), places * exceeds.shape[2] * exceeds.shape[3]):
            g = torch.ops.aten.threshold_backward(grad[:, rows], result[:, rows], 0)
            g = g.permute(1, 2, 3, 0, 4).reshape(-1, num_experts * out)
            grad_bias += g.sum(0)
            spread = g.new_empty(places, *g.shape)
            _spread(g, exceeds[:, rows].flatten(1, 2), spread)
            grad_matrix += product(_patches(x[rows], *ctx.geometry).t(), spread.flatten(0, 1))
        grad_weight = grad_matrix.view(kernel, kernel, channels, num_experts, out).permute(3, 4, 2, 0, 1)
        return None, grad_weight, grad_bias.view(num_experts, out), None


def _spread(grad: Tensor, masks: Tensor, parts: Tensor) -> None:
    """Fill the gradients of ``parts`` of a maximum from its own ``grad``: the last part that exceeded gets it."""
    for place in range(len(masks), 0, -1):
        torch.mul(grad, masks[place - 1].to(grad.dtype), out=parts[place])
        grad = torch.sub(grad, parts[place], out=parts[0] if place == 1 else None)
    if not len(masks):
        parts[0].copy_(grad)


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
