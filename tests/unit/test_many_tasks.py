"""Hundreds of tasks: what is stored, computed and measured together has the numbers of each task alone."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp._common_utils import collect_grad_tensors
from torch.utils._python_dispatch import TorchDispatchMode

from mtl.experts.dense import StackedDense
from mtl.networks.baselines import SharedBottom
from mtl.networks.bottom import TabularBottom
from mtl.networks.ensemble import Ensemble
from mtl.networks.heads import Heads
from mtl.training.distillation import Distillation
from mtl.training.evaluation import Evaluation
from mtl.training.losses import task_loss_sums
from mtl.training.module import MultiTaskModule
from mtl.types import MISSING_CLASS, Batch, DataSpec, NetworkOutput, Numeric, TaskSpec
from mtl.types.task_tensors import TaskTensors, map_tasks, stack_tasks

ROWS = 13


def tasks_of(number: int) -> list[TaskSpec]:
    """Return ``number`` tasks of each of five sorts, one sort after the other."""
    tasks = []
    for n in range(number):
        classes = {"num_classes": 3, "class_weights": (1.0, 2.0 + n, 0.5), "metrics": ("accuracy", "auroc")}
        tasks += [
            TaskSpec(f"yes{n}", "binary", pos_weight=1.0 + n, smoothing=0.01 * n),
            TaskSpec(f"value{n}", "regression", mean=10.0 * n, std=1.0 + n),
            TaskSpec(f"class{n}", "multiclass", **classes),
            TaskSpec(f"range{n}", "regression", mean=5.0, std=2.0, loss="quantile", quantiles=(0.1, 0.9)),
            TaskSpec(f"count{n}", "regression", loss="poisson", mean=0.5 * n),
        ]
    return tasks


def rows(tasks: list[TaskSpec]) -> Batch:
    draw = torch.Generator().manual_seed(3)
    targets: dict[str, Tensor] = {}
    for task in tasks:
        there = torch.rand(ROWS, generator=draw) < 0.6
        if task.kind == "multiclass":
            targets[task.name] = torch.randint(3, (ROWS,), generator=draw).where(there, MISSING_CLASS)
        else:
            label = torch.randint(2, (ROWS,), generator=draw).float()
            label = label if task.kind == "binary" else 3 * label.double() + 2
            targets[task.name] = label.where(there, torch.nan)
    weights = {task.name: torch.rand(ROWS, generator=draw) for task in tasks}
    return Batch({"x": torch.randn(ROWS, 4, generator=draw)}, targets, weights, row_ids=torch.arange(ROWS))


def network(tasks: list[TaskSpec], members: int = 1) -> Any:
    torch.manual_seed(0)
    spec = DataSpec({"x": Numeric(4)}, tasks)
    parts = (TabularBottom, partial(StackedDense, units=[5]), Heads)
    networks = [SharedBottom(spec, *parts) for _ in range(members)]
    return Ensemble(networks) if members > 1 else networks[0]


def module(tasks: list[TaskSpec], members: int = 1) -> MultiTaskModule:
    teacher = Distillation(network(tasks), tasks, layers=False)
    lightning_module = MultiTaskModule(network(tasks, members), tasks, torch.optim.Adam, {}, teacher)
    lightning_module._is_shown = False
    return lightning_module


def test_tensors_of_tasks_are_views_of_blocks() -> None:
    tensors = {"a": torch.arange(3.0), "k": torch.arange(3), "b": torch.arange(3.0) + 5, "span": torch.zeros(3, 2)}
    blocks = TaskTensors.stack(tensors)
    assert [*blocks] == [*tensors]
    assert [block.shape for block in blocks.blocks] == [(3, 2), (3, 1), (3, 1, 2)]
    for copied in (blocks, pickle.loads(pickle.dumps(blocks))):
        assert all(torch.equal(copied[name], tensors[name]) for name in tensors)
    assert stack_tasks(blocks, ["a", "b"]).data_ptr() == blocks.blocks[0].data_ptr()
    for names in (["b", "a"], ["b"], ["k", "k"]):
        assert torch.equal(stack_tasks(blocks, names), torch.stack([tensors[name] for name in names], 1))
    assert torch.equal(stack_tasks(blocks, ["a", "k"]), torch.stack([tensors["a"], tensors["k"]], 1))
    blocks["b"][1] = 7
    assert torch.equal(map_tasks(blocks, lambda value: value[1:])["b"], torch.tensor([7.0, 7.0]))
    assert TaskTensors.stack(blocks) is blocks


def test_losses_and_gradients_of_blocks_are_those_of_single_tasks_to_the_bit() -> None:
    tasks = tasks_of(3)
    specs, batch = {task.name: task for task in tasks}, rows(tasks)
    output = network(tasks)(batch.inputs).predictions
    blocks = TaskTensors(output.places, [block.detach().requires_grad_() for block in output.blocks])
    stacked = batch.in_blocks()
    names, totals, counts = task_loss_sums(specs, blocks, stacked.targets, stacked.weights)
    totals.sum().backward()
    gradients = TaskTensors(blocks.places, [block.grad for block in blocks.blocks])  # type: ignore[misc]  # a gradient is None only before the backward pass
    assert sorted(names) == sorted(specs)
    for name, total, count in zip(names, totals, counts, strict=True):
        alone = {name: blocks[name].detach().requires_grad_()}
        _, loss, number = task_loss_sums(specs, alone, batch.targets, batch.weights)
        loss.sum().backward()
        assert torch.equal(loss[0], total), name
        assert torch.equal(number[0], count)
        assert torch.equal(alone[name].grad, gradients[name]), name


def test_evaluation_of_blocks_has_the_rows_of_single_tasks_to_the_bit() -> None:
    """In several batches, one of them with fewer tasks, and in another order of the rows."""
    tasks = tasks_of(2)
    batch, outputs = rows(tasks), {"yes0", "value1"}
    together, alone = Evaluation(tasks, outputs), Evaluation(tasks, outputs)
    with torch.no_grad():
        for part in (torch.tensor([9, 4, 2]), torch.tensor([0, 1, 3, 11]), torch.tensor([5, 6, 7, 8, 10, 12])):
            some = batch.in_blocks().select(part)
            names = [task.name for task in tasks if len(part) < 6 or task.kind == "binary"]
            predictions = network(tasks)(some.inputs, names).predictions
            together.update(predictions, some.targets, some.row_ids, some.weights)
            for name in names:
                alone.update(
                    {name: predictions[name]}, {name: some.targets[name]}, some.row_ids, {name: some.weights[name]}
                )
    assert together.compute() == pytest.approx(alone.compute(), rel=0, abs=0, nan_ok=True)
    first, second = together.gathered(), alone.gathered()
    assert first.keys() == second.keys() == {task.name for task in tasks}
    for name, labelled in first.items():
        columns, expected = labelled.columns(), second[name].columns()
        assert columns.keys() == expected.keys()
        assert ("output" in columns) == (name in outputs or bool(together.tasks[name].quantiles))
        assert all(torch.equal(values, expected[column]) for column, values in columns.items())


class Counter(TorchDispatchMode):
    """Count the operations of torch."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += "unbind" not in str(func) and "detach" not in str(func)
        return func(*args, **kwargs or {})


