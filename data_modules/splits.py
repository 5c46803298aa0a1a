"""Split rows into train, val and test: at random, by groups, by scaffolds of molecules or by time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Sized
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from mtl.checks import format_value, require
from mtl.options import LargeCount
from mtl.types import Batch

from .tables.options import THREE_FRACTIONS, Fractions

SPLITS = ("train", "val", "test")

Rows = Annotated[tuple[LargeCount, LargeCount, LargeCount], Field(strict=False)]


def by_split(fractions: Fractions, own_files: Collection[str] = (), option: str = "data.split") -> dict[str, float]:
    """Return the fraction of each split; raise InputError if one is 0 and the split is not in ``own_files``."""
    by_name = dict(zip(SPLITS, fractions, strict=True))
    empty = [name for name, fraction in by_name.items() if fraction == 0 and name not in own_files]
    message = f"{option}={format_value(fractions)}: must be {THREE_FRACTIONS}; {', '.join(empty)} would have no rows"
    require(not empty, message)
    return by_name


def files_to_read(paths: Mapping[str, Path], wanted: Sequence[str]) -> dict[str, Path]:
    """Return the file of each ``wanted`` split that has its own; also train's, if a wanted split has none."""
    rest = any(split not in paths for split in wanted)
    return {split: file for split, file in paths.items() if split in wanted or (rest and split == "train")}


def split_rows(rows: Batch, sizes: Sequence[int]) -> dict[str, Batch]:
    """Cut ``rows`` into consecutive train, val and test rows of the given sizes."""
    parts = torch.arange(len(rows)).split(list(sizes))
    return {name: rows.select(index) for name, index in zip(SPLITS, parts, strict=True)}


def random_split(strata: Tensor | int, fractions: Mapping[str, float], generator: torch.Generator) -> dict[str, Tensor]:
    """Return the indices of each split, shuffled: its fraction of every stratum, rounded to whole rows.

    ``strata [N]``, int64, is the stratum of each row; a number N stands for N rows that are all alike. ``fractions``
    need not sum to 1.
    """
    if isinstance(strata, int):
        strata = torch.zeros(strata, dtype=torch.int64)
    shuffled = torch.randperm(len(strata), generator=generator)
    drawn = strata[shuffled]
    size = torch.bincount(drawn)
    # rank of each shuffled row within its stratum: 0, 1, ..., size - 1
    rank = torch.empty_like(drawn)
    order = drawn.argsort(stable=True)
    rank[order] = torch.arange(len(drawn)) - (size.cumsum(0) - size)[drawn[order]]
    first = (_starts(fractions)[:, None] * size).round().long()  # [splits - 1, strata]: first rank of each later split
    part = (rank >= first[:, drawn]).sum(0)
    return {name: shuffled[part == number] for number, name in enumerate(fractions)}


def group_split(groups: Tensor, fractions: Mapping[str, float], generator: torch.Generator) -> dict[str, Tensor]:
    """Return the indices of each split, ascending: its fraction of the groups, with all rows of a group in one split.

    ``groups [N]``, int64, is the group of each row.
    """
    names, index = groups.unique(return_inverse=True)
    parts = random_split(len(names), fractions, generator)
    return {name: torch.isin(index, part).nonzero()[:, 0] for name, part in parts.items()}


def scaffold_split(scaffolds: Tensor, fractions: Mapping[str, float]) -> dict[str, Tensor]:
    """Return the indices of each split, ascending, with all rows of a scaffold in one split, as MoleculeNet does.

    ``scaffolds [N]``, int64, is the scaffold of each row. The scaffolds with most rows, the later ones of equally many,
    choose first: the first split that has room, else the last.
    """
    names, index, sizes = scaffolds.unique(return_inverse=True, return_counts=True)
    first = torch.full_like(names, len(index)).scatter_reduce(0, index, torch.arange(len(index)), "amin")
    limits, taken, part = (_starts(fractions) * len(index)).tolist(), [0] * len(fractions), torch.empty_like(names)
    for size, _, scaffold in sorted(zip(sizes.tolist(), first.tolist(), range(len(names)), strict=True), reverse=True):
        fitting = (number for number, limit in enumerate(limits) if sum(taken[: number + 1]) + size <= limit)
        part[scaffold] = chosen = next(fitting, len(limits))
        taken[chosen] += size
    return {name: (part[index] == number).nonzero()[:, 0] for number, name in enumerate(fractions)}


def time_split(times: Tensor, fractions: Mapping[str, float], gap: float = 0.0) -> dict[str, Tensor]:
    """Return the indices of each split, ascending: its fraction of the rows in the order of ``times [N]``.

    Rows of one time stay together. Rows within ``gap`` after the first time of a split, but for the first one, are in
    no split.
    """
    first = (_starts(fractions) * len(times)).round().long().clamp(max=len(times) - 1)
    starts = times.sort().values[first]
    part = torch.searchsorted(starts, times, right=True)
    waits = (part > 0) & (times < starts[(part - 1).clamp(min=0)] + gap)
    return {name: ((part == number) & ~waits).nonzero()[:, 0] for number, name in enumerate(fractions)}


def _starts(fractions: Mapping[str, float]) -> Tensor:
    """Return where each split but the first begins, as a fraction of all rows: float64."""
    bounds = torch.tensor([*fractions.values()], dtype=torch.float64).cumsum(0)
    return bounds[:-1] / bounds[-1]


def sample_rows(count: int, limit: int | None, generator: torch.Generator) -> Tensor:
    """Return the indices of at most ``limit`` of ``count`` rows, drawn at random, ascending; None: of all."""
    return torch.randperm(count, generator=generator)[:limit].sort().values


def require_rows(parts: Mapping[str, Sized], reason: str) -> None:
    """Raise InputError, ``reason`` and the names of the splits, unless each of ``parts`` has a row."""
    empty = [name for name, part in parts.items() if not len(part)]
    require(not empty, f"{reason} {', '.join(empty)}")
