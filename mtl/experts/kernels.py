"""Compute what a mixture layer is made of, forward and backward, each as one autograd function.

Written out since autograd's own pieces keep every intermediate, and pass through memory once for each. Each can be
differentiated once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtl.experts.pairs import Pairs
from mtl.functional import Key, apply, keep_mask, keep_scale
from mtl.products import grouped_outer, grouped_product, product, products


def mix(outputs: Tensor, weights: Tensor) -> Tensor:
    """Mix the experts' ``outputs [B, E, H]`` by ``weights [B, T, E]`` or ``[T, E]`` into ``[B, T, H]``."""
    return torch.matmul(weights.to(outputs.dtype), outputs)


def stacked_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply E affine maps, each to its own of ``x [B, E, D]``; ``weight [E, H, D]``, ``bias [E, H]``: ``[B, E, H]``."""
    x, weight, bias = _same_dtype(x, weight, bias)
    if weight.shape[1] == 1 and not torch.compiler.is_compiling():
        return apply(_OneUnit, x, weight, bias)
    return torch.baddbmm(bias[:, None], x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


def linear_relu_dropout(x: Tensor, weight: Tensor, bias: Tensor, p: float, key: Key, rows: Tensor) -> Tensor:
    """Apply E affine maps, each followed by relu and dropout with drop probability ``p``; returns ``[B, E, H]``.

    ``x [B, D]`` or ``[B, E, D]``, ``weight [E, H, D]``, ``bias [E, H]``; ``key`` and ``rows [B, E]`` choose the
    dropout mask: see ``mtl.functional.keep_mask``.
    """
    x, weight, bias = _same_dtype(x, weight, bias)
    return apply(_LinearReluDropout, x, weight, bias, p, key, rows)


def linear_relu_dropout_mix(
    x: Tensor, weight: Tensor, bias: Tensor, weights: Tensor, p: float, key: Key, rows: Tensor
) -> Tensor:
    """Return the mixture ``[B, T, H]`` of ``linear_relu_dropout`` by ``weights [B, T, E]`` or ``[T, E]``."""
    x, weight, bias, weights = _same_dtype(x, weight, bias, weights)
    return apply(_LinearReluDropoutMix, x, weight, bias, weights, p, key, rows)


def grouped_linear_relu_dropout(
    x: Tensor, weight: Tensor, bias: Tensor, counts: Sequence[int], p: float, key: Key, rows: Tensor
) -> Tensor:
    """Apply to the rows of ``x [P, D]``, sorted by expert, ``counts [E]`` rows each, the map of their expert.

    ``weight [E, H, D]``, ``bias [E, H]``; returns ``[P, H]`` after relu and dropout, for which ``rows [P]`` are the
    rows' ids. Experts without rows cost nothing and get gradient 0.
    """
    x, weight, bias = _same_dtype(x, weight, bias)
    return apply(_GroupedLinearReluDropout, x, weight, bias, list(counts), p, key, rows)


def grouped_linear_relu_dropout_mix(
    x: Tensor, weight: Tensor, bias: Tensor, weights: Tensor, pairs: Pairs, p: float, key: Key, rows: Tensor
) -> Tensor:
    """Return the mixture ``[B, T, H]`` of ``grouped_linear_relu_dropout`` on ``pairs``: see ``mix_pairs``."""
    x, weight, bias, weights = _same_dtype(x, weight, bias, weights)
    return apply(_GroupedLinearReluDropoutMix, x, weight, bias, weights, pairs, p, key, rows)


def mix_pairs(outputs: Tensor, weights: Tensor, pairs: Pairs) -> Tensor:
    """Mix the ``outputs [P, H]`` of ``pairs`` by the ``weights [B, T, E]`` they were made of into ``[B, T, H]``.

    The weights that are 0 get no gradient.
    """
    return apply(_MixPairs, outputs, weights.to(outputs.dtype), pairs)


class _OneUnit(torch.autograd.Function):
    """Maps to one number each: as matrix products of one column, their gradients take twice as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.baddbmm(bias[:, None], x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad_x = (grad.transpose(0, 1) * weight).transpose(0, 1) if ctx.needs_input_grad[0] else None
        return grad_x, (x * grad).sum(0)[:, None], grad.sum(0)


class _LinearReluDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, p: float, key: Key, rows: Tensor) -> Tensor:
        h, ctx.scale = _forward(x, weight, bias, p, key, rows)
        if p > 0:
            h.mul_(ctx.scale)
        ctx.save_for_backward(x, weight, h)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, h = ctx.saved_tensors
        grad_h = torch.ops.aten.threshold_backward(grad, h, 0)
        if ctx.scale != 1.0:
            grad_h.mul_(ctx.scale)
        return *_backward(grad_h, x, weight, ctx.needs_input_grad[0]), None, None, None


