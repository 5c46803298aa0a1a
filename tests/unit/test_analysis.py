"""What is said of the connections of a routed network, on cases counted by hand."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from callbacks.connection_report import ConnectionReport
from mtl.analysis.patterns import active_by_kind, compare_groups, component_names, connections, describe, routed_layers
from mtl.gates import FixedGate, GumbelMatrixGate
from mtl.networks.bottom import bottom_for
from mtl.networks.components import Convolutions, Identity, Pooling
from mtl.networks.heads import Heads
from mtl.networks.routed import RoutedNetwork
from mtl.types import DataSpec, Image, TaskSpec

TASKS = [TaskSpec(name, "regression") for name in "abc"]
KINDS = [
    partial(Convolutions, channels=1, kernels=[3, 3], same=True),
    partial(Convolutions, channels=1, kernels=[[1, 7], [7, 1]], same=True),
    partial(Pooling, kind="max", kernel=3, same=True),
    Identity,
]


def network(gate: object) -> RoutedNetwork:
    spec = DataSpec({"image": Image(1, 8, 8)}, TASKS)
    return RoutedNetwork(spec, bottom_for, [{"components": KINDS}, {"components": KINDS[2:]}], gate, Heads)


def test_numbers_by_hand() -> None:
    first = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    second = torch.tensor([[1, 0], [1, 0], [1, 1]]).bool()
    values = describe([first, second])
    assert values["active_connections"] == pytest.approx(8 / 18)
    assert values["active_connections_layer_0"] == pytest.approx(4 / 12)
    assert values["active_connections_layer_1"] == pytest.approx(4 / 6)
    assert values["distinct_patterns"] == 2
    assert values["idle_tasks"] == pytest.approx(1 / 6)
    assert values["pattern_jaccard"] == pytest.approx((1 + 1 / 4 + 1 / 4) / 3)
    layers = routed_layers(network(FixedGate))
    assert component_names(layers[0]) == ["3x3-3x3", "1x7-7x1", "max", "identity"]
    by_kind = active_by_kind(layers, [first, second])
    assert by_kind == pytest.approx(
        {"3x3-3x3": 2 / 3, "1x7-7x1": 2 / 3, "max": (0 + 1) / 2, "identity": (0 + 1 / 3) / 2}
    )


def test_groups_are_recovered_when_equal_patterns_mean_equal_groups() -> None:
    group = torch.tensor([0, 0, 1, 1])
    first = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 1, 1], [0, 1, 1]]).bool()
    second = torch.tensor([[1, 0], [1, 0], [1, 0], [1, 0]]).bool()
    found = compare_groups([first, second], group)
    assert found == pytest.approx({"jaccard_related": 1, "jaccard_unrelated": 2 / 4, "groups_recovered": 1})
    assert compare_groups([second], group)["groups_recovered"] == 0  # all tasks alike
    second[1] = ~second[1]
    found = compare_groups([first, second], group)
    assert found["groups_recovered"] == 0  # tasks of a group apart in one layer
    assert found["jaccard_related"] == pytest.approx((2 / 4 + 1) / 2)
    assert "jaccard_unrelated" not in compare_groups([first[:2]], group[:2])  # one group alone


def test_connections_are_those_of_evaluation() -> None:
    layer = routed_layers(network(GumbelMatrixGate))[0].train()
    with torch.no_grad():
        layer.gate.logits.copy_(torch.tensor([[1.0, -1, 1, -1], [-1, -1, -1, -1], [1, 1, 1, 1]]))
    assert connections(layer).int().tolist() == [[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
    assert layer.gate.training


def test_report_is_logged_drawn_and_written(tmp_path: Path) -> None:
    net = network(partial(GumbelMatrixGate, initial_probability=0.9))
    logged: dict[str, float] = {}
    module = SimpleNamespace(modules=net.modules, tasks=dict.fromkeys("abc"), log_dict=logged.update)
    trainer = SimpleNamespace(global_step=0, is_global_zero=True, loggers=[], log_every_n_steps=5)
    report = ConnectionReport(str(tmp_path))
    report.on_train_start(trainer, module)
    for step in range(1, 13):
        trainer.global_step = step
        with torch.no_grad():
            routed_layers(net)[0].gate.logits[0, 0] = step
        report.on_train_batch_end(trainer, module, None, None, 0)
    report.on_validation_epoch_end(trainer, module)
    report.on_train_end(trainer, module)
    assert report.steps == [0, 5, 10, 12]
    again = ConnectionReport(str(tmp_path))
    again.load_state_dict(report.state_dict())
    again.on_test_epoch_end(trainer, module)
    assert logged["val/active_connections"] == logged["test/active_connections"] == 1.0
    assert logged["test/distinct_patterns"] == 1.0
    assert logged["test/active_connections_identity"] == 1.0
    with (tmp_path / "connections.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["layer", "component", "kind", "a", "b", "c"]
    assert rows[2] == ["0", "1", "1x7-7x1", "1", "1", "1"]
    assert len(rows) == 1 + 4 + 2
    with (tmp_path / "connection_probabilities.csv").open() as file:
        course = list(csv.DictReader(file))
    assert [int(row["step"]) for row in course] == [0, 5, 10, 12]
    assert [float(row["a/0/0"]) for row in course[1:]] == pytest.approx(
        [1 / (1 + np.exp(-n)) for n in (5, 10, 12)], 1e-5
    )
    assert len(course[0]) == 1 + 3 * (4 + 2)
    for name in ("connections", "connection_probabilities"):
        assert np.unique(imread(tmp_path / f"{name}.png")).size > 20


def test_other_networks_are_left_alone(tmp_path: Path) -> None:
    module = SimpleNamespace(modules=torch.nn.Linear(2, 2).modules, log_dict=None)
    report = ConnectionReport(str(tmp_path / "none"))
    report.on_validation_epoch_end(None, module)
    report.on_test_epoch_end(None, module)
    assert not (tmp_path / "none").exists()
    report.on_train_start(SimpleNamespace(global_step=0), module)


def test_of_many_looks_every_second_is_kept(tmp_path: Path) -> None:
    net = network(GumbelMatrixGate)
    report = ConnectionReport(str(tmp_path))
    for step in range(201):
        report.on_train_end(SimpleNamespace(global_step=step), net)
    assert report.steps == list(range(0, 201, 2))
    report.on_train_end(SimpleNamespace(global_step=200), net)  # a run that goes on looks at no step twice
    assert len(report.steps) == len(report.probabilities) == 101
