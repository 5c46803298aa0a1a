"""Compute what a mixture layer is made of, forward and backward, each as one autograd function.

Written out since autograd's own pieces keep every intermediate, and pass through memory once for each. Each can be
differentiated once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtl.experts.pairs import Pairs
from mtl.functional import apply, keep_mask, keep_scale


def mix(outputs: Tensor, weights: Tensor) -> Tensor:
    """Mix the experts' ``outputs [B, E, H]`` by ``weights [B, T, E]`` or ``[T, E]`` into ``[B, T, H]``."""
    return torch.matmul(weights.to(outputs.dtype), outputs)


def linear_relu_dropout_mix(
    x: Tensor, weight: Tensor, bias: Tensor, weights: Tensor, p: float, key: int, rows: Tensor
) -> Tensor:
    """Return the mixture ``[B, T, H]`` of E affine maps, each followed by relu and dropout.

    ``x [B, D]`` or ``[B, E, D]``, ``weight [E, H, D]``, ``bias [E, H]``, ``weights [B, T, E]`` or ``[T, E]``;
    ``key`` and ``rows [B, E]`` choose the dropout mask: see ``mtl.functional.keep_mask``.
    """
    x, weight, bias, weights = _same_dtype(x, weight, bias, weights)
    return apply(_LinearReluDropoutMix, x, weight, bias, weights, p, key, rows)


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor, counts: Sequence[int]) -> Tensor:
    """Apply to the rows of ``x [P, D]``, sorted by expert, ``counts [E]`` rows each, the map of their expert.

    ``weight [E, H, D]``, ``bias [E, H]``; returns ``[P, H]``. Experts without rows cost nothing and get gradient 0.
    """
    x, weight, bias = _same_dtype(x, weight, bias)
    return apply(_GroupedLinear, x, weight, bias, list(counts))


def mix_pairs(outputs: Tensor, weights: Tensor, pairs: Pairs) -> Tensor:
    """Mix the ``outputs [P, H]`` of ``pairs`` by the ``weights [B, T, E]`` they were made of into ``[B, T, H]``.

    The weights that are 0 get no gradient.
    """
    return apply(_MixPairs, outputs, weights.to(outputs.dtype), pairs)


class _LinearReluDropoutMix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, weights: Tensor, p: float, key: int, rows: Tensor
    ) -> Tensor:
        num_experts, width, _ = weight.shape
        if x.dim() == 2:
            h = F.linear(x, weight.flatten(0, 1), bias.flatten()).view(len(x), num_experts, width)
        else:
            h = torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).add_(bias[:, None]).transpose(0, 1)
        h.relu_()
        ctx.scale = 1.0
        if p > 0:
            ctx.scale = keep_scale(p)
            h.mul_(keep_mask(key, rows.flatten(), width, p, h.dtype).view(len(x), num_experts, width))
        scaled = weights * ctx.scale  # cheaper than to scale every unit
        ctx.save_for_backward(x, weight, h, scaled)
        return torch.matmul(scaled, h)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, h, scaled = ctx.saved_tensors
        num_samples, units = len(h), weight.shape[0] * weight.shape[1]
        grad_weights = grad_x = None
        if ctx.needs_input_grad[3]:
            grad_weights = torch.matmul(grad, h.transpose(1, 2)).mul_(ctx.scale)  # [B, T, E]
            grad_weights = grad_weights.sum(0) if scaled.dim() == 2 else grad_weights
        # A unit is positive just where relu and dropout let the gradient pass
        grad_h = torch.matmul(scaled.transpose(-1, -2), grad)  # [B, E, H]
        grad_h = torch.ops.aten.threshold_backward.grad_input(grad_h, h, 0, grad_input=grad_h)
        grad_bias = grad_h.sum(0)
        if x.dim() == 2:
            flat = grad_h.view(num_samples, units)
            grad_weight = torch.mm(flat.t(), x).view_as(weight)
            grad_x = torch.mm(flat, weight.flatten(0, 1)) if ctx.needs_input_grad[0] else None
        else:
            by_expert = grad_h.transpose(0, 1)  # [E, B, H]
            grad_weight = torch.bmm(by_expert.transpose(1, 2), x.transpose(0, 1))
            grad_x = torch.bmm(by_expert, weight).transpose(0, 1) if ctx.needs_input_grad[0] else None
        return grad_x, grad_weight, grad_bias, grad_weights, None, None, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        result = x.new_empty(len(x), weight.shape[1])
        for rows, expert in _segments(counts):
            torch.addmm(bias[expert], x[rows], weight[expert].t(), out=result[rows])
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_weight, grad_bias = torch.zeros_like(weight), weight.new_zeros(weight.shape[:2])
        for rows, expert in _segments(ctx.counts):
            torch.mm(grad[rows].t(), x[rows], out=grad_weight[expert])
            torch.sum(grad[rows], 0, out=grad_bias[expert])
            if grad_x is not None:
                torch.mm(grad[rows], weight[expert], out=grad_x[rows])
        return grad_x, grad_weight, grad_bias, None


class _MixPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weights: Tensor, pairs: Pairs) -> Tensor:
        ctx.save_for_backward(outputs, weights)
        ctx.pairs = pairs
        entries = pairs.by_output
        return entries.sum(outputs, entries.weights(weights)).view(*weights.shape[:2], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        outputs, weights = ctx.saved_tensors
        entries = ctx.pairs.by_pair
        grad = grad.flatten(0, 1)  # [B T, H]
        grad_outputs = entries.sum(grad.contiguous(), entries.weights(weights))
        grad_weights = None
        if ctx.needs_input_grad[1]:
            products = (grad.index_select(0, entries.source) * outputs.index_select(0, entries.target)).sum(-1)
            grad_weights = torch.zeros_like(weights)
            grad_weights[entries.sample, entries.task, entries.expert] = products
        return grad_outputs, grad_weights, None


def _segments(counts: Sequence[int]) -> list[tuple[slice, int]]:
    """Return the rows of each expert that has any."""
    segments, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            segments.append((slice(start, start + count), expert))
        start += count
    return segments


def _same_dtype(x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Bring all to the type that autocast asks for, or else to that of the second, the parameter."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else others[0].dtype
    return tuple(tensor.to(dtype) for tensor in (x, *others))