def operations(call: Callable[[], object]) -> int:
    call()  # fills caches
    with Counter() as counter:
        call()
    return counter.calls


@pytest.mark.parametrize("members", [1, 3])
def test_the_number_of_operations_of_a_step_does_not_depend_on_the_number_of_tasks(members: int) -> None:
    counts = []
    for number in (2, 20):
        tasks = tasks_of(number)
        lightning_module, batch = module(tasks, members), rows(tasks).in_blocks()

        def step(lightning_module: MultiTaskModule = lightning_module, batch: Batch = batch) -> None:
            part = batch.select(torch.arange(ROWS)).to("cpu")
            lightning_module.training_step(part, 0)["loss"].backward()

        def evaluate(lightning_module: MultiTaskModule = lightning_module, batch: Batch = batch) -> None:
            with torch.no_grad():
                lightning_module.validation_step(batch.select(torch.arange(ROWS)), 0)

        counts.append((operations(step), operations(evaluate)))
    assert counts[0] == counts[1]


def test_sharded_processes_find_the_gradients_of_blocks() -> None:
    """FSDP looks for the tensors of an output, whose gradients it awaits, in dicts, lists and dataclasses."""
    block = torch.ones(2, 3, requires_grad=True)
    assert collect_grad_tensors(NetworkOutput(TaskTensors({"a": (0, 1)}, [block]))) == (block,)
