"""A tensor for each task, stored side by side, so that one operation is enough for hundreds of tasks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
Places = Mapping[str, tuple[int, int]]  # by task: its block, and its column in it


@dataclass(eq=False)  # since FSDP finds the tensors that it waits for in dicts, lists and dataclasses alone
class TaskTensors(Mapping[str, Tensor]):
    """One tensor ``[B, ...]`` for each task, in blocks ``[B, n, ...]`` of n tasks; ``places`` are in the tasks' order.

    ``tensors[task]`` is a view of its column. ``dim``: the dimension of the n columns, 2 in blocks ``[K, B, n, ...]``.
    """

    places: Places
    blocks: Sequence[Tensor]
    dim: int = 1

    def __post_init__(self) -> None:
        self._columns: dict[int, tuple[Tensor, ...]] = {}  # of blocks that have been asked for single tasks

    @classmethod
    def stack(cls, tensors: Mapping[str, Tensor]) -> TaskTensors:
        """Return ``tensors`` in one block for each shape and dtype."""
        if isinstance(tensors, TaskTensors):
            return tensors
        groups = group_by(tensors, lambda name: (tensors[name].shape, tensors[name].dtype)).values()
        blocks = [stack_tasks(tensors, names) if len(names) > 1 else tensors[names[0]][:, None] for names in groups]
        return cls(find_places(groups, tensors), blocks)

    def __getitem__(self, task: str) -> Tensor:
        block, column = self.places[task]
        if block not in self._columns:  # all at once: the gradients of n selected columns would be n whole blocks
            self._columns[block] = self.blocks[block].unbind(self.dim)
        return self._columns[block][column]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def stack_tasks(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Return the tensors ``[B, ...]`` of ``names`` as ``[B, n, ...]``; no copy if they are a block of ``tensors``."""
    if not isinstance(tensors, TaskTensors):
        return torch.stack([tensors[name] for name in names], 1)
    places, dim = [tensors.places[name] for name in names], tensors.dim
    used = list(dict.fromkeys(block for block, _ in places))
    blocks = [tensors.blocks[block] for block in used]
    first = dict(zip(used, accumulate((block.shape[dim] for block in blocks), initial=0), strict=False))
    joined, columns = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim), tuple(first[b] + c for b, c in places)
    whole = columns == tuple(range(joined.shape[dim]))
    return joined if whole else joined.index_select(dim, _index(columns, joined.device))


def map_tasks(
    tensors: Mapping[str, Tensor], change: Callable[[Tensor], Tensor], dim: int | None = None
) -> Mapping[str, Tensor]:
    """Return ``tensors`` changed; ``change`` must do the same to each column of a block. ``dim``: see ``TaskTensors``.

    Other mappings than ``TaskTensors`` become dicts.
    """
    if isinstance(tensors, TaskTensors):
        return TaskTensors(tensors.places, [change(block) for block in tensors.blocks], dim or tensors.dim)
    return {name: change(value) for name, value in tensors.items()}


def find_places(groups: Iterable[Sequence[str]], order: Iterable[str]) -> Places:
    """Return where the tasks are in blocks of the tasks ``groups``, in the ``order`` of names."""
    places = {name: (block, column) for block, names in enumerate(groups) for column, name in enumerate(names)}
    return {name: places[name] for name in order}


def group_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items by key, in their order."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


@lru_cache(maxsize=64)
def _index(columns: tuple[int, ...], device: torch.device) -> Tensor:
    """Return ``columns`` as a tensor; cached, since a copy to the device in each step would make the CPU wait."""
    with torch.inference_mode(False):  # else a first call in evaluation would cache a tensor that training cannot use
        return torch.tensor(columns, device=device)
