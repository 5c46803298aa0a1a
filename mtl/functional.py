"""Compute the few functions that gates and experts share; safe at the extremes of their arguments."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ENTROPY_EPS = 1e-6  # inside the logarithm of the entropy, as in the reference implementations


def smooth_step(t: Tensor, gamma: float) -> Tensor:
    """Return S(t): 0 below -gamma/2, 1 above gamma/2, a cubic between (DSelect-k, equation 4).

    S(t) = -2 t^3 / gamma^3 + 3 t / (2 gamma) + 1/2 inside, computed as s^2 (3 - 2s) with s = t / gamma + 1/2, which
    keeps its relative precision near 0: COMET takes the logarithm. Where S is flat, also at +-gamma/2 themselves,
    its value is exactly 0 or 1 and its gradient exactly 0. 1 - S(t) is best had as S(-t).
    """
    s = (t / gamma).clamp(-0.5, 0.5) + 0.5
    return s * s * (3.0 - 2.0 * s)


def entropy(p: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """Return sum over ``dim`` of -p log(p + 1e-6), in nats; finite with finite gradient for p = 0."""
    return (-p * torch.log(p + ENTROPY_EPS)).sum(dim)


def at_least_float32(x: Tensor) -> Tensor:
    """Return ``x`` in float32 where it is narrower; float64 stays float64."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def stacked_affine(x: Tensor | None, weight: Tensor | None, bias: Tensor) -> Tensor:
    """Apply all affine maps of a gate in one matrix product.

    ``x [B, D]``, ``weight [..., D]``, ``bias [...]`` -> ``[B, ...]``. Without a weight (a static gate): the bias.
    """
    bias = at_least_float32(bias)
    if weight is None:
        return bias
    if x is None:
        raise ValueError("a per-example gate needs an input x [B, D]; build it with input_dim=None for a static one")
    weight = at_least_float32(weight)
    return F.linear(x, weight.flatten(0, -2), bias.flatten()).view(len(x), *bias.shape)


def logistic_noise(like: Tensor) -> Tensor:
    """Draw standard logistic noise, the difference of two Gumbel variables, of the shape of ``like``."""
    uniform = torch.rand_like(like)
    tiny = torch.finfo(uniform.dtype).tiny
    uniform = uniform.clamp(tiny, 1.0 - torch.finfo(uniform.dtype).eps)  # rand can return exactly 0
    return uniform.log() - torch.log1p(-uniform)


def relu_dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Return dropout(relu(x)) with drop probability ``p``.

    On a CPU one random byte decides an element (two bytes where p is no multiple of 1/256, p exact to 2^-16):
    drawing a float for each element costs as much as a network's matrix products. The kept elements are
    scaled by the inverse of the exact probability.
    """
    if not training or p == 0.0:
        return F.relu(x)
    if x.device.type != "cpu":
        return F.dropout(F.relu(x), p)
    result: Tensor = _ReluDropout.apply(x, p)  # type: ignore[no-untyped-call]
    return result


class _ReluDropout(torch.autograd.Function):
    """Fuse relu and dropout; the output alone is saved, since it is positive just where the gradient passes."""

    @staticmethod
    def forward(ctx, x: Tensor, p: float) -> Tensor:  # type: ignore[no-untyped-def]
        one_byte = (p * 256).is_integer()
        levels, dtype = (256, torch.uint8) if one_byte else (65536, torch.uint16)
        per_word = 8 if one_byte else 4
        words = torch.empty(-(-x.numel() // per_word), dtype=torch.int64).random_(-(2**63), None)  # all 64 bits
        noise = words.view(dtype)[: x.numel()].view(x.shape)
        if not one_byte:
            noise = noise.to(torch.int32)  # uint16 has no comparison
        threshold = round(p * levels)
        ctx.scale = levels / (levels - threshold) if threshold < levels else 0.0
        y = x.relu().mul_(noise >= threshold).mul_(ctx.scale)  # masked_fill_ takes four times as long
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        (y,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(grad, y, 0).mul_(ctx.scale), None