class _LinearReluDropoutMix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, weights: Tensor, p: float, key: Key, rows: Tensor
    ) -> Tensor:
        h, ctx.scale = _forward(x, weight, bias, p, key, rows)
        scaled = weights * ctx.scale  # cheaper than to scale every unit
        ctx.save_for_backward(x, weight, h, scaled)
        return torch.matmul(scaled, h)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, h, scaled = ctx.saved_tensors
        grad_weights = None
        if ctx.needs_input_grad[3]:
            grad_weights = torch.matmul(grad, h.transpose(1, 2)).mul_(ctx.scale)  # [B, T, E]
            grad_weights = grad_weights.sum(0) if scaled.dim() == 2 else grad_weights
        across = scaled.transpose(-1, -2)
        if h.is_contiguous() or torch.compiler.is_compiling():
            grad_h = torch.matmul(across, grad)  # [B, E, H]
        else:  # expert by expert in memory, as h, for the products to come
            grad_h = torch.bmm(across.expand(len(grad), -1, -1), grad, out=torch.empty_like(h))
        # A unit is positive just where relu and dropout let the gradient pass
        grad_h = torch.ops.aten.threshold_backward.grad_input(grad_h, h, 0, grad_input=grad_h)
        return *_backward(grad_h, x, weight, ctx.needs_input_grad[0]), grad_weights, None, None, None


class _GroupedLinearReluDropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, counts: list[int], p: float, key: Key, rows: Tensor
    ) -> Tensor:
        h, ctx.scale = _grouped_forward(x, weight, bias, counts, p, key, rows)
        if p > 0:
            h.mul_(ctx.scale)
        ctx.save_for_backward(x, weight, h)
        ctx.counts = counts
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, h = ctx.saved_tensors
        grad_h = torch.ops.aten.threshold_backward(grad.contiguous(), h, 0)
        if ctx.scale != 1.0:
            grad_h.mul_(ctx.scale)
        return *_grouped_backward(grad_h, x, weight, ctx.counts, ctx.needs_input_grad[0]), None, None, None, None


