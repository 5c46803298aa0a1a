"""Feeding rows: each row once per epoch, an order set by seed and epoch, batches shared among processes.

The same of rows in memory and of rows that are read in blocks, which are mixed within windows.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from mtl.data_modules.base import TensorDataModule
from mtl.data_modules.samplers import BatchPlan, RowsSampler
from mtl.data_modules.stream import StreamLoader, ordered_windows, shuffle_windows
from torch import Tensor

from mtl.checks import InputError
from mtl.nn.seeds import derive_seed
from mtl.types import Batch, Categorical, DataSpec, TaskSpec

COUNTS = torch.tensor([30, 0, 50, 7, 50, 50, 50, 13])  # rows of each block
TOTAL = int(COUNTS.sum())
FIRST = COUNTS.cumsum(0) - COUNTS


class Reader:
    """Serve rows whose only input is their number, and note which blocks are read."""

    def __init__(self) -> None:
        self.blocks: list[int] = []

    def __call__(self, block: int, rows: Tensor) -> Batch:
        self.blocks.append(block)
        assert bool((rows < COUNTS[block]).all())
        ids = FIRST[block] + rows
        return Batch({"id": ids, "x": ids[:, None].float().expand(-1, 2)}, {"y": -ids.float()}, {}, ids)


def streamed(
    cut: BatchPlan, seed: int | None, epoch: int = 0, done: int = 0, reader: Reader | None = None
) -> StreamLoader:
    def windows(now: int) -> list[Any]:
        return ordered_windows(COUNTS) if seed is None else shuffle_windows(COUNTS, 100, cut.size, seed, now)

    return StreamLoader(COUNTS, reader or Reader(), cut, windows, lambda: (epoch, done))


def order(way: str, cut: BatchPlan, seed: int | None, epoch: int = 0, done: int = 0) -> list[list[int]]:
    """Return the numbers of the rows in each batch of an epoch."""
    if way == "memory":
        return [rows.tolist() for rows in RowsSampler(cut, seed, lambda: (epoch, done))]
    batches = list(streamed(cut, seed, epoch, done))
    for batch in batches:
        assert torch.equal(batch.inputs["x"][:, 1], -batch.targets["y"])
        assert torch.equal(batch.inputs["id"], batch.groups)
    return [batch.inputs["id"].tolist() for batch in batches]


def flat(batches: Sequence[Sequence[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


WAYS = pytest.mark.parametrize("way", ["memory", "streamed"])
ONE = BatchPlan(TOTAL, 16, training=True)


@WAYS
def test_every_epoch_has_every_row_once_in_another_order(way: str) -> None:
    orders = [order(way, ONE, 0, epoch) for epoch in range(3)]
    assert all([len(batch) for batch in batches] == [16] * 15 + [10] for batches in orders)
    assert all(sorted(flat(batches)) == list(range(TOTAL)) for batches in orders)
    assert len({tuple(flat(batches)) for batches in orders}) == 3
    assert orders[1] == order(way, ONE, 0, 1) != order(way, ONE, 1, 1)


@WAYS
@pytest.mark.parametrize("done", [0, 1, 6, 7, 15, 16])
def test_resumed_epoch_has_what_is_left(way: str, done: int) -> None:
    whole = order(way, ONE, 0, 2)
    assert order(way, ONE, 0, 2, done) == whole[done:]
    assert len(whole) == len(ONE)
    all_of_it, rest = Reader(), Reader()
    for reader, first in ((all_of_it, 0), (rest, done)):
        list(streamed(ONE, 0, 2, first, reader))
    windows = shuffle_windows(COUNTS, 100, ONE.size, 0, 2)
    assert set(rest.blocks) <= {block for window in windows if window.stop > done * 16 for block in window.blocks}
    assert len(rest.blocks) < len(all_of_it.blocks) or done < 6


@WAYS
@pytest.mark.parametrize(("processes", "size"), [(2, 16), (3, 7), (4, 100)])
def test_processes_divide_the_batches_of_a_single_process(way: str, processes: int, size: int) -> None:
    whole = order(way, BatchPlan(TOTAL, size * processes, training=True), 1, 1)
    cuts = [BatchPlan(TOTAL, size, rank, processes, training=True) for rank in range(processes)]
    parts = [order(way, cut, 1, 1) for cut in cuts]
    assert [len(part) for part in parts] == [len(cut) for cut in cuts]
    together = [flat(batch) for batch in zip(*parts, strict=True)]
    assert together == whole[: len(together)]
    assert TOTAL - sum(map(len, together)) < processes
    assert all(len(batch) for part in parts for batch in part)


@WAYS
@pytest.mark.parametrize(("processes", "size"), [(1, 8), (2, 60), (3, 8), (5, 1000)])
def test_evaluation_has_the_batches_of_a_single_process(way: str, processes: int, size: int) -> None:
    whole = [rows.tolist() for rows in torch.arange(TOTAL).split(size)]
    parts = [order(way, BatchPlan(TOTAL, size, rank, processes), None) for rank in range(processes)]
    assert len({len(part) for part in parts}) == 1
    for rank, part in enumerate(parts):
        mine = whole[rank::processes]
        assert part == mine + [[]] * (len(part) - len(mine))


def test_more_processes_than_rows() -> None:
    with pytest.raises(InputError, match="3 training rows are fewer than the 4 processes"):
        BatchPlan(3, 4, 0, 4, training=True)


@WAYS
def test_epoch_is_read_when_the_first_batch_is_requested(way: str) -> None:
    now = [0]
    rows = RowsSampler(ONE, 0, lambda: (now[0], 0))
    loader = streamed(ONE, 0)
    loader.position = lambda: (now[0], 0)
    lazy: Iterator[Any] = iter(rows if way == "memory" else loader)
    now[0] = 2
    first = next(lazy)
    assert (first if way == "memory" else first.inputs["id"]).tolist() == order(way, ONE, 0, 2)[0]


def test_windows_hold_as_many_rows_as_asked_and_mix_their_blocks() -> None:
    counts = torch.full((160,), 50)
    windows = shuffle_windows(counts, 800, 80, 0, 0)
    assert [window.stop - window.start for window in windows] == [800] * 10
    assert sorted(block for window in windows for block in window.blocks) == list(range(160))
    assert windows[0].blocks != sorted(windows[0].blocks)  # of random places
    # A batch of 80 rows comes from nearly all of the 16 blocks of its window
    for window in windows:
        places = [len((part // 50).unique()) for part in window.order().split(80)]
        assert min(places) > 12
    uneven = shuffle_windows(COUNTS, 100, 16, 0, 0)
    assert max(window.stop - window.start for window in uneven) <= 100 + int(COUNTS.max())
    assert len(shuffle_windows(COUNTS, 10**9, 16, 0, 0)) == 1


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_the_reading(processes: int) -> None:
    counts, size = torch.full((160,), 50), 320 // processes
    cuts = [BatchPlan(8000, size, rank, processes, training=True) for rank in range(processes)]
    assert cuts[0].size == 320
    blocks = list[int]()

    def noted(block: int, rows: Tensor) -> Batch:
        blocks.append(block)
        return Batch({"id": block * 50 + rows}, {"y": rows.float()})

    def windows(epoch: int) -> list[Any]:
        return shuffle_windows(counts, 1600, 320, 0, epoch)

    parts = [list(StreamLoader(counts, noted, cut, windows)) for cut in cuts]
    assert sorted(int(row) for part in parts for batch in part for row in batch.inputs["id"]) == list(range(8000))
    # Of the 32 blocks of a window, the processes read those at the ends of their parts twice
    assert 160 <= len(blocks) <= 160 * (1 + 0.2 * (processes - 1))


def test_next_window_is_read_while_one_is_used() -> None:
    """Two windows are in memory: the one after the next waits."""
    blocks, read = list[int](), threading.Semaphore(0)

    def noted(block: int, rows: Tensor) -> Batch:
        blocks.append(block)
        read.release()
        return Batch({"id": rows}, {"y": rows.float()})

    counts = torch.full((8,), 30)
    batches = iter(StreamLoader(counts, noted, BatchPlan(240, 10, training=True), lambda _: ordered_windows(counts)))
    for number in range(3):
        for _ in range(3):
            next(batches)
        while len(blocks) < number + 2:
            assert read.acquire(timeout=10)
        assert blocks == [*range(number + 2)]
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_errors_of_the_reading_thread_are_raised() -> None:
    def refuse(block: int, rows: Tensor) -> Batch:
        raise InputError("a bad cell")

    with pytest.raises(InputError, match="a bad cell"):
        list(StreamLoader(COUNTS, refuse, ONE, lambda _: ordered_windows(COUNTS)))


def ten() -> Batch:
    return Batch({"id": torch.arange(10)}, {"y": torch.arange(10).float()})


class Ten(TensorDataModule):
    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        spec = DataSpec({"id": Categorical(10)}, [TaskSpec("y", "regression")])
        return spec, {"train": ten(), "val": ten(), "test": ten()}


def test_loaders_yield_batches_and_leave_the_global_generator_alone() -> None:
    data = Ten(batch_size=4, eval_batch_size=8)
    data.setup()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    [first, *_] = list(data.train_dataloader())
    assert isinstance(first, Batch)
    assert torch.equal(first.inputs["id"].float(), first.targets["y"])
    assert [len(batch) for batch in data.val_dataloader()] == [8, 2]
    assert [len(batch) for batch in data.test_dataloader()] == [8, 2]
    assert data.spec.task_names == ["y"]
    assert torch.equal(torch.rand(3), expected)


def test_batch_on_the_device_is_not_moved() -> None:
    batch, data = ten(), Ten(batch_size=4)
    assert data.transfer_batch_to_device(batch, torch.device("cpu"), 0) is batch
    moved = data.transfer_batch_to_device(batch, torch.device("meta"), 0)
    assert moved.is_on(torch.device("meta"))
    mixed = Batch(batch.inputs, moved.targets)
    assert not mixed.is_on(torch.device("cpu"))
    both = data.transfer_batch_to_device([batch, batch], torch.device("meta"), 0)  # of a super-batch
    assert all(one.is_on(torch.device("meta")) for one in both)


def test_seeds_are_those_of_earlier_runs() -> None:
    """A run that is resumed with a later version draws the same rows."""
    assert derive_seed(3) == 3
    assert derive_seed(3, 5, 7) == (3 * 1_000_003 + 5) * 1_000_003 + 7
    assert derive_seed(0, "sample") == zlib.crc32(b"sample")
    assert derive_seed(2**40, 1, 1) == ((2**40 * 1_000_003 + 1) * 1_000_003 + 1) % 2**63
