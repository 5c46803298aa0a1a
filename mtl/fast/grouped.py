"""Products of rows that are sorted by group, each group with a matrix of its own. Autograd does not see them.

Large groups are multiplied one after the other, many small ones together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtl.fast.matmul import (
    MIN_MULTIPLICATIONS,
    apply,
    is_large,
    linear_operator,
    once_differentiable,
    onednn_multiplies,
    rows_or_none,
    transposed,
)

NARROW = 8  # columns; up to here MKL is faster with the operands swapped and transposed
MANY_GROUPS = 32  # from here on one call for all groups beats one call for each
FEW_ROWS = 64  # a group; up to here its product may be computed as sums of its matrix's rows


def grouped_product(
    a: Tensor, b: Tensor, counts: list[int], bias: Tensor | None = None, relu: bool = False, variant: str | None = None
) -> Tensor:
    """Multiply the rows of ``a [P, K]``, sorted by group with ``counts [E]`` rows each, by the matrix of their group.

    ``b [E, K, N]``, ``bias [E, N]``; returns ``[P, N]``, with ``relu`` its positive part. ``variant``: see
    ``choose_variant``, which chooses one if it is None.
    """
    variant = variant or choose_variant(a, b.shape[2], counts, b.is_contiguous())
    if variant == "segments":
        result, matrices = a.new_empty(len(a), b.shape[2]), b.transpose(1, 2)
        if not (matrices.is_contiguous() or b.is_contiguous()):
            matrices = matrices.contiguous()
        large = _large_groups(a, b.shape[2], counts)
        parts = torch.split(a.contiguous(), counts)
        biases = rows_or_none(bias, len(counts))
        _multiply_each(torch.split(result, counts), parts, matrices.unbind(), large, biases, relu)
        return result
    group = _group_of_row(counts)
    if variant == "bags":  # row p of the result: the sum of its matrix's rows, weighted by row p of a
        depth = b.shape[1]
        numbers = torch.arange(depth, dtype=_index_type(max(a.numel(), len(b) * depth)))
        index = (group.to(numbers.dtype) * depth)[:, None] + numbers  # into the rows of all matrices
        starts = torch.arange(0, a.numel(), depth, dtype=numbers.dtype)
        result = weighted_sums(b.flatten(0, 1), index.flatten(), starts, a.flatten())
    else:
        layout = _Padded(counts, group)
        if layout.size <= NARROW and b.transpose(1, 2).is_contiguous():
            swapped = torch.bmm(b.transpose(1, 2), layout.spread(a).transpose(1, 2))
            result = swapped.transpose(1, 2)[group, layout.inside]
        else:
            result = torch.bmm(layout.spread(a), b).flatten(0, 1).index_select(0, layout.index)
        for rows, number in layout.beyond:
            torch.mm(a[rows], b[number], out=result[rows])
    if bias is not None:
        result += bias.index_select(0, group)
    return result.relu_() if relu else result


def grouped_outer(a: Tensor, b: Tensor, counts: list[int], variant: str | None = None) -> Tensor:
    """Return for each group the product ``a.T b`` of its rows of ``a [P, M]`` and ``b [P, N]``: ``[E, M, N]``."""
    variant = variant or choose_variant(a, b.shape[1], counts, b.is_contiguous())
    if variant == "bags":
        return _outer_in_bags(a, b, counts)
    if variant == "padded":
        layout = _Padded(counts, _group_of_row(counts))
        result = torch.bmm(layout.spread(a, 0.0).transpose(1, 2), layout.spread(b, 0.0))
        for rows, number in layout.beyond:
            result[number].addmm_(a[rows].t(), b[rows])
        return result
    result, large = a.new_empty(len(counts), a.shape[1], b.shape[1]), _large_groups(a, b.shape[1], counts)
    parts = zip(torch.split(a, counts), large, strict=True)
    left = (transposed(part) if big else part.t() for part, big in parts)
    right = torch.split(b.contiguous().t(), counts, 1)
    _multiply_each(result.unbind(), left, right, large, rows_or_none(None, len(counts)), relu=False)
    return result


def choose_variant(a: Tensor, width: int, counts: Sequence[int], by_row: bool = False) -> str:
    """Say how to multiply grouped rows ``a [P, K]`` by matrices ``[K, width]``; ``by_row``: these are contiguous.

    "segments": one product after the other, for large groups. "bags": weighted sums of the matrices' rows, for many
    small groups. "padded": one batched product of groups padded to one size, for many small groups if the sums are not
    fast.
    """
    groups = sum(count > 0 for count in counts)
    small = len(a) * a.shape[1] * width < MIN_MULTIPLICATIONS * groups
    if small and by_row and len(counts) >= MANY_GROUPS and len(a) <= FEW_ROWS * groups and _sums_are_fast(a):
        return "bags"
    return "padded" if small and groups >= max(MANY_GROUPS, len(counts) // 2) else "segments"


def weighted_sums(table: Tensor, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Return ``[S, N]``: sum s adds ``rows`` of ``table [R, N]`` times ``weights``, from entry ``starts[s]`` on."""
    if not len(rows):
        return table.new_zeros(len(starts), table.shape[1])
    return F.embedding_bag(rows, table, starts, mode="sum", per_sample_weights=weights)


