"""Compute the few functions that gates and experts share; safe at the extremes of their arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtl.products import onednn_multiplies, product, transposed

Key = int | Tensor  # of a dropout mask: a number of 62 bits, a tensor [] of it while torch compiles
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


def apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """Call an autograd function that returns one tensor."""
    [result] = apply_many(function, *args)
    return result


def apply_many(function: type[torch.autograd.Function], *args: Any) -> tuple[Tensor, ...]:
    """Call an autograd function; return its tensors."""
    results: Any = function.apply(*args)  # type: ignore[no-untyped-call]  # torch declares no types for it
    return results if isinstance(results, tuple) else (results,)


def at_least_float32(x: Tensor) -> Tensor:
    """Return ``x`` in float32 where it is narrower; float64 stays float64."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def stacked_affine(x: Tensor | None, weight: Tensor | None, bias: Tensor, samples_last: bool = False) -> Tensor:
    """Apply all affine maps of a gate in one matrix product.

    ``x [B, D]``, ``weight [..., D]``, ``bias [...]`` -> ``[B, ...]``. Without a weight (a static gate): the bias.
    With ``samples_last``: ``[..., B]``, B = 1 without a weight.
    """
    bias = at_least_float32(bias)
    if weight is None:
        return bias[..., None] if samples_last else bias
    if x is None:
        raise ValueError("a per-example gate needs an input x [B, D]; build it with input_dim=None for a static one")
    weight, shape = at_least_float32(weight).flatten(0, -2), bias.shape
    if onednn_multiplies(x):
        y = apply(_Affine, x, weight, bias.flatten(), samples_last)
    elif samples_last:
        y = torch.addmm(bias.flatten()[:, None], weight, x.t())
    else:
        y = F.linear(x, weight, bias.flatten())
    return y.view(*shape, len(x)) if samples_last else y.view(len(x), *shape)


class _Affine(torch.autograd.Function):
    """The affine map by ``mtl.products``, ``[B, N]`` or, ``samples_last``, ``[N, B]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, samples_last: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.samples_last = samples_last
        return product(weight, x.t()).add_(bias[:, None]) if samples_last else product(x, weight.t(), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = grad if ctx.samples_last else grad.t()  # [N, B]
        grad_x = product(grad.t(), weight) if ctx.needs_input_grad[0] else None
        return grad_x, product(grad, x), grad.sum(1), None


def samples_first(x: Tensor) -> Tensor:
    """Return ``x [T, E, B]`` as ``[B, T, E]``; in memory it lies task by task."""
    return apply(_SamplesFirst, x)


class _SamplesFirst(torch.autograd.Function):
    """Transpose by ``mtl.products``, which is faster than a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return transposed(x).transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if grad.is_contiguous():  # that of a dense mixture; others lie task by task, as the weights do
            return transposed(grad.flatten(1)).view(*grad.shape[1:], len(grad))
        return transposed(grad.transpose(0, 1))


def logistic_noise(like: Tensor) -> Tensor:
    """Draw standard logistic noise, the difference of two Gumbel variables, of the shape of ``like``."""
    uniform = torch.rand_like(like)
    tiny = torch.finfo(uniform.dtype).tiny
    uniform = uniform.clamp(tiny, 1.0 - torch.finfo(uniform.dtype).eps)  # rand can return exactly 0
    return uniform.log() - torch.log1p(-uniform)


def draw_key() -> Key:
    """Draw the key of one dropout mask from torch's generator: the same seed gives the same masks, on any device."""
    key = torch.randint(2**62, (), device="cpu")
    return key if torch.compiler.is_compiling() else int(key)  # compiled code cannot look at a number it has drawn


def keep_scale(p: float) -> float:
    """Return 1 / (probability to keep an element), the factor of kept elements; 0 where none is kept."""
    levels, threshold = _levels(p)
    return levels / (levels - threshold) if threshold < levels else 0.0


def keep_mask(key: Key, rows: Tensor, width: int, p: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a dropout mask ``[N, width]``: 1 where an element is kept, else 0.

    Row n of the mask is a function of ``key`` and the id ``rows[n]`` (int64) alone: whoever computes only some of
    the rows gets the same mask for them. A 64-bit hash (splitmix64: Steele et al. 2014) decides 64 elements with a bit
    each where ``p`` is 1/2, else eight with a byte each, or four with two bytes where ``p`` is no multiple of 1/256;
    p is exact to 2^-16. Drawing a float per element instead would cost as much as a network's matrix products.
    """
    levels, threshold = _levels(p)
    halves = 2 * threshold == levels
    words = -(-width // (64 if halves else 8 if levels == 256 else 4))
    z = (rows[:, None] * words + torch.arange(words, device=rows.device)).mul_(_GOLDEN).add_(key)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, None)):
        z.bitwise_xor_((z >> shift).bitwise_and_((1 << (64 - shift)) - 1))  # int64 shifts in copies of the sign
        if factor is not None:
            z.mul_(factor)
    if halves:
        numbers = torch.arange(256, device=rows.device)
        bits = (numbers[:, None] >> numbers[:8] & 1).to(dtype)  # [256, 8]: those of each byte
        return bits.index_select(0, z.view(torch.uint8).flatten().int()).view(len(z), 64 * words)[:, :width]
    # noise >= threshold as integer arithmetic, which the CPU does for many elements at once: a comparison it does not
    if levels == 256:
        noise = z.view(torch.uint8).to(torch.int16).add_(levels - threshold) >> 8
    else:
        noise = (z.view(torch.int16).to(torch.int32).bitwise_and_(levels - 1)).add_(levels - threshold) >> 16
    return noise[:, :width].to(dtype)


def _levels(p: float) -> tuple[int, int]:
    """Return of how many equally likely noise values how many drop an element."""
    levels = 256 if (p * 256).is_integer() else 65536
    return levels, round(p * levels)


def _signed(value: int) -> int:
    """Return the int64 of the same 64 bits."""
    return value - 2**64 if value >= 2**63 else value


_GOLDEN, _MIX_1, _MIX_2 = (_signed(v) for v in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
