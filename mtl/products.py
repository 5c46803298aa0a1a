"""Multiply matrices in the way that is fastest where this runs. Nothing here is differentiated by autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

WORTHWHILE = 2**21  # multiplications; below, a call of oneDNN costs more than it gains
BLOCK = 16  # rows: oneDNN prepares code for each new size, so sizes that change in every step come in multiples of this


def _onednn() -> Any:
    """Return oneDNN's linear map, None where there is none or it gains nothing.

    torch multiplies float32 matrices with MKL, which leaves half of an AVX-512 processor idle unless Intel made it.
    """
    fits = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if fits else None
    if operator is None:
        return None
    register_flop_formula(operator)(_flops)
    return operator.default


def _flops(x_shape: Any, weight_shape: Any, *args: Any, **kwargs: Any) -> int:
    """Count for torch's counter, which does not know this operator."""
    return 2 * int(x_shape[0]) * int(x_shape[1]) * int(weight_shape[0])


_LINEAR = _onednn()


def blockwise(like: Tensor) -> bool:
    """Say whether products of tensors like this one go through oneDNN, so that numbers of rows had better be blocks."""
    fits = _LINEAR is not None and like.device.type == "cpu" and like.dtype == torch.float32
    return fits and torch.backends.mkldnn.enabled and not torch.compiler.is_compiling()


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """Return ``a [M, K] @ b [K, N] + bias [N]``, ``[M, N]``, negative numbers replaced by 0 with ``relu``."""
    if _worthwhile(a, b):
        return _call(a, b, bias, relu)
    result = torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    return result.relu_() if relu else result


def products(a: Tensor, b: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """Return ``a [E, M, K] @ b [E, K, N] + bias [E, N]``, ``[E, M, N]``, negative numbers replaced by 0 with ``relu``."""
    if len(a) and _worthwhile(a[0], b[0]):
        biases = [None] * len(a) if bias is None else bias.unbind()
        parts = zip(a.unbind(), b.unbind(), biases, strict=True)
        return torch.stack([_call(*part, relu) for part in parts])
    result = torch.bmm(a, b)
    if bias is not None:
        result.add_(bias[:, None])
    return result.relu_() if relu else result


def product_into(result: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, relu: bool = False) -> None:
    """Write into ``result [M, N]`` what ``product`` returns."""
    if _worthwhile(a, b):
        result.copy_(_call(a, b, bias, relu))
        return
    if bias is None:
        torch.mm(a, b, out=result)
    else:
        torch.addmm(bias, a, b, out=result)
    if relu:
        result.relu_()


def _worthwhile(a: Tensor, b: Tensor) -> bool:
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    return m * k * n >= WORTHWHILE and min(m, k, n) >= BLOCK and blockwise(a)


def _call(a: Tensor, b: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    if not (b.is_contiguous() or b.t().is_contiguous()):
        b = b.contiguous()  # with gaps between its rows oneDNN takes a reference loop, a thousand times slower
    result: Tensor = _LINEAR(a, b.t(), bias, "relu" if relu else "none", [], "")
    return result