def _sums_are_fast(like: Tensor) -> bool:
    """Say whether FBGEMM computes weighted sums of rows of such tensors; it is nearly as fast as memory."""
    return like.dtype == torch.float32 and "fbgemm" in torch.backends.quantized.supported_engines


def _multiply_each(
    results: Sequence[Tensor],
    left: Iterable[Tensor],
    right: Sequence[Tensor],
    large: Sequence[bool],
    biases: Sequence[Tensor | None],
    relu: bool,
) -> None:
    """Write the products of each ``left [M, K]`` with the transposed ``right [N, K]`` into ``results``.

    Where a product is ``large``, its ``left`` is contiguous, and ``right`` or its transpose. Each product is copied to
    its target while it is in the cache.
    """
    kind = "relu" if relu else "none"
    for target, a, b, bias, big in zip(results, left, right, biases, large, strict=True):
        if big:
            target.copy_(linear_operator()(a, b, bias, kind, [], ""))
            continue
        torch.mm(a, b.t(), out=target) if bias is None else torch.addmm(bias, a, b.t(), out=target)
        if relu:
            target.relu_()


def _large_groups(a: Tensor, n: int, counts: list[int]) -> list[bool]:
    """Say for each group of rows of ``a [P, K]`` whether its product with ``n`` columns is worth a call of oneDNN."""
    k = a.shape[1]
    worthwhile = onednn_multiplies(a)
    return [worthwhile and is_large(count, k, n) for count in counts]


def _outer_in_bags(a: Tensor, b: Tensor, counts: list[int]) -> Tensor:
    """Return ``grouped_outer``: row m of a product sums the group's rows of ``b``, weighted by column m of ``a``."""
    (num_rows, width), groups = a.shape, len(counts)
    columns = torch.arange(width)
    sizes, group = torch.tensor(counts), _group_of_row(counts)
    starts = sizes.cumsum(0) - sizes
    # The entry of row p and column m comes after those of earlier groups and of its group's earlier columns
    first = torch.arange(num_rows) + starts[group] * (width - 1)
    index = (first[:, None] + sizes[group][:, None] * columns).flatten()
    rows = torch.arange(num_rows, dtype=_index_type(a.numel()))[:, None].expand(num_rows, width).flatten()
    rows, weights = (torch.empty_like(x).scatter_(0, index, x) for x in (rows, a.flatten()))
    begins = ((starts * width)[:, None] + sizes[:, None] * columns).flatten().to(rows.dtype)
    return weighted_sums(b, rows, begins, weights).view(groups, width, b.shape[1])