class _GroupedLinearReluDropoutMix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        weights: Tensor,
        pairs: Pairs,
        p: float,
        key: Key,
        rows: Tensor,
    ) -> Tensor:
        h, ctx.scale = _grouped_forward(x, weight, bias, pairs.counts, p, key, rows)
        ctx.save_for_backward(x, weight, h, weights)
        ctx.pairs = pairs
        return _mix_pairs(h, weights, pairs, ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, h, weights = ctx.saved_tensors
        grad_h, grad_weights = _unmix_pairs(grad, h, weights, ctx.pairs, ctx.scale, ctx.needs_input_grad[3])
        # A unit is positive just where relu and dropout let the gradient pass
        torch.ops.aten.threshold_backward.grad_input(grad_h, h, 0, grad_input=grad_h)
        grads = _grouped_backward(grad_h, x, weight, ctx.pairs.counts, ctx.needs_input_grad[0])
        return *grads, grad_weights, None, None, None, None


class _MixPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weights: Tensor, pairs: Pairs) -> Tensor:
        ctx.save_for_backward(outputs, weights)
        ctx.pairs = pairs
        return _mix_pairs(outputs, weights, pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        outputs, weights = ctx.saved_tensors
        return *_unmix_pairs(grad, outputs, weights, ctx.pairs, 1.0, ctx.needs_input_grad[1]), None


def _mix_pairs(outputs: Tensor, weights: Tensor, pairs: Pairs, scale: float = 1.0) -> Tensor:
    """Return the mixture ``[B, T, H]``, times ``scale``; in memory it lies task by task."""
    entries = pairs.by_output
    num_samples, num_tasks, _ = weights.shape
    chosen = entries.weights(weights)
    mixed = entries.sum(outputs, chosen if scale == 1.0 else chosen.mul_(scale))
    return mixed.view(num_tasks, num_samples, outputs.shape[1]).transpose(0, 1)


def _unmix_pairs(
    grad: Tensor, outputs: Tensor, weights: Tensor, pairs: Pairs, scale: float, needs_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of ``outputs`` and ``weights`` from that of the mixture ``[B, T, H]``."""
    entries, grad_weights = pairs.by_pair, None
    grad = grad.transpose(0, 1).flatten(0, 1)  # [T B, H]
    if needs_weights:
        grad_weights = torch.zeros_like(weights)
        products = entries.dots(grad, outputs).mul_(scale)
        grad_weights[entries.sample, entries.task, entries.expert] = products
    return entries.sum(grad, entries.weights(weights).mul_(scale)), grad_weights


def _grouped_forward(
    x: Tensor, weight: Tensor, bias: Tensor, counts: list[int], p: float, key: Key, rows: Tensor
) -> tuple[Tensor, float]:
    """Return relu of the maps, units dropped, ``[P, H]``, and by what those kept are still to be multiplied."""
    h = grouped_product(x, weight.transpose(1, 2), counts, bias, relu=True)
    if p > 0:
        h.mul_(keep_mask(key, rows, h.shape[1], p, h.dtype))
        return h, keep_scale(p)
    return h, 1.0


def _grouped_backward(
    grad: Tensor, x: Tensor, weight: Tensor, counts: list[int], needs_x: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of x, weight and bias from ``grad [P, H]`` of the affine maps."""
    by_output = weight.is_contiguous()  # or by input: see StackedLinear
    grad_weight = grouped_outer(grad, x, counts) if by_output else grouped_outer(x, grad, counts).transpose(1, 2)
    grad_x = grouped_product(grad, weight, counts) if needs_x else None
    starts = torch.tensor([0, *counts[:-1]], device=x.device).cumsum(0)
    grad_bias = torch.embedding_bag(grad, torch.arange(len(grad), device=x.device), starts, mode=0)[0]
    return grad_x, grad_weight, grad_bias


def _forward(x: Tensor, weight: Tensor, bias: Tensor, p: float, key: Key, rows: Tensor) -> tuple[Tensor, float]:
    """Return relu of the maps, units dropped, ``[B, E, H]``, and by what those kept are still to be multiplied."""
    num_experts, width, _ = weight.shape
    one_matrix = x.dim() == 2 and weight.is_contiguous()
    if one_matrix:
        h = product(x, weight.flatten(0, 1).t(), bias.flatten(), relu=True).view(len(x), num_experts, width)
    else:
        h = products(_by_expert(x, num_experts), weight.transpose(1, 2), bias, relu=True).transpose(0, 1)
    if p > 0:
        by_expert = not one_matrix  # so h lies in memory
        mask = keep_mask(key, (rows.t() if by_expert else rows).flatten(), width, p, h.dtype)
        h.mul_(mask.view(num_experts, len(x), width).transpose(0, 1) if by_expert else mask.view_as(h))
        return h, keep_scale(p)
    return h, 1.0


def _backward(grad: Tensor, x: Tensor, weight: Tensor, needs_x: bool) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of x, weight and bias from ``grad [B, E, H]`` of the affine maps."""
    if x.dim() == 2 and weight.is_contiguous():
        flat = grad.flatten(1)  # what comes from another layer may lie expert by expert
        grad_weight = product(flat.t(), x).view_as(weight)
        return product(flat, weight.flatten(0, 1)) if needs_x else None, grad_weight, grad.sum(0)
    by_expert, inputs = grad.transpose(0, 1), _by_expert(x, len(weight))  # [E, B, H], [E, B, D]
    if weight.is_contiguous():
        grad_weight = products(by_expert.transpose(1, 2), inputs)
    else:
        grad_weight = products(inputs.transpose(1, 2), by_expert).transpose(1, 2)
    grad_x: Tensor | None = None
    if needs_x and x.dim() == 3:
        grad_x = products(by_expert, weight).transpose(0, 1)
    elif needs_x:
        grad_x = torch.zeros_like(x)
        for one, matrix in zip(by_expert.unbind(), weight.unbind(), strict=True):
            grad_x += product(one, matrix)
    return grad_x, grad_weight, grad.sum(0)


def _by_expert(x: Tensor, num_experts: int) -> Tensor:
    """Return ``x [B, E, D]``, or ``[B, D]`` for all, as ``[E, B, D]``."""
    return x.transpose(0, 1) if x.dim() == 3 else x.expand(num_experts, -1, -1)


def _same_dtype(x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Bring all to the type that autocast asks for, or else to that of the second, the parameter."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else others[0].dtype
    return tuple(tensor.to(dtype) for tensor in (x, *others))
