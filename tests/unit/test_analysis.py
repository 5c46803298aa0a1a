"""What is said of the connections of a routed network, on cases counted by hand."""

from __future__ import annotations

import csv
from functools import partial
from itertools import combinations, pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from mtl.callbacks.routing_monitor import RoutingMonitor
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mtl.analysis.conflicts import as_table, draw
from mtl.analysis.figures import connections as connections_figure
from mtl.analysis.figures import heat_map
from mtl.analysis.patterns import (
    active_by_kind,
    compare_groups,
    component_names,
    connections,
    describe,
    layers_with_gates,
    random_jaccard,
)
from mtl.analysis.report import Report
from mtl.analysis.tally import MAX_PROBABILITIES, Probabilities, RoutingStats, gather_routing_stats
from mtl.gates import FixedGate, GumbelMatrixGate
from mtl.networks.bottom import build_bottom
from mtl.networks.components import Convolutions, Identity, Pooling
from mtl.networks.heads import Heads
from mtl.networks.routed import RoutedNetwork
from mtl.types import Batch, DataSpec, Image, Routing, TaskSpec
from tests.standins import Recorder, trainer

TASKS = [TaskSpec(name, "regression") for name in "abc"]
KINDS = [
    partial(Convolutions, channels=1, kernels=[3, 3], same=True),
    partial(Convolutions, channels=1, kernels=[[1, 7], [7, 1]], same=True),
    partial(Pooling, kind="max", kernel=3, same=True),
    Identity,
]


def network(gate: object) -> RoutedNetwork:
    spec = DataSpec({"image": Image(1, 8, 8)}, TASKS)
    return RoutedNetwork(spec, build_bottom, [{"components": KINDS}, {"components": KINDS[2:]}], gate, Heads)


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
    layers = layers_with_gates(network(FixedGate))
    assert list(layers) == ["layers.0", "layers.1"]
    kinds = [component_names(layer) for layer in layers.values()]
    assert kinds[0] == ["3x3-3x3", "1x7-7x1", "max", "identity"]
    by_kind = active_by_kind(kinds, [first, second])
    alone = {f"{kind}{end}": 2 / 3 for kind in ("3x3-3x3", "1x7-7x1") for end in ("", "_layer_0")}
    layers_apart = {"max_layer_0": 0, "max_layer_1": 1, "identity_layer_0": 0, "identity_layer_1": 1 / 3}
    assert by_kind == pytest.approx(alone | layers_apart | {"max": (0 + 1) / 2, "identity": (0 + 1 / 3) / 2})


def test_tallies_of_several_gpus_are_added_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        tensors: list[dict[str, Any]] = [
            {name: torch.ones(2, device=f"cuda:{gpu}") for name in ("task_rows", "active", "mixed", "share")}
            for gpu in (0, 1)
        ]
        mine, theirs = (RoutingStats(2, rows=3, **each) for each in tensors)
        monkeypatch.setattr("mtl.analysis.tally.gather", lambda own: [own, {"mixture": theirs.on_cpu()}])
        found = gather_routing_stats({"mixture": mine})["mixture"]
    assert found.rows == 6
    assert found.share.device.type == "cpu"


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


def test_jaccard_index_of_random_selections() -> None:
    pairs = list(product(combinations(range(6), 2), repeat=2))
    index = [len({*a} & {*b}) / len({*a} | {*b}) for a, b in pairs]
    assert random_jaccard(6, 2) == pytest.approx(sum(index) / len(pairs))
    assert random_jaccard(4, 4) == pytest.approx(1)


