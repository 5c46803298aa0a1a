"""Feeding in-memory rows: each row once per epoch, an order set by seed and epoch, batches shared among processes."""

from __future__ import annotations

import pytest
import torch
from mtl.data_modules.base import EvaluationSampler, RowsDataset, TensorDataModule, TrainingSampler

from mtl.checks import InputError
from mtl.types import Batch, Categorical, DataSpec, TaskSpec


def sampler(epoch: int = 0, seed: int = 0, done: int = 0, rank: int = 0, processes: int = 1) -> TrainingSampler:
    return TrainingSampler(10, 4, seed, lambda: (epoch, done), rank, processes)


def rows(count: int = 10) -> Batch:
    return Batch({"id": torch.arange(count)}, {"y": torch.arange(count).float()})


class Ten(TensorDataModule):
    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        spec = DataSpec({"id": Categorical(10)}, [TaskSpec("y", "regression")])
        return spec, {"train": rows(), "val": rows(), "test": rows()}


def test_every_epoch_has_every_row_once() -> None:
    for epoch in range(3):
        batches = list(sampler(epoch))
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert sorted(torch.cat(batches).tolist()) == list(range(10))
    assert len(sampler()) == 3


def test_order_depends_on_seed_and_epoch() -> None:
    def order(**options: int) -> list[int]:
        return torch.cat(list(sampler(**options))).tolist()

    assert order(epoch=1) == order(epoch=1)
    assert order(epoch=1) != order(epoch=2)
    assert order(epoch=1, seed=1) != order(epoch=1, seed=2)


def test_epoch_is_read_when_first_batch_is_requested() -> None:
    now = [0]
    lazy = iter(TrainingSampler(10, 4, 0, lambda: (now[0], 0)))
    now[0] = 2
    assert torch.equal(next(lazy), next(iter(sampler(2))))


def test_loaders_yield_batches() -> None:
    data = Ten(batch_size=4, eval_batch_size=8)
    data.setup()
    [first, *_] = list(data.train_dataloader())
    assert isinstance(first, Batch)
    assert torch.equal(first.inputs["id"].float(), first.targets["y"])
    assert [len(batch) for batch in data.val_dataloader()] == [8, 2]
    assert [len(batch) for batch in data.test_dataloader()] == [8, 2]
    assert data.spec.task_names == ["y"]


def test_dataset_selects_rows() -> None:
    batch = RowsDataset(rows())[torch.tensor([3, 1])]
    assert batch.inputs["id"].tolist() == [3, 1]
    assert batch.to("cpu").targets["y"].tolist() == [3.0, 1.0]


@pytest.mark.parametrize("count", [2, 40])
def test_many_targets_are_selected_like_few(count: int) -> None:
    targets = {f"task_{number}": torch.randn(9) for number in range(count)}
    index = torch.tensor([7, 0, 0])
    batch = RowsDataset(Batch({"x": torch.arange(9)}, targets, groups=torch.arange(9)))[index]
    assert list(batch.targets) == list(targets)
    assert all(torch.equal(batch.targets[name], target[index]) for name, target in targets.items())
    assert batch.inputs["x"].tolist() == batch.groups.tolist() == [7, 0, 0]


def test_epoch_resumes_after_the_batches_done() -> None:
    whole = list(sampler(3))
    assert [batch.tolist() for batch in sampler(3, done=2)] == [batch.tolist() for batch in whole[2:]]


@pytest.mark.parametrize("processes", [2, 3, 4])
@pytest.mark.parametrize("num_rows", [4, 10, 16, 17, 33])
def test_processes_divide_the_batches_of_a_single_process(processes: int, num_rows: int) -> None:
    one = list(TrainingSampler(num_rows, 4 * processes, 1, lambda: (2, 0)))
    parts = [list(TrainingSampler(num_rows, 4, 1, lambda: (2, 0), rank, processes)) for rank in range(processes)]
    assert {len(part) for part in parts} == {len(TrainingSampler(num_rows, 4, 1, lambda: (2, 0), 0, processes))}
    joined = [torch.cat(batches).tolist() for batches in zip(*parts, strict=True)]
    assert joined == [batch.tolist() for batch in one][: len(joined)]
    assert num_rows - sum(map(len, joined)) < processes
    assert all(len(batch) for part in parts for batch in part)


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
@pytest.mark.parametrize("num_rows", [1, 7, 8, 1001])
def test_evaluation_sees_every_row_once(processes: int, num_rows: int) -> None:
    parts = [list(EvaluationSampler(num_rows, 8, rank, processes)) for rank in range(processes)]
    assert len({len(part) for part in parts}) == 1
    assert sorted(torch.cat([batch for part in parts for batch in part]).tolist()) == list(range(num_rows))
    whole = {tuple(batch.tolist()) for batch in EvaluationSampler(num_rows, 8)}
    assert all(tuple(batch.tolist()) in whole for part in parts for batch in part if len(batch))


def test_more_processes_than_rows() -> None:
    with pytest.raises(InputError, match="3 training rows are fewer than the 4 processes"):
        TrainingSampler(3, 4, 0, lambda: (0, 0), 0, 4)


def test_loaders_do_not_advance_the_global_generator() -> None:
    data = Ten(batch_size=4)
    data.setup()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        list(loader)
    assert torch.equal(torch.rand(3), expected)


def test_batch_on_the_device_is_not_moved() -> None:
    batch, data = rows(), Ten(batch_size=4)
    assert data.transfer_batch_to_device(batch, torch.device("cpu"), 0) is batch
    moved = data.transfer_batch_to_device(batch, torch.device("meta"), 0)
    assert moved.is_on(torch.device("meta"))
    mixed = Batch(batch.inputs, moved.targets)
    assert not mixed.is_on(torch.device("cpu"))
    [one, other] = data.transfer_batch_to_device([batch, batch], torch.device("meta"), 0)  # of a super-batch
    assert one.is_on(torch.device("meta"))
    assert other.is_on(torch.device("meta"))
