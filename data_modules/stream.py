"""Feed rows that do not fit into memory: blocks of rows are read in a random order and mixed within windows.

A block is a range of consecutive rows of a file; a window is a set of blocks that are in memory together. The order of
an epoch is a permutation of the blocks, cut into windows, and a permutation of the rows of each block. Both depend only
on the seed and the epoch, and the numbers of rows are known before any row is read. A resumed run can therefore
skip finished windows without reading them, and any number of processes divides the same global batches. The rows of a
batch are in the order of their blocks, so that the part of a process has rows of few blocks, and it reads only these.

No library is used: litdata's and torchdata's order depends on the numbers of workers and processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mtl.nn.seeds import make_generator
from mtl.types import Batch

from .samplers import BatchPlan, Position, Resumable

Read = Callable[[int, Tensor], Batch]
WINDOW_BLOCKS = 16  # blocks in a window: its mixed rows come from this many places


@dataclass(frozen=True)
class Window:
    """Rows of ``blocks`` that are in memory together, at the positions [start, stop) of the order.

    ``skipped``: rows of the first block that are in the window before; the next window may have the last rows of the
    last block. ``counts``: the rows of each block. ``seed`` deals the rows of each block at random to the global
    batches of ``size`` rows, about equally many to each; None: they stay in the order of the blocks.
    """

    blocks: Sequence[int]
    counts: Tensor
    start: int
    stop: int
    seed: int | None = None
    size: int = 1
    skipped: int = 0

    def order(self) -> Tensor:
        """Return the row at each position of the window, ``[stop - start]``; rows are counted through its blocks."""
        length = self.stop - self.start
        if self.seed is None:
            return torch.arange(self.skipped, self.skipped + length)
        generator = make_generator(self.seed)
        ends = (self.counts.cumsum(0) - self.skipped).clamp(max=length).tolist()
        mixed = [first + torch.randperm(end - first, generator=generator) for first, end in pairwise([0, *ends])]
        # Each batch takes every n-th row; the incomplete batch at the end takes evenly spaced rows
        rows = torch.cat(mixed)
        batches, rest = divmod(length, self.size)
        spread = torch.arange(rest) * length // max(rest, 1)
        dealt = torch.ones(length, dtype=torch.bool).index_fill(0, spread, False)
        return self.skipped + torch.cat([rows[dealt].view(self.size, batches).T.flatten(), rows[spread]])


def shuffle_windows(counts: Tensor, window_rows: int, size: int, seed: int, epoch: int) -> list[Window]:
    """Return the windows of an epoch: random blocks, with about equally many rows in each window.

    ``counts [blocks]``: the rows of each block. A window has whole global batches, of ``size`` rows, so that each
    process needs few of its blocks; it has at most about ``window_rows`` rows.
    """
    generator = make_generator(seed, epoch)
    blocks = torch.randperm(len(counts), generator=generator)
    stops = counts[blocks].cumsum(0)
    total = int(counts.sum())
    rows = -(-total // -(-total // window_rows) // size) * size
    windows = []
    for start in range(0, total, rows):
        stop, window_seed = min(start + rows, total), int(torch.randint(2**62, (), generator=generator))
        first, last = torch.searchsorted(stops, torch.tensor([start + 1, stop])).tolist()
        part = blocks[first : last + 1]
        skipped = start - int(stops[first] - counts[part[0]])
        windows.append(Window(part.tolist(), counts[part], start, stop, window_seed, size, skipped))
    return windows


def ordered_windows(counts: Tensor) -> list[Window]:
    """Return a window for each block that has rows, in the order of the rows."""
    stops = counts.cumsum(0).tolist()
    bounds = zip([0, *stops], stops, strict=False)
    parts = zip(counts.split(1), bounds, strict=False)
    return [Window([block], count, *ends) for block, (count, ends) in enumerate(parts) if ends[1] > ends[0]]


class StreamLoader(Resumable):
    """Yield this process's batches of an epoch; while one window is used, a thread reads the next one.

    ``read(block, rows)`` returns the rows ``[N]`` of a block, counted from 0 among ``counts[block]``, as a Batch.
    ``windows(epoch)`` returns the order of an epoch. ``position()`` returns the epoch and how many of its batches are
    done; it is called when the first batch is requested.
    """

    def __init__(
        self,
        counts: Tensor,
        read: Read,
        plan: BatchPlan,
        windows: Callable[[int], list[Window]],
        position: Position = lambda: (0, 0),
        pin_memory: bool = False,
    ) -> None:
        self.counts, self.read, self.plan, self.windows, self.position = counts, read, plan, windows, position
        self.pin_memory = pin_memory and torch.cuda.is_available()

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[Batch]:
        epoch, done = self.position()
        loaded = self._read_ahead(self.windows(epoch), done)
        window, used = None, 0
        for number in range(done, len(self)):
            low, high = self.plan.bounds(number)
            parts: list[Batch] = []
            missing = high - low
            while missing:
                if window is None:
                    window, used = next(loaded), 0
                taken = min(missing, len(window) - used)
                # A copy: a view would keep the whole window in memory
                parts.append(window.select(torch.arange(used, used + taken)))
                used, missing = used + taken, missing - taken
                if used == len(window):
                    window = None
            batch = concat_batches(parts) if parts else self.read(0, torch.arange(0))
            batch.row_ids = None if self.plan.training else torch.arange(low, high)
            yield batch.pin_memory() if self.pin_memory else batch

    def _read_ahead(self, windows: list[Window], done: int) -> Iterator[Batch]:
        """Yield this process's rows of each window that has any, from batch ``done`` on."""
        positions_by_window = ((window, self.plan.within(done, window.start, window.stop)) for window in windows)
        todo = ((window, positions) for window, positions in positions_by_window if len(positions))
        with ThreadPoolExecutor(1, "read-ahead") as pool:
            first = next(todo, None)
            ahead = first and pool.submit(self._load, *first)
            while ahead is not None:
                rows, following = ahead.result(), next(todo, None)
                ahead = following and pool.submit(self._load, *following)
                yield rows
                del rows  # before the thread reads another window

    def _load(self, window: Window, positions: Tensor) -> Batch:
        """Return the rows at ``positions [N]`` of the order, all of which lie in ``window``."""
        order = window.order()[positions - window.start]
        batch, first = None, 0
        for block in window.blocks:
            count = int(self.counts[block])
            rows = ((order >= first) & (order < first + count)).nonzero().flatten()
            if len(rows):
                part = self.read(block, order[rows] - first)
                batch = batch or part.select(torch.arange(1)).select(torch.zeros(len(order), dtype=torch.long))
                write_rows(batch, rows, part)
            first += count
        assert batch is not None  # positions is not empty
        return batch.in_blocks()


