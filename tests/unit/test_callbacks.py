"""What the callbacks measure and move, on cases small enough to count by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from callbacks.routing_monitor import RoutingMonitor
from callbacks.scheduled_buffer import ScheduledBuffer
from callbacks.selection_report import SelectionReport, heaviest_experts, jaccard, selected_experts
from mtl.gates import SoftmaxSelectorGate
from mtl.types import InputError, Routing


class Recorder(torch.nn.Module):
    """Stands in for the LightningModule: keeps what is logged."""

    def __init__(self, tasks: list[str]) -> None:
        super().__init__()
        self.tasks = tasks
        self.logged: dict[str, float] = {}
        self.gate = SoftmaxSelectorGate(1, 4)

    def log_dict(self, values: dict[str, float]) -> None:
        self.logged |= values

    def log(self, name: str, value: float, **options: Any) -> None:
        self.logged[name] = value


def outputs(weights: Tensor) -> dict[str, Routing]:
    return {"routing": Routing(weights)}


def monitor(batches: list[tuple[Tensor, int]], tasks: list[str]) -> dict[str, float]:
    callback, module = RoutingMonitor(), Recorder(tasks)
    callback.on_test_epoch_start(None, module)
    for weights, rows in batches:
        callback.on_test_batch_end(None, module, outputs(weights), range(rows), 0)
    callback.on_test_epoch_end(None, module)
    return module.logged


def test_monitor_counts_over_unequal_batches() -> None:
    a = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])  # one row, two tasks, three experts
    b = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]]).expand(3, -1, -1)
    logged = monitor([(a, 1), (b, 3)], ["p", "q"])
    assert logged["test/experts_per_sample/p"] == pytest.approx((2 + 3 * 1) / 4)
    assert logged["test/experts_per_sample/q"] == pytest.approx(1)
    assert logged["test/experts_per_sample"] == pytest.approx((1.25 + 1) / 2)
    assert logged["test/union_per_sample"] == pytest.approx((2 + 3 * 2) / 4)
    assert logged["test/expert_share/p/00"] == pytest.approx((0.5 + 3) / 4)
    assert logged["test/expert_share/q/02"] == pytest.approx(3 / 4)


def test_monitor_takes_static_gates_and_networks_without_a_gate() -> None:
    logged = monitor([(torch.tensor([[0.5, 0.5]]), 7)], ["p"])
    assert logged["test/experts_per_sample/p"] == pytest.approx(2)
    callback, module = RoutingMonitor(), Recorder(["p"])
    callback.on_validation_epoch_start(None, module)
    callback.on_validation_batch_end(None, module, {"routing": None}, range(2), 0)
    callback.on_validation_epoch_end(None, module)
    assert module.logged == {}


def scheduled(**options: Any) -> ScheduledBuffer:
    return ScheduledBuffer("gate.temperature", **{"start": 1.0, "end": 0.1, "epochs": 2} | options)


def trainer(step: int) -> Any:
    return SimpleNamespace(global_step=step, num_training_batches=10, log_every_n_steps=5, max_epochs=5, max_steps=-1)


def test_schedule_moves_the_buffer() -> None:
    callback, module = scheduled(), Recorder(["p"])
    callback.on_train_start(trainer(0), module)
    seen = []
    for step in (0, 10, 20, 99):
        callback.on_train_batch_start(trainer(step), module, None, 0)
        seen.append(float(module.gate.temperature))
    assert seen == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert module.logged["schedule/gate.temperature"] == pytest.approx(0.1)


def test_schedule_is_a_function_of_the_step_alone() -> None:
    for options in ({"steps": 20}, {"epochs": 2}, {"fraction": 0.4}):
        callback, module = scheduled(**{"epochs": None} | options), Recorder(["p"])
        callback.on_train_start(trainer(0), module)
        callback.on_train_batch_start(trainer(7), module, None, 0)
        assert float(module.gate.temperature) == pytest.approx(1 - 0.9 * 7 / 20)


def test_schedule_without_its_target() -> None:
    module = Recorder(["p"])
    callback = ScheduledBuffer("gate.nothing", 0, 1, epochs=1)
    with pytest.raises(InputError, match=r"gate\.temperature"):
        callback.on_train_start(trainer(0), module)
    callback = ScheduledBuffer("gate.nothing", 0, 1, epochs=1, required=False)
    callback.on_train_start(trainer(0), module)
    callback.on_train_batch_start(trainer(0), module, None, 0)


def test_schedules_of_two_targets_keep_apart() -> None:
    assert scheduled().state_key != ScheduledBuffer("gate.entropy_weight", 0, 1, epochs=1).state_key


@pytest.mark.parametrize(
    "options", [{"steps": 5}, {"epochs": None}, {"epochs": 0}, {"shape": "bent"}, {"shape": "log_linear", "end": 0.0}]
)
def test_bad_schedules(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="schedule"):
        scheduled(**options)


def test_selected_experts() -> None:
    weights = torch.tensor([[0.7, 0.3, 0.0, 0.0]])
    assert selected_experts(Routing(weights)).tolist() == [[True, True, False, False]]
    selectors = torch.tensor([[[0.9, 0.1, 0, 0], [0.2, 0.1, 0.7, 0]]])  # two selectors of one task
    assert selected_experts(Routing(weights, {}, selectors)).tolist() == [[True, False, True, False]]


def test_heaviest_experts() -> None:
    weights = torch.tensor([[0.1, 0.5, 0.0, 0.4], [1.0, 0, 0, 0]])
    assert heaviest_experts(weights, 2).tolist() == [[False, True, False, True], [True, False, False, False]]


def test_jaccard_of_pairs() -> None:
    chosen = torch.tensor([[[1, 1, 0], [1, 0, 0], [0, 0, 1]]]).bool()
    expected = torch.tensor([[[1, 0.5, 0], [0.5, 1, 0], [0, 0, 1]]], dtype=torch.float64)
    torch.testing.assert_close(jaccard(chosen), expected)


def test_selection_report_against_the_simulated_truth() -> None:
    extras = {"true_experts": torch.tensor([0, 3]), "task_group": torch.tensor([0, 0, 1])}
    run = SimpleNamespace(datamodule=SimpleNamespace(spec=SimpleNamespace(extras=extras)))
    weights = torch.tensor([[0.5, 0.5, 0, 0], [1.0, 0, 0, 0], [0, 0, 0, 1.0]])  # tasks x experts
    callback, module = SelectionReport(), Recorder(["a", "b", "c"])
    callback.on_test_epoch_start(run, module)
    callback.on_test_batch_end(run, module, outputs(weights), range(5), 0)
    callback.on_test_epoch_end(run, module)
    assert module.logged["test/true_experts_found"] == pytest.approx(1)
    assert module.logged["test/jaccard_related"] == pytest.approx(0.5)
    assert module.logged["test/jaccard_unrelated"] == pytest.approx(0)
