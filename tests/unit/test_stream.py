"""Rows read in blocks: an order set by seed and epoch, mixed within windows, cut into batches as those in memory."""

from __future__ import annotations

import threading

import pytest
import torch
from mtl.data_modules.base import EvaluationSampler, TrainingSampler
from mtl.data_modules.stream import Cut, StreamLoader, in_order, shuffled

from mtl.checks import InputError
from mtl.types import Batch

COUNTS = torch.tensor([30, 0, 50, 7, 50, 50, 50, 13])  # rows of each block
TOTAL = int(COUNTS.sum())
FIRST = COUNTS.cumsum(0) - COUNTS


class Reader:
    """Serve rows whose only input is their number, and note which blocks are read."""

    def __init__(self) -> None:
        self.blocks: list[int] = []

    def __call__(self, block: int, rows: torch.Tensor) -> Batch:
        self.blocks.append(block)
        assert bool((rows < COUNTS[block]).all())
        ids = FIRST[block] + rows
        return Batch({"id": ids, "x": ids[:, None].float().expand(-1, 2)}, {"y": -ids.float()}, {}, ids)


def training(
    epoch: int = 0, done: int = 0, rank: int = 0, processes: int = 1, size: int = 16, seed: int = 0, window: int = 100
) -> tuple[list[list[int]], Reader]:
    """Return the numbers of the rows in each batch."""
    reader, cut = Reader(), Cut(TOTAL, size, rank, processes, True)
    loader = StreamLoader(COUNTS, reader, cut, lambda now: shuffled(COUNTS, window, seed, now), lambda: (epoch, done))
    batches = list(loader)
    assert len(batches) == max(0, len(loader) - done)
    for batch in batches:
        assert torch.equal(batch.inputs["x"][:, 1], -batch.targets["y"])
        assert torch.equal(batch.inputs["id"], batch.groups)
    return [batch.inputs["id"].tolist() for batch in batches], reader


def test_every_epoch_has_every_row_once_in_another_order() -> None:
    orders = [[row for batch in training(epoch)[0] for row in batch] for epoch in range(3)]
    assert all(sorted(order) == list(range(TOTAL)) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    assert orders[1] == [row for batch in training(1)[0] for row in batch]
    assert orders[1] != [row for batch in training(1, seed=1)[0] for row in batch]


@pytest.mark.parametrize("done", [0, 1, 6, 7, 15, 16])
def test_resumed_epoch_reads_only_what_is_left(done: int) -> None:
    whole, reader = training(2)
    rest, again = training(2, done)
    assert rest == whole[done:]
    windows = shuffled(COUNTS, 100, 0, 2)
    left = [block for window in windows if window.stop > done * 16 for block in window.blocks]
    assert set(again.blocks) <= set(left)
    assert len(again.blocks) < len(reader.blocks) or done < 6


@pytest.mark.parametrize("processes", [2, 3, 4])
@pytest.mark.parametrize("size", [4, 7, 16, 100])
def test_processes_divide_the_batches_of_a_single_process(processes: int, size: int) -> None:
    whole, _ = training(1, size=size * processes)
    parts = [training(1, rank=rank, processes=processes, size=size)[0] for rank in range(processes)]
    assert {len(part) for part in parts} == {len(TrainingSampler(TOTAL, size, 0, lambda: (0, 0), 0, processes))}
    together = [[row for part in batch for row in part] for batch in zip(*parts, strict=True)]
    assert together == whole[: len(together)]
    assert TOTAL - sum(map(len, together)) < processes


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [8, 60, 1000])
def test_evaluation_has_the_batches_of_rows_in_memory(processes: int, size: int) -> None:
    for rank in range(processes):
        cut = Cut(TOTAL, size, rank, processes, False)
        loader = StreamLoader(COUNTS, Reader(), cut, lambda _: in_order(COUNTS))
        expected = [index.tolist() for index in EvaluationSampler(TOTAL, size, rank, processes)]
        assert [batch.inputs["id"].tolist() for batch in loader] == expected
        assert len(loader) == len(expected)


def test_windows_hold_as_many_rows_as_asked_and_mix_their_blocks() -> None:
    counts = torch.full((160,), 50)
    windows = shuffled(counts, 800, 0, 0)
    assert [window.stop - window.start for window in windows] == [800] * 10
    assert sorted(block for window in windows for block in window.blocks) == list(range(160))
    assert windows[0].blocks != sorted(windows[0].blocks)  # of random places
    # A batch of 80 rows comes from nearly all of the 16 blocks of its window
    for window in windows:
        places = [len((part // 50).unique()) for part in window.order().split(80)]
        assert min(places) > 12
    uneven = shuffled(COUNTS, 100, 0, 0)
    assert max(window.stop - window.start for window in uneven) <= 100 + int(COUNTS.max())
    assert len(shuffled(COUNTS, 10**9, 0, 0)) == 1


def test_next_window_is_read_while_one_is_used() -> None:
    """Two windows are in memory: the one after the next waits."""
    blocks, read = list[int](), threading.Semaphore(0)

    def noted(block: int, rows: torch.Tensor) -> Batch:
        blocks.append(block)
        read.release()
        return Batch({"id": rows}, {"y": rows.float()})

    counts = torch.full((8,), 30)
    batches = iter(StreamLoader(counts, noted, Cut(240, 10, 0, 1, True), lambda _: in_order(counts)))
    for number in range(3):
        for _ in range(3):
            next(batches)
        while len(blocks) < number + 2:
            assert read.acquire(timeout=10)
        assert blocks == [*range(number + 2)]
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_errors_of_the_reading_thread_are_raised() -> None:
    def refuse(block: int, rows: torch.Tensor) -> Batch:
        raise InputError("a bad cell")

    loader = StreamLoader(COUNTS, refuse, Cut(TOTAL, 16, 0, 1, True), lambda _: in_order(COUNTS))
    with pytest.raises(InputError, match="a bad cell"):
        list(loader)


def test_more_processes_than_rows() -> None:
    counts = torch.tensor([3])
    with pytest.raises(InputError, match="3 training rows are fewer than the 4 processes"):
        StreamLoader(counts, Reader(), Cut(3, 4, 0, 4, True), lambda _: in_order(counts))