def test_connections_are_those_of_evaluation() -> None:
    gate = network(GumbelMatrixGate).layers[0].gate.train()
    with torch.no_grad():
        gate.logits.zero_()[..., 0] = torch.tensor([[1.0, -1, 1, -1], [-1, -1, -1, -1], [1, 1, 1, 1]])
    assert connections(gate, 3).int().tolist() == [[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
    assert gate.training


def test_report_is_logged_drawn_and_written(tmp_path: Path) -> None:
    net = network(partial(GumbelMatrixGate, initial_probability=0.9))
    inputs = {"image": torch.rand(6, 1, 8, 8)}
    batch = Batch(inputs, {name: torch.zeros(6) for name in "abc"})
    module, run = Recorder(net, "abc"), trainer(log_every_n_steps=5)
    monitor = RoutingMonitor(str(tmp_path))
    monitor.on_train_start(run, module)
    for step in range(1, 13):
        run.global_step = step
        with torch.no_grad():
            net.layers[0].gate.logits[0, 0] = torch.tensor([step, 0.0])
        found = {name: [routing] for name, routing in net.train()(inputs).routings.items()}
        monitor.on_train_batch_end(run, module, {"routings": found}, batch, 0)
    outputs = {"routings": net.eval()(inputs).routings}
    monitor.on_validation_epoch_start(run, module)
    monitor.on_validation_batch_end(run, module, outputs, batch, 0)
    monitor.on_validation_epoch_end(run, module)
    monitor.on_train_end(run, module)
    assert monitor.probabilities.steps == [0, 5, 10, 12]
    again = RoutingMonitor(str(tmp_path))
    again.load_state_dict(monitor.state_dict())
    again.on_test_epoch_start(run, module)
    again.on_test_batch_end(run, module, outputs, batch, 0)
    again.on_test_epoch_end(run, module)
    logged = run.callback_metrics
    assert logged["val/active_connections"] == logged["test/active_connections"] == 1.0
    assert logged["test/distinct_patterns"] == 1.0
    assert logged["test/active_connections_identity"] == 1.0
    assert logged["test/flops_dense"] >= logged["test/flops_selected"] > 0
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


def test_names_with_dollar_signs_are_no_formulas(tmp_path: Path) -> None:
    """Two of them in one text, as in "$x{$", would be a formula with a mistake, and no picture would be drawn."""
    tasks = ["price in $ {", "$"]
    rows = [(step, "cosine", layer, *tasks, 0.5) for step in (1, 2) for layer in ("all", "$_")]
    mixture = Report(tasks, {"$": tally(torch.eye(2))}, {}, Probabilities(), {})
    routed = Report(tasks, {}, {}, Probabilities(), {"$": torch.ones(2, 3, dtype=torch.bool)})
    for name, figure in {"conflict": draw([as_table(rows)]), **mixture.figures(), **routed.figures()}.items():
        figure.savefig(tmp_path / f"{name}.png")
    assert len(list(tmp_path.iterdir())) == 3


def test_pictures_of_hundreds_of_tasks_stay_small() -> None:
    shares = torch.eye(3)[torch.arange(300) % 3]
    figure = heat_map(shares, [f"t{task}" for task in range(300)])
    [axes, _] = figure.axes
    assert max(figure.get_size_inches()) < 30
    assert [axes.get_yticks().size, axes.get_ylabel()] == [0, "300 tasks, by the expert with the largest weight"]
    assert np.array_equal(axes.images[0].get_array(), np.repeat(np.eye(3), 100, 0))
    assert connections_figure([shares], [""] * 300).get_size_inches()[1] < 20


def test_affinities_show_other_tasks_with_their_values() -> None:
    """A task's own affinity is far larger: it would set the colours of all. The later part of a run does not count."""
    values = {("a", "a"): 0.5, ("a", "b"): 0.01, ("b", "a"): -0.002, ("b", "b"): 0.7}
    rows = [(1, "affinity", "all", *pair, value) for pair, value in values.items()]
    late = [(4, *row[1:5], 9.0) for row in rows]
    two = [[(*row[:5], value * factor) for *row, value in rows] for factor in (0.5, 1.5)]
    [image] = draw([as_table([*each, *late]) for each in two]).axes[3].images
    assert np.allclose(image.get_array().filled(np.nan), [[np.nan, 1.0], [-0.2, np.nan]], equal_nan=True)
    assert image.get_clim() == (-1.0, 1.0)
    assert [text.get_text() for text in image.axes.texts] == ["", "1", "-0.2", ""]


def tally(weights: Tensor) -> RoutingStats:
    found = RoutingStats(len(weights))
    found.add(Routing(weights), 4)
    return found


def test_long_histories_of_probabilities_are_thinned() -> None:
    gates, kept = {"layers.0": SimpleNamespace(gate=GumbelMatrixGate(2, 3))}, Probabilities()
    for step in range(MAX_PROBABILITIES + 1):
        kept.add(step, gates)
    assert kept.steps == list(range(0, MAX_PROBABILITIES + 1, 2))
    kept.add(MAX_PROBABILITIES, gates)  # a resumed run adds no step twice
    assert len(kept.steps) == len(kept.values["layers.0"]) == MAX_PROBABILITIES // 2 + 1
    for step in range(MAX_PROBABILITIES + 1, 7 * MAX_PROBABILITIES):
        kept.add(step, gates)
    gaps = [after - before for before, after in pairwise(kept.steps)]
    assert max(gaps) <= 32  # the first steps are not thinned each time