def _index_type(count: int) -> torch.dtype:
    """Return the narrowest index type that numbers ``count`` things: int32 is half as much to read as int64."""
    return torch.int32 if count < 2**31 else torch.int64


def _group_of_row(counts: Sequence[int]) -> Tensor:
    """Return the group of each row, ``[P]``."""
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts), output_size=sum(counts))


class _Padded:
    """Where rows go when all groups are padded to one size; the rows ``beyond`` it in a larger group are left out.

    The size is the mean plus two of its square roots: if rows fall into groups by chance, few are beyond it. Row p goes
    to row ``inside [P]`` of its group, ``index [P]`` of all; a row beyond the size goes to the first of its group.
    """

    def __init__(self, counts: Sequence[int], group: Tensor) -> None:
        mean = sum(counts) / len(counts)
        self.groups, self.size = len(counts), min(max(counts), math.ceil((mean + 2 * math.sqrt(mean)) / 4) * 4)
        starts = torch.tensor([0, *accumulate(counts[:-1])])
        inside = torch.arange(len(group)) - starts[group]
        self._within = inside < self.size
        self.inside = inside.where(self._within, 0)
        self.index = group * self.size + self.inside
        self.beyond = [
            (slice(end - count + self.size, end), number)
            for number, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True))
            if count > self.size
        ]

    def spread(self, rows: Tensor, filler: float | None = None) -> Tensor:
        """Return ``rows [P, K]`` as ``[groups, size, K]``; unused rows hold ``filler``, or copies of any row (None)."""
        index, numbers = self.index, torch.arange(len(rows))
        if self.beyond:
            index, numbers = index[self._within], numbers[self._within]
        if filler is None:
            source = index.new_zeros(self.groups * self.size).index_copy_(0, index, numbers)
            return rows.index_select(0, source).view(self.groups, self.size, -1)
        rows = rows.index_select(0, numbers) if self.beyond else rows
        result = rows.new_full((self.groups * self.size, rows.shape[1]), filler).index_copy_(0, index, rows)
        return result.view(self.groups, self.size, -1)


# The fast versions of a plain function


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor, counts: Sequence[int]) -> Tensor:
    """The fast version of ``mtl.linear.grouped_linear``."""
    result: Tensor = apply(_GroupedLinear, x.to(weight.dtype), weight, bias, list(counts))
    return result


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        return grouped_product(x, weight.transpose(1, 2), counts, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        return *grouped_backward(grad.contiguous(), x, weight, ctx.counts, ctx.needs_input_grad[0]), None


def grouped_backward(
    grad: Tensor, x: Tensor, weight: Tensor, counts: list[int], needs_x: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of x, weight and bias from ``grad [P, H]``, that of the affine maps of each group."""
    grad_weight = grouped_outer(grad, x, counts)
    grad_x = grouped_product(grad, weight, counts) if needs_x else None
    starts = torch.tensor([0, *counts[:-1]]).cumsum(0)
    ones = grad.new_ones(len(grad))
    return grad_x, grad_weight, weighted_sums(grad, torch.arange(len(grad)), starts, ones)


def cuda_grouped_linear(x: Tensor, weight: Tensor, bias: Tensor, counts: Sequence[int]) -> Tensor:
    """The fast version of ``mtl.linear.grouped_linear`` on a GPU: one kernel in half precision."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    aligned = x.shape[1] % 8 == 0 and weight.shape[1] % 8 == 0  # rows of 16 bytes
    supported = device != "cuda" or torch.cuda.get_device_capability(x.device) >= (8, 0)
    if dtype in (torch.float16, torch.bfloat16) and aligned and supported:
        ends = torch.tensor(counts, device=x.device).cumsum(0).to(torch.int32)
        group = torch.arange(len(counts), device=x.device).repeat_interleave(torch.tensor(counts, device=x.device))
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends) + bias.index_select(0, group)
    groups = zip(torch.split(x, list(counts)), weight.unbind(), bias.unbind(), strict=True)
    return torch.cat([F.linear(rows, w, b) for rows, w, b in groups])
