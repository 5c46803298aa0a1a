"""Batches of one task: which rows each step takes, in which order, and how processes divide them."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import pytest
import torch
from mtl.data_modules.task_batches import (
    POOL_BATCHES,
    TaskEvaluationSampler,
    TaskOrder,
    TaskSampler,
    TasksDataModule,
    TasksDataset,
)

from mtl.checks import InputError
from mtl.types import Batch, DataSpec, Numeric, TaskSpec

SIZES = {"a": 10, "b": 4, "c": 7}


def sampler(order: str = "round_robin", epoch: int = 0, done: int = 0, **options: Any) -> TaskSampler:
    return TaskSampler(SIZES, 4, 5, lambda: (epoch, done), order, **options)


LENGTHS = {
    task: torch.randint(1, 60, (size,), generator=torch.Generator().manual_seed(1)) for task, size in SIZES.items()
}


def items(step: Any) -> list[tuple[str, list[int]]]:
    """Return the tasks of a step and the numbers of their rows."""
    return [(task, rows.tolist()) for task, rows in (step if isinstance(step, list) else [step])]


def test_round_robin_takes_every_task_once_in_each_round() -> None:
    steps = list(sampler())
    assert len(steps) == len(sampler()) == 9  # the longest task has 3 batches
    rounds = [[task for task, _ in steps[start : start + 3]] for start in (0, 3, 6)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    rows = {name: torch.cat([index for task, index in steps if task == name]).tolist() for name in SIZES}
    assert sorted(rows["a"]) == list(range(10))  # each row once
    assert Counter(rows["b"]) == Counter(list(range(4)) * 3)  # repeated, in a new order each time
    assert rows["b"][:4] != rows["b"][4:8] or rows["b"][:4] != rows["b"][8:]


@pytest.mark.parametrize(
    ("order", "options", "power"),
    [
        ("proportional", {}, 1.0),
        ("temperature", {"temperature": 3.0}, 1 / 3),
        ("uniform", {}, 0.0),
    ],
)
def test_random_orders_have_the_stated_probabilities(order: str, options: dict[str, Any], power: float) -> None:
    """Accept 5 standard errors of 4,000 draws: a correct sampler fails less than once in half a million runs."""
    sizes = {"a": 80, "b": 10, "c": 30}
    names = [task for e in range(40) for task, _ in TaskSampler(sizes, 1, 0, lambda e=e: (e, 0), order, **options)]
    count = len(names)
    chances = torch.tensor([float(size) ** power for size in sizes.values()])
    for task, chance in zip(sizes, (chances / chances.sum()).tolist(), strict=True):
        assert abs(names.count(task) / count - chance) < 5 * (chance * (1 - chance) / count) ** 0.5


LENGTHS_OR_NOT = pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["any length", "by length"])


@LENGTHS_OR_NOT
@pytest.mark.parametrize("order", get_args(TaskOrder))
@pytest.mark.parametrize("tasks_per_step", [1, 2, 3])
def test_epoch_depends_on_seed_and_number_and_resumes(order: str, tasks_per_step: int, lengths: Any) -> None:
    def steps(epoch: int, done: int = 0, seed: int = 5) -> list[Any]:
        options = {"lengths": lengths, "tasks_per_step": tasks_per_step}
        return list(map(items, TaskSampler(SIZES, 2, seed, lambda: (epoch, done), order, **options)))

    whole = steps(3)
    assert whole == steps(3)
    assert whole != steps(4)
    assert whole != steps(3, seed=6)
    assert all(steps(3, done) == whole[done:] for done in range(len(whole) + 1))
    if tasks_per_step > 1 and order not in ("shuffled", "proportional"):
        assert all(len({task for task, _ in step}) == len(step) for step in whole)


def test_processes_take_the_same_task_and_divide_its_rows() -> None:
    both = [list(TaskSampler(SIZES, 2, 5, lambda: (0, 0), rank=rank, world_size=2)) for rank in (0, 1)]
    alone = list(sampler())  # a batch of 4 is two of 2
    for (first, one), (second, two), (task, rows) in zip(*both, alone, strict=True):
        assert first == second == task
        assert torch.equal(torch.cat([one, two]), rows)
    with pytest.raises(InputError, match="task b: 4 training rows are fewer than the 5 processes"):
        TaskSampler(SIZES, 2, 5, lambda: (0, 0), world_size=5)


@LENGTHS_OR_NOT
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_evaluation_sees_every_row_once(world_size: int, lengths: Any) -> None:
    parts = [list(TaskEvaluationSampler(SIZES, 4, rank, world_size, lengths)) for rank in range(world_size)]
    assert len({len(part) for part in parts}) == 1
    seen = Counter((task, row) for part in parts for task, rows in part for row in rows.tolist())
    assert seen == Counter((task, row) for task, size in SIZES.items() for row in range(size))
    if lengths and world_size == 1:
        whole = [lengths["a"][rows] for task, rows in parts[0] if task == "a"]
        assert torch.equal(torch.cat(whole), lengths["a"].sort().values)


class Rows(TasksDataModule):
    def load_tasks(self) -> tuple[DataSpec, dict[str, dict[str, Batch]]]:
        def split() -> dict[str, Batch]:
            return {task: Batch({"x": torch.randn(n, 2)}, {task: torch.randn(n)}) for task, n in SIZES.items()}

        spec = DataSpec({"x": Numeric(2)}, [TaskSpec(task, "regression") for task in SIZES])
        return spec, {name: split() for name in ("train", "val", "test")}


def test_data_module_serves_batches_of_one_task_and_super_batches() -> None:
    data = Rows(batch_size=4, eval_batch_size=6)
    data.setup()
    for batch in data.train_dataloader():
        assert list(batch.targets) in (["a"], ["b"], ["c"])
        assert len(batch) == len(next(iter(batch.targets.values())))
    assert sum(len(batch) for batch in data.val_dataloader()) == 21
    together = Rows(batch_size=4, tasks_per_step=2)
    together.setup()
    assert all(len(batches) == 2 for batches in list(together.train_dataloader())[:-1])
    rows = TasksDataset(data.tasks["train"])
    assert len(rows) == 21


def test_proportional_order_keeps_the_shares_of_rows_in_super_batches() -> None:
    """With different tasks in a step, the smallest one would get a third of all turns."""
    drawn = [name for e in range(40) for step in sampler("proportional", e, tasks_per_step=3) for name, _ in step]
    for name, size in SIZES.items():
        assert drawn.count(name) / len(drawn) == pytest.approx(size / sum(SIZES.values()), abs=0.15)


@pytest.mark.parametrize("tasks_per_step", [1, 2])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_shuffled_takes_each_batch_of_each_task_once(lengths: Any, tasks_per_step: int) -> None:
    steps = list(sampler("shuffled", 1, lengths=lengths, tasks_per_step=tasks_per_step))
    assert len(steps) == len(sampler("shuffled", tasks_per_step=tasks_per_step)) == (6 if tasks_per_step == 1 else 3)
    seen = [(task, row) for step in steps for task, rows in items(step) for row in rows]
    assert len(seen) == len(set(seen)) == sum(SIZES.values())
    assert [items(step)[0][0] for step in steps] != sorted(items(step)[0][0] for step in steps)


def test_batches_hold_rows_of_similar_lengths() -> None:
    size, rows = 4, 4 * POOL_BATCHES * 2 + 3
    lengths = torch.randint(1, 100, (rows,))
    plain = [index for _, index in TaskSampler({"a": rows}, size, 0, lambda: (0, 0), "shuffled")]
    sorted_ = [
        index for _, index in TaskSampler({"a": rows}, size, 0, lambda: (0, 0), "shuffled", lengths={"a": lengths})
    ]

    def padding(batches: list[torch.Tensor]) -> float:
        real, total = int(lengths.sum()), sum(int(lengths[index].max()) * len(index) for index in batches)
        return 1 - real / total

    assert sorted(torch.cat(sorted_).tolist()) == list(range(rows))
    assert len(sorted_) == len(plain)
    assert padding(sorted_) < 0.1 < 0.3 < padding(plain)
    longest = [int(lengths[index].max()) for index in sorted_]
    assert longest != sorted(longest)  # not from short to long


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_divide_batches_of_similar_lengths(world_size: int) -> None:
    def steps(rank: int) -> list[Any]:
        return list(
            TaskSampler(SIZES, 2, 5, lambda: (0, 0), "shuffled", rank=rank, world_size=world_size, lengths=LENGTHS)
        )

    together = list(zip(*map(steps, range(world_size)), strict=True))
    assert all(len({task for task, _ in step}) == 1 and all(len(rows) for _, rows in step) for step in together)
    seen = [(task, row) for step in together for task, rows in step for row in rows.tolist()]
    assert len(seen) == len(set(seen))
    assert sum(SIZES.values()) - len(seen) < len(SIZES) * world_size  # too few rows for each process to have one
