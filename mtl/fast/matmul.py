"""Matrix products and transposes in the way that is fastest on this processor. Autograd does not see these functions.

torch multiplies float32 matrices with MKL, which leaves half of an AVX-512 processor idle unless Intel made it;
oneDNN's linear map uses all of it. On Intel's processors MKL is the faster one. Where oneDNN is not available or gains
nothing, every product is torch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtl import compat

MIN_MULTIPLICATIONS = 2**21  # of a product; below, a call of oneDNN costs more than it gains
MIN_SIZE = 16  # of each side of such a product
BLOCK_ROWS = 64  # of a large matrix, transposed as one block
BLOCK_NUMBERS = 2**22  # transposed at a time, which bounds the memory for intermediate results


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call an autograd function."""
    return function.apply(*args)  # type: ignore[no-untyped-call]  # torch declares no types for it


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse to run ``backward`` where its result is to be differentiated, as under ``create_graph=True``.

    torch's decorator of this name lets a gradient pass whose outer gradient is a constant, such as that of a sum: its
    derivative would be wrong without an error.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: the fast functions have no second derivative; the plain ones have: set fast=false, "
                "or call mtl.fast.enable(False)"
            )
        return backward(ctx, *grads)

    return checked


@cache
def linear_operator() -> Any:
    """Return oneDNN's linear map ``(x, weight, bias, "relu" | "none", [], "")``, or None where it gains nothing."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch declares no types for it
    gains = torch.backends.cpu.get_cpu_capability() == "AVX512" and not _is_intel()
    return compat.lookup("torch.ops.mkldnn._linear_pointwise") if available and gains else None


def _is_intel() -> bool:
    """Say whether Intel made the processor; False where Linux does not tell."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def onednn_multiplies(x: Tensor) -> bool:
    """Say whether large products of tensors like ``x`` go through oneDNN."""
    return x.dtype == torch.float32 and linear_operator() is not None and bool(torch.backends.mkldnn.enabled)


def round_up(rows: list[int]) -> list[int]:
    """Round row counts up by at most 1/16, so that oneDNN reuses compiled kernels.

    It compiles a kernel for each new size, in 0.3 ms. Rounded, there are 16 sizes between a power of two and the next.
    """
    if max(rows, default=0) <= 32:
        return rows
    steps = [1 << max(0, (count - 1).bit_length() - 5) for count in rows]
    return [-(-count // step) * step for count, step in zip(rows, steps, strict=True)]


# Transposing


def transposed(x: Tensor) -> Tensor:
    """Return ``x [M, N]`` or ``[P, M, N]`` as ``[N, M]`` or ``[P, N, M]``, contiguous.

    This takes a third to a half of the time of torch's copy for a large matrix, a seventh for many small ones: to
    shuffle the channels of a pixel is to transpose a matrix, and with channels last in memory torch shuffles several
    pixels at once with vector instructions.
    """
    if not x.is_floating_point() or not x.numel() or compat.lookup("torch.native_channel_shuffle") is None:
        return x.transpose(-1, -2).contiguous()
    x = x.contiguous()
    if x.dim() == 3:
        return _shuffled(x, *x.shape).view(len(x), x.shape[2], x.shape[1])
    rows, columns = x.shape
    if rows % 256 or x.numel() <= 2**16:
        return _shuffled(x, 1, rows, columns).view(columns, rows)
    # Columns that are a power of two apart in memory share few lines of the cache: transpose a block of rows at a time
    result, blocks = x.new_empty(columns, rows), x.view(-1, BLOCK_ROWS, columns)
    targets = result.view(columns, -1, BLOCK_ROWS).transpose(0, 1)
    step = max(2, BLOCK_NUMBERS // (BLOCK_ROWS * columns))
    for start in range(0, len(blocks), step):
        some = blocks[start : start + step]
        targets[start : start + step] = _shuffled(some, *some.shape).view(len(some), columns, BLOCK_ROWS)
    return result


def _shuffled(x: Tensor, pixels: int, rows: int, columns: int) -> Tensor:
    """Return contiguous ``x``, ``pixels`` matrices, each transposed in memory: ``[pixels, rows columns, 1, 1]``."""
    channels = rows * columns
    last = x.as_strided((pixels, channels, 1, 1), (channels, 1, channels, channels))  # channels last in memory
    result: Tensor = compat.lookup("torch.native_channel_shuffle")(last, rows)
    return result


# Products of two matrices, or of two stacks of them


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """Return ``a [M, K] @ b [K, N] + bias [N]``, ``[M, N]``; with ``relu`` its positive part."""
    if onednn_multiplies(a) and is_large(len(a), a.shape[1], b.shape[1]):
        return _onednn_product(a, b.t(), bias, relu)
    result = torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    return result.relu_() if relu else result


def products(a: Tensor, b: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """Return ``a [E, M, K] @ b [E, K, N] + bias [E, N]``, ``[E, M, N]``; with ``relu`` its positive part."""
    if len(a) and onednn_multiplies(a) and is_large(a.shape[1], a.shape[2], b.shape[2]):
        result = a.new_empty(len(a), a.shape[1], b.shape[2])
        operands = zip(a.unbind(), b.transpose(1, 2).unbind(), rows_or_none(bias, len(a)), strict=True)
        for target, (one, other, offset) in zip(result.unbind(), operands, strict=True):
            target.copy_(_onednn_product(one, other, offset, relu))
        return result
    result = torch.bmm(a, b)
    if bias is not None:
        result.add_(bias[:, None])
    return result.relu_() if relu else result


def is_large(m: int, k: int, n: int) -> bool:
    """Say whether a product ``[m, k] @ [k, n]`` is worth a call of oneDNN."""
    return m * k * n >= MIN_MULTIPLICATIONS and min(m, k, n) >= MIN_SIZE


def _onednn_product(a: Tensor, b: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """Return ``a [M, K] @ b.T`` with ``b [N, K]``."""
    (m, k), n = a.shape, b.shape[0]
    if not a.is_contiguous():  # oneDNN would copy it, and take longer for that
        if bias is None and m * n + k * n < m * k:  # the transposed product copies less
            return transposed(_onednn_product(b, a, None, relu))
        a = transposed(a.t()) if a.stride(0) == 1 else a.contiguous()
    if not (b.is_contiguous() or b.stride() == (1, n)):
        b = b.contiguous()  # with gaps between its rows, oneDNN takes a reference loop that is a thousand times slower
    result: Tensor = linear_operator()(a, b, bias, "relu" if relu else "none", [], "")
    return result


def rows_or_none(bias: Tensor | None, number: int) -> Sequence[Tensor | None]:
    """Return the rows of ``bias [E, N]``, or ``number`` times None."""
    return [None] * number if bias is None else bias.unbind()


# The fast version of a plain function


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The fast version of ``mtl.linear.affine``: ``x [B, D]``, ``weight [..., D]``, ``bias [...]``."""
    y: Tensor = apply(_Affine, x, weight.flatten(0, -2), bias.flatten())
    return y.view(len(x), *bias.shape)


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight.t(), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad_x = product(grad, weight) if ctx.needs_input_grad[0] else None
        return grad_x, product(grad.t(), x), grad.sum(0)
