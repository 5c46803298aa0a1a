"""Multiply matrices in the way that is fastest where this runs. Nothing here is differentiated by autograd."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

WORTHWHILE = 2**21  # multiplications; below, a call of oneDNN costs more than it gains
LEAST = 16  # of each size of such a product
NARROW = 8  # columns, up to which MKL is faster with the other matrix to the left
MANY_GROUPS = 32  # from which one call for all gains more than products of their own sizes
FEW = 64  # rows of a group, up to which its product may be a sum of its matrix's rows
BLOCK = 64  # rows of a large matrix that are transposed as one
AT_ONCE = 2**22  # numbers of it at a time, so that what lies between takes little memory


def _onednn() -> Any:
    """Return oneDNN's linear map, None where there is none or it gains nothing.

    torch multiplies float32 matrices with MKL, which leaves half of an AVX-512 processor idle unless Intel made it.
    """
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch declares no types for it
    fits = available and torch.backends.cpu.get_cpu_capability() == "AVX512"
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if fits else None
    if operator is None:
        return None
    one = torch.ones(1, 1)
    try:  # it is torch's own business, and may look different in another version
        operator.default(one, one, one[0], "relu", [], "")
    except (RuntimeError, TypeError):
        return None
    register_flop_formula(operator)(_flops)
    return operator.default


def _flops(x_shape: Any, weight_shape: Any, *args: Any, **kwargs: Any) -> int:
    """Count for torch's counter, which does not know this operator."""
    return 2 * int(x_shape[0]) * int(x_shape[1]) * int(weight_shape[0])


_LINEAR = _onednn()
_ENGINES = torch.backends.quantized.supported_engines


