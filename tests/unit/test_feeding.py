"""Batches are slices, every row comes once, the order follows from seed and epoch."""

from __future__ import annotations

import torch

from data_modules.base import BatchIndexSampler, RowsDataset, TensorDataModule
from mtl.types import Batch, Categorical, DataSpec, TaskSpec


def sampler(epoch: int = 0, seed: int = 0, shuffle: bool = True) -> BatchIndexSampler:
    return BatchIndexSampler(10, 4, shuffle, seed, lambda: epoch)


def rows(count: int = 10) -> Batch:
    return Batch({"id": torch.arange(count)}, {"y": torch.arange(count).float()})


class Ten(TensorDataModule):
    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        spec = DataSpec({"id": Categorical(10)}, [TaskSpec("y", "regression")])
        return spec, {"train": rows(), "val": rows(), "test": rows()}


def test_every_row_once_in_every_epoch() -> None:
    for epoch in range(3):
        batches = list(sampler(epoch))
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert sorted(torch.cat(batches).tolist()) == list(range(10))
    assert len(sampler()) == 3


def test_order_follows_from_seed_and_epoch() -> None:
    def order(**options: int) -> list[int]:
        return torch.cat(list(sampler(**options))).tolist()

    assert order(epoch=1) == order(epoch=1)
    assert order(epoch=1) != order(epoch=2)
    assert order(epoch=1, seed=1) != order(epoch=1, seed=2)
    assert torch.cat(list(sampler(shuffle=False))).tolist() == list(range(10))


def test_the_epoch_is_asked_for_when_the_first_batch_is() -> None:
    now = [0]
    lazy = iter(BatchIndexSampler(10, 4, True, 0, lambda: now[0]))
    now[0] = 2
    assert torch.equal(next(lazy), next(iter(sampler(2))))


def test_loaders_give_batches() -> None:
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