@dataclass(frozen=True)
class StreamedRows:
    """The rows of a split that are read as they are needed, in place of a ``Batch`` that holds all of them.

    ``counts [blocks]``: the rows of each block; ``read(block, rows)`` returns some of them, see ``StreamLoader``. A
    training epoch mixes the rows of windows of about ``window_rows``.
    """

    counts: Tensor
    read: Read
    window_rows: int

    def __len__(self) -> int:
        return int(self.counts.sum())

    def loader(self, plan: BatchPlan, seed: int | None, position: Position, pin_memory: bool) -> StreamLoader:
        """Return the batches of an epoch: in order, or shuffled with ``seed``."""

        def windows(epoch: int) -> list[Window]:
            if seed is None:
                return ordered_windows(self.counts)
            return shuffle_windows(self.counts, self.window_rows, plan.size, seed, epoch)

        return StreamLoader(self.counts, self.read, plan, windows, position, pin_memory)

    def sample(self, max_rows: int, generator: torch.Generator) -> Batch:
        """Return at most ``max_rows`` rows, or all, from random places in ``WINDOW_BLOCKS`` or more random blocks."""
        blocks = self.counts.nonzero()[:, 0]
        blocks = blocks[torch.randperm(len(blocks), generator=generator)]
        blocks = blocks[: max(WINDOW_BLOCKS, 1 + int((self.counts[blocks].cumsum(0) < max_rows).sum()))]
        drawn = [torch.randperm(int(self.counts[block]), generator=generator) for block in blocks]
        parts = zip(blocks.tolist(), drawn, strict=True)
        return concat_batches([self.read(block, rows[: -(-max_rows // len(blocks))]) for block, rows in parts])


def write_rows(batch: Batch, index: Tensor, rows: Batch) -> None:
    """Write ``rows`` to the rows ``index [N]`` of ``batch``."""
    pairs = zip(batch.tensors(), rows.tensors(), strict=True)
    for whole, part in pairs:
        whole[index] = part


def concat_batches(parts: Sequence[Batch]) -> Batch:
    """Return the rows of all ``parts`` as one batch."""
    if len(parts) == 1:
        return parts[0]
    whole = parts[0].select(torch.zeros(sum(map(len, parts)), dtype=torch.long))
    first = 0
    for part in parts:
        write_rows(whole, torch.arange(first, first + len(part)), part)
        first += len(part)
    return whole
