"""Convolutional experts on a CPU.

The first layer, whose input all experts share, is one product of patches for all experts; later layers are convolved
expert by expert with the channels last in memory. ``benchmarks/conv.py`` compares other ways. torch's convolution of
few channels is far from the speed of a matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtl.dropout import Masks
from mtl.fast import experts as dense
from mtl.fast.matmul import apply, once_differentiable, onednn_multiplies, product

if TYPE_CHECKING:  # at run time the arrow points the other way
    from mtl.experts.conv import Kernel, StackedConv
    from mtl.experts.pairs import Pairs

Subset = Sequence[int] | None
CHUNK = 1 << 20  # numbers at a time: what a product writes is still in the cache when it is pooled


def outputs(experts: StackedConv, /, x: Tensor, subset: Subset = None, masks: Masks | None = None) -> Tensor:
    """The fast version of ``StackedConv.outputs``."""
    return dense.outputs(experts.dense, _features(experts, x, subset), subset, masks)


def mixture(
    experts: StackedConv, /, x: Tensor, weights: Tensor, subset: Subset = None, masks: Masks | None = None
) -> Tensor:
    """The fast version of ``StackedConv.mixture``."""
    return dense.mixture(experts.dense, _features(experts, x, subset), weights, subset, masks)


def pairs_mixture(
    experts: StackedConv, /, x: Tensor, weights: Tensor, pairs: Pairs, masks: Masks | None = None
) -> Tensor:
    """The fast version of ``StackedConv.pairs_mixture``."""
    layout, kernels = dense.PairsLayout(pairs, onednn_multiplies(x)), experts.kernels()
    x = x.permute(0, 2, 3, 1).contiguous()  # channels last, also after indexing
    images = [x.index_select(0, rows).permute(0, 3, 1, 2) for rows in torch.split(layout.sample, layout.counts)]
    parts = [_convolve(experts, some, kernels[expert], 0) for expert, some in enumerate(images)]
    return dense.gathered_mixture(experts.dense, torch.cat(parts), weights, layout, masks)


def _features(experts: StackedConv, x: Tensor, subset: Subset) -> Tensor:
    """Return ``StackedConv.features``."""
    chosen, kernels = range(experts.num_experts) if subset is None else subset, experts.kernels()
    if not len(chosen):
        return x.new_zeros(len(x), 0, experts.dense.input_dim)
    # The product below passes no gradient to the images, and needs a first convolution
    if x.requires_grad or not experts.pools or x.dtype != experts.weights[0].dtype:
        x = channels_last(x)
        return torch.stack([_convolve(experts, x, kernels[e], 0) for e in chosen]).transpose(0, 1)
    weight, bias = experts.weights[0], experts.biases[0]
    if subset is not None:
        weight, bias = weight[list(subset)], bias[list(subset)]
    x = F.pad(x, [experts.paddings[0]] * 4) if experts.paddings[0] else x
    first = shared_conv_pool_relu(x, weight, bias, experts.pools[0])  # [E, B, O, H', W']
    parts = [_convolve(experts, h, kernels[e], 1) for e, h in zip(chosen, first.unbind(), strict=True)]
    return torch.stack(parts).transpose(0, 1)


def _convolve(experts: StackedConv, x: Tensor, kernels: Sequence[Kernel], first: int) -> Tensor:
    """Return ``StackedConv.convolve``, adding the bias after pooling, where it is fewer numbers."""
    layers = list(zip(kernels, experts.pools, experts.paddings, strict=True))
    for (weight, bias), pool, padding in layers[first:]:
        x = F.conv2d(x.to(weight.dtype), weight, padding=padding)
        x = (F.max_pool2d(x, pool) if pool > 1 else x).add_(bias[:, None, None]).relu_()
    return x.flatten(1)


def channels_last(x: Tensor) -> Tensor:
    """Return images ``[N, C, H, W]`` with the channels last in memory, and strides that say so.

    torch leaves the strides of images of one channel as they are, and convolves them in the slower layout.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = x.shape
    return x if channels > 1 else x.as_strided(x.shape, (height * width, 1, width, 1))


def shared_conv_pool_relu(x: Tensor, weight: Tensor, bias: Tensor, pool: int) -> Tensor:
    """Return relu(max-pooling(convolution)) of ``x [N, C, H, W]`` by each of E experts, ``[E, N, O, H', W']``.

    ``weight [E, O, C, k, k]``, ``bias [E, O]``. No gradient passes to ``x``.
    """
    result: Tensor = apply(_SharedConvPoolRelu, x, weight, bias, pool)
    return result.permute(0, 1, 4, 2, 3)


class _SharedConvPoolRelu(torch.autograd.Function):
    """Multiply patches, one position of the pooling window after the other: pooling is then a maximum of blocks."""

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
            for position, other in enumerate(y[1:]):
                torch.gt(other, highest, out=exceeds[position, rows].view_as(other))
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
        positions = ctx.geometry[1] ** 2
        grad_matrix = x.new_zeros(kernel * kernel * channels, num_experts * out)
        grad_bias = x.new_zeros(num_experts * out)
        for rows in _chunks(len(x), positions * exceeds.shape[2] * exceeds.shape[3]):
            g = dense.relu_backward(grad[:, rows], result[:, rows])
            g = g.permute(1, 2, 3, 0, 4).reshape(-1, num_experts * out)
            grad_bias += g.sum(0)
            spread = g.new_empty(positions, *g.shape)
            _spread(g, exceeds[:, rows].flatten(1, 2), spread)
            grad_matrix += product(_patches(x[rows], *ctx.geometry).t(), spread.flatten(0, 1))
        grad_weight = grad_matrix.view(kernel, kernel, channels, num_experts, out).permute(3, 4, 2, 0, 1)
        return None, grad_weight, grad_bias.view(num_experts, out), None


def _spread(grad: Tensor, masks: Tensor, parts: Tensor) -> None:
    """Fill ``parts``, the gradients of each argument of a maximum, from its own ``grad``.

    ``masks[n]``: where argument n + 1 exceeded all before it. The last argument that did so gets the gradient.
    """
    for index in range(len(masks), 0, -1):
        torch.mul(grad, masks[index - 1].to(grad.dtype), out=parts[index])
        grad = torch.sub(grad, parts[index], out=parts[0] if index == 1 else None)
    if not len(masks):
        parts[0].copy_(grad)


def _patches(x: Tensor, kernel: int, pool: int, height: int, width: int) -> Tensor:
    """Return the patches of ``x [N, H, W, C]`` under the kernel: ``[pool pool N height width, kernel kernel C]``."""
    sample, row, pixel, _ = x.stride()
    size = (pool, pool, len(x), height, width, kernel, kernel * x.shape[3])
    stride = (row, pixel, sample, pool * row, pool * pixel, row, 1)
    return x.as_strided(size, stride, x.storage_offset()).reshape(-1, kernel * kernel * x.shape[3])


def _matrix(weight: Tensor) -> Tensor:
    """Return ``weight [E, O, C, k, k]`` as ``[k k C, E O]``."""
    return weight.permute(3, 4, 2, 0, 1).reshape(-1, weight.shape[0] * weight.shape[1])


def _chunks(n: int, numbers: int) -> Iterator[slice]:
    """Yield slices of ``n`` samples, of which each takes ``numbers`` numbers, so that a slice takes about CHUNK."""
    step = max(1, CHUNK // numbers)
    for start in range(0, n, step):
        yield slice(start, start + step)