def rounded(rows: list[int]) -> list[int]:
    """Return how many rows oneDNN should be given instead of so many: at most a sixteenth more.

    It prepares code for each new size, in 0.3 ms; of sizes that change in every step there had better be few. These are
    16 from a power of two to the next.
    """
    if max(rows, default=0) <= 32:
        return rows
    steps = [1 << max(0, (count - 1).bit_length() - 5) for count in rows]
    return [-(-count // step) * step for count, step in zip(rows, steps, strict=True)]


def onednn_multiplies(like: Tensor) -> bool:
    """Say whether large products of tensors like this one go through oneDNN."""
    if torch.compiler.is_compiling() or _LINEAR is None:
        return False
    return like.device.type == "cpu" and like.dtype == torch.float32 and bool(torch.backends.mkldnn.enabled)


def transposed(x: Tensor) -> Tensor:
    """Return ``x [M, N]`` or ``[P, M, N]`` as ``[N, M]`` or ``[P, N, M]``, contiguous.

    On a CPU this takes a third to a half of the time of torch's copy for a large matrix, a seventh for many small ones.
    To shuffle the channels of a pixel is to transpose a matrix, and where channels are last in memory torch does that
    with vector instructions, and several pixels at once.
    """
    if x.device.type != "cpu" or not x.is_floating_point() or not x.numel() or torch.compiler.is_compiling():
        return x.transpose(-1, -2).contiguous()
    x = x.contiguous()
    if x.dim() == 3:
        return _shuffled(x, *x.shape).view(len(x), x.shape[2], x.shape[1])
    rows, columns = x.shape
    if rows % 256 or x.numel() <= 2**16:
        return _shuffled(x, 1, rows, columns).view(columns, rows)
    # Columns so far apart in memory share few places of the cache: some rows at a time
    result, blocks = x.new_empty(columns, rows), x.view(-1, BLOCK, columns)
    places = result.view(columns, -1, BLOCK).transpose(0, 1)
    step = max(2, AT_ONCE // (BLOCK * columns))
    for start in range(0, len(blocks), step):
        some = blocks[start : start + step]
        places[start : start + step] = _shuffled(some, *some.shape).view(len(some), columns, BLOCK)
    return result


def _shuffled(x: Tensor, pixels: int, rows: int, columns: int) -> Tensor:
    """Return contiguous ``x``, that many matrices, with each transposed in memory: ``[pixels, rows columns, 1, 1]``."""
    channels = rows * columns
    last = x.as_strided((pixels, channels, 1, 1), (channels, 1, channels, channels))  # channels last in memory
    return torch.native_channel_shuffle(last, rows)


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """Return ``a [M, K] @ b [K, N] + bias [N]``, ``[M, N]``, negative numbers replaced by 0 with ``relu``."""
    if onednn_multiplies(a) and _large(a, b.shape[1]):
        return _call(a, b.t(), bias, relu)
    result = torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    return result.relu_() if relu else result


def products(a: Tensor, b: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """Return ``a [E, M, K] @ b [E, K, N] + bias [E, N]``, ``[E, M, N]``, negative ones replaced by 0 with ``relu``."""
    if len(a) and onednn_multiplies(a) and _large(a[0], b.shape[2]):
        result = a.new_empty(len(a), a.shape[1], b.shape[2])
        matrices = zip(a.unbind(), b.transpose(1, 2).unbind(), _each(bias, len(a)), strict=True)
        for place, (one, other, offset) in zip(result.unbind(), matrices, strict=True):
            place.copy_(_call(one, other, offset, relu))
        return result
    result = torch.bmm(a, b)
    if bias is not None:
        result.add_(bias[:, None])
    return result.relu_() if relu else result


def grouped_product(
    a: Tensor, b: Tensor, counts: list[int], bias: Tensor | None = None, relu: bool = False, variant: str | None = None
) -> Tensor:
    """Multiply the rows of ``a [P, K]``, sorted by group, ``counts [E]`` each, by the matrix of their group.

    ``b [E, K, N]``, ``bias [E, N]``; returns ``[P, N]``, negative numbers replaced by 0 with ``relu``. ``variant``: see
    ``choose_variant``, which chooses if it is None.
    """
    variant = variant or choose_variant(a, b.shape[2], counts, b.is_contiguous())
    if variant == "segments":
        result, matrices = a.new_empty(len(a), b.shape[2]), b.transpose(1, 2)
        if not (matrices.is_contiguous() or b.is_contiguous()):
            matrices = matrices.contiguous()
        large = _large_groups(a, b.shape[2], counts)
        parts = torch.split(a.contiguous(), counts)
        _one_by_one(torch.split(result, counts), parts, matrices.unbind(), large, _each(bias, len(counts)), relu)
        return result
    group = _groups(counts, a.device)
    if variant == "bags":
        depth = b.shape[1]
        numbers = torch.arange(depth, dtype=_index_type(max(a.numel(), len(b) * depth)))
        places = (group.to(numbers.dtype) * depth)[:, None] + numbers  # among all matrices' rows
        starts = torch.arange(0, a.numel(), depth, dtype=numbers.dtype)
        result = weighted_sums(b.flatten(0, 1), places.flatten(), starts, a.flatten())
    elif variant == "padded":
        layout = _Padded(counts, group)
        if layout.size <= NARROW and b.transpose(1, 2).is_contiguous():
            turned = torch.bmm(b.transpose(1, 2), layout.spread(a).transpose(1, 2))
            result = turned.transpose(1, 2)[group, layout.inside]
        else:
            result = torch.bmm(layout.spread(a), b).flatten(0, 1).index_select(0, layout.place)
        for rows, number in layout.beyond:
            torch.mm(a[rows], b[number], out=result[rows])
    else:
        result = F.grouped_mm(a, b, offs=_ends(counts, a.device))
    if bias is not None:
        result += bias.index_select(0, group)
    return result.relu_() if relu else result


def grouped_outer(a: Tensor, b: Tensor, counts: list[int], variant: str | None = None) -> Tensor:
    """Return for each group the product ``a.T b`` of its rows of ``a [P, M]`` and ``b [P, N]``: ``[E, M, N]``."""
    variant = variant or choose_variant(a, b.shape[1], counts, b.is_contiguous())
    if variant == "grouped_mm":
        return F.grouped_mm(a.t(), b, offs=_ends(counts, a.device))
    if variant == "bags":
        return _outer_in_bags(a, b, counts)
    if variant == "padded":
        layout = _Padded(counts, _groups(counts, a.device))
        result = torch.bmm(layout.spread(a, 0.0).transpose(1, 2), layout.spread(b, 0.0))
        for rows, number in layout.beyond:
            result[number].addmm_(a[rows].t(), b[rows])
        return result
    result, large = a.new_empty(len(counts), a.shape[1], b.shape[1]), _large_groups(a, b.shape[1], counts)
    parts = zip(torch.split(a, counts), large, strict=True)
    left = (transposed(part) if big else part.t() for part, big in parts)
    right = torch.split(b.contiguous().t(), counts, 1)
    _one_by_one(result.unbind(), left, right, large, _each(None, len(counts)), relu=False)
    return result


def _one_by_one(
    results: Sequence[Tensor],
    left: Iterable[Tensor],
    right: Sequence[Tensor],
    large: Sequence[bool],
    biases: Sequence[Tensor | None],
    relu: bool,
) -> None:
    """Write the products of each ``left [M, K]`` and ``right [N, K]``, transposed, into ``results``.

    Where they are ``large``, ``left`` is contiguous and ``right`` or its transposed form. Each product is copied to its
    place while it is in the cache: joined in the end, they would come from memory again.
    """
    kind = "relu" if relu else "none"
    for place, a, b, bias, big in zip(results, left, right, biases, large, strict=True):
        if big:
            place.copy_(_LINEAR(a, b, bias, kind, [], ""))
            continue
        torch.mm(a, b.t(), out=place) if bias is None else torch.addmm(bias, a, b.t(), out=place)
        if relu:
            place.relu_()


def _large_groups(a: Tensor, n: int, counts: list[int]) -> list[bool]:
    """Say of which groups of rows of ``a [P, K]`` a product with ``n`` columns is worth a call of oneDNN."""
    k = a.shape[1]
    worthwhile = onednn_multiplies(a) and min(k, n) >= LEAST
    return [worthwhile and count * k * n >= WORTHWHILE and count >= LEAST for count in counts]


def _each(bias: Tensor | None, number: int) -> Sequence[Tensor | None]:
    """Return the rows of ``bias [E, N]``, or so many times None."""
    return [None] * number if bias is None else bias.unbind()


def choose_variant(a: Tensor, width: int, counts: Sequence[int], by_row: bool = False) -> str:
    """Say how grouped rows ``a [P, K]`` are best multiplied by matrices ``[K, width]``, in memory ``by_row`` or not.

    "segments": one product after the other; for large groups. "bags": weighted sums of the matrices' rows; for small
    groups on a CPU. "padded": one batched product of groups of one size; for many small ones elsewhere. "grouped_mm":
    torch's, on a GPU in half precision.
    """
    if a.device.type == "cuda":
        half = a.dtype in (torch.bfloat16, torch.float16)
        fits = half and a.shape[1] % 8 == 0 and width % 8 == 0  # rows of 16 bytes
        if fits and torch.cuda.get_device_capability(a.device) >= (8, 0):
            return "grouped_mm"
    groups = sum(count > 0 for count in counts)
    small = len(a) * a.shape[1] * width < WORTHWHILE * groups
    if small and by_row and len(counts) >= MANY_GROUPS and len(a) <= FEW * groups and _sums_fast(a):
        return "bags"
    return "padded" if small and groups >= max(MANY_GROUPS, len(counts) // 2) else "segments"


def _sums_fast(like: Tensor) -> bool:
    """Say whether weighted sums of rows of such tensors are FBGEMM's, which keep close to the speed of memory."""
    return like.device.type == "cpu" and like.dtype == torch.float32 and "fbgemm" in _ENGINES


def weighted_sums(table: Tensor, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Return sums ``[S, N]`` of the ``rows`` of ``table [R, N]`` times ``weights``, each from its ``starts [S]`` on."""
    if not len(rows):
        return table.new_zeros(len(starts), table.shape[1])
    return torch.embedding_bag(table, rows, starts, mode=0, per_sample_weights=weights)[0]


def _outer_in_bags(a: Tensor, b: Tensor, counts: list[int]) -> Tensor:
    """Return ``grouped_outer``: row m of a group's product is the sum of its rows of ``b``, weighted by column m."""
    (num_rows, width), groups = a.shape, len(counts)
    columns = torch.arange(width)
    sizes, group = torch.tensor(counts), _groups(counts, a.device)
    starts = sizes.cumsum(0) - sizes
    # The entry of row p and column m comes after those of earlier groups, and of its group's earlier columns
    first = torch.arange(num_rows) + starts[group] * (width - 1)
    places = (first[:, None] + sizes[group][:, None] * columns).flatten()
    rows = torch.arange(num_rows, dtype=_index_type(a.numel()))[:, None].expand(num_rows, width).flatten()
    rows, weights = (torch.empty_like(x).scatter_(0, places, x) for x in (rows, a.flatten()))
    begins = ((starts * width)[:, None] + sizes[:, None] * columns).flatten().to(rows.dtype)
    return weighted_sums(b, rows, begins, weights).view(groups, width, b.shape[1])


def _index_type(count: int) -> torch.dtype:
    """Return the type that numbers so many things: the smaller one, half as much to read, if it can."""
    return torch.int32 if count < 2**31 else torch.int64


def _groups(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the group of each row."""
    numbers = torch.tensor(counts, device=device)
    return torch.arange(len(counts), device=device).repeat_interleave(numbers, output_size=sum(counts))


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the end of each group, as ``grouped_mm`` wants it."""
    return torch.tensor(counts, device=device).cumsum(0).to(torch.int32)


class _Padded:
    """Where rows go when all groups are padded to one size; what is ``beyond`` in a group stays out.

    The size is the mean and two of its roots: of rows that fall into groups by chance, few are beyond. Row p goes to
    ``inside [P]`` of its ``group [P]``, ``place [P]`` among all; one that is beyond to that of the first of its group.
    """

    def __init__(self, counts: Sequence[int], group: Tensor) -> None:
        mean = sum(counts) / len(counts)
        self.groups, self.size = len(counts), min(max(counts), math.ceil((mean + 2 * math.sqrt(mean)) / 4) * 4)
        starts = torch.tensor([0, *accumulate(counts[:-1])], device=group.device)
        inside = torch.arange(len(group), device=group.device) - starts[group]
        self._within = inside < self.size
        self.inside = inside.where(self._within, 0)
        self.place = group * self.size + self.inside
        self.beyond = [
            (slice(end - count + self.size, end), number)
            for number, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True))
            if count > self.size
        ]

    def spread(self, rows: Tensor, between: float | None = None) -> Tensor:
        """Return ``rows [P, K]`` as ``[groups, size, K]``, and ``between`` them that number or, by default, any row."""
        place, numbers = self.place, torch.arange(len(rows), device=rows.device)
        if self.beyond:
            place, numbers = place[self._within], numbers[self._within]
        if between is None:
            source = place.new_zeros(self.groups * self.size).index_copy_(0, place, numbers)
            return rows.index_select(0, source).view(self.groups, self.size, -1)
        rows = rows.index_select(0, numbers) if self.beyond else rows
        result = rows.new_full((self.groups * self.size, rows.shape[1]), between).index_copy_(0, place, rows)
        return result.view(self.groups, self.size, -1)


def _large(a: Tensor, n: int) -> bool:
    """Say whether the product of ``a`` and a matrix of ``n`` columns is worth a call of oneDNN."""
    m, k = a.shape
    return m * k * n >= WORTHWHILE and min(m, k, n) >= LEAST


def _call(a: Tensor, b: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """Return the product of ``a [M, K]`` and ``b [N, K]``, transposed."""
    (m, k), n = a.shape, b.shape[0]
    if not a.is_contiguous():  # oneDNN would copy it, in more time
        if bias is None and m * n + k * n < m * k:  # less is copied for the transposed product
            return transposed(_call(b, a, None, relu))
        a = transposed(a.t()) if a.stride(0) == 1 else a.contiguous()
    if not (b.is_contiguous() or b.stride() == (1, n)):
        b = b.contiguous()  # with gaps between its rows oneDNN takes a reference loop, a thousand times slower
    result: Tensor = _LINEAR(a, b, bias, "relu" if relu else "none", [], "")
    return result
