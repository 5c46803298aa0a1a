"""What the callbacks measure and move, on cases small enough to count by hand."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mtl.callbacks.default_callbacks import LayerAdaptation
from mtl.callbacks.routing_monitor import RoutingMonitor

from mtl.analysis.figures import curves
from mtl.analysis.patterns import compare_selections, heaviest_experts, jaccard, selected_experts
from mtl.analysis.report import Report
from mtl.analysis.tally import History, Probabilities, RoutingStats
from mtl.experts.dense import StackedDense
from mtl.gates import CometGate, TopKGate
from mtl.gates.permuted import Permutation
from mtl.networks.bottom import TabularBottom
from mtl.networks.heads import Heads
from mtl.networks.mixture import MixtureOfExperts
from mtl.networks.mmoe import MMoE
from mtl.types import Batch, Categorical, DataSpec, Routing, TaskSpec
from tests.standins import Recorder, trainer


def monitor(batches: list[tuple[Routing | None, int]], tasks: str, ground_truth: Any = None) -> dict[str, float]:
    """Return the values of a test pass."""
    callback, module, logged = RoutingMonitor("unused"), Recorder(tasks=tasks), {}
    shown = SimpleNamespace(log_metrics=lambda row, step: logged.update(row), save=lambda: None)
    data = SimpleNamespace(spec=SimpleNamespace(ground_truth=ground_truth or {}))
    run = trainer(7, is_global_zero=False, testing=True, loggers=[shown], datamodule=data)
    callback.on_test_epoch_start(run, module)
    callback._flops = lambda *rest: ({}, {})  # there is no network
    for routing, rows in batches:
        batch = Batch({"x": torch.ones(rows, 1)}, {})
        callback.on_test_batch_end(run, module, {"routings": {"mixture": routing} if routing else {}}, batch)
    callback.on_test_epoch_end(run, module)
    measured = {str(key): value for key, (value, _) in module.measured.items()}
    assert {name: pytest.approx(measured[name]) for name in logged if name != "epoch"}.items() <= logged.items()
    return measured


def test_monitor_counts_over_unequal_batches() -> None:
    a = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])  # one row, two tasks, three experts
    b = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]]).expand(3, -1, -1)
    logged = monitor([(Routing(a), 1), (Routing(b), 3), (Routing(b[:0]), 0)], "pq")
    expected = {"p/experts_per_sample": (2 + 3 * 1) / 4, "q/experts_per_sample": 1, "experts_per_sample": 2.25 / 2}
    expected |= {"union_per_sample": (2 + 3 * 2) / 4, "p/expert_share_00": (0.5 + 3) / 4, "q/expert_share_02": 3 / 4}
    expected |= {"routing_entropy": math.log(2) / 2 / 4, "dead_experts": 0}
    assert {name: logged[f"test/{name}"] for name in expected} == pytest.approx(expected, abs=1e-5)
    assert "test/binary_selectors" not in logged


def test_monitor_looks_at_selectors_and_dead_experts() -> None:
    selectors = torch.tensor([[[[1.0, 0, 0], [0.9, 0.1, 0]]], [[[0, 1.0, 0], [0, 1.0, 0]]]])  # [B=2, T=1, K=2, E=3]
    logged = monitor([(Routing(selectors.mean(-2), {}, selectors), 2)], "p")
    assert logged["test/binary_selectors"] == pytest.approx(3 / 4)
    assert logged["test/dead_experts"] == 1


def test_monitor_takes_static_gates_and_networks_without_a_gate() -> None:
    logged = monitor([(Routing(torch.tensor([[0.5, 0.5]])), 7)], "p")
    assert logged["test/p/experts_per_sample"] == pytest.approx(2)
    assert monitor([(None, 2)], "p") == {}


def test_history_records_when_selectors_became_binary() -> None:
    history = History()
    soft, hard = torch.tensor([[[0.5, 0.5]]]), torch.tensor([[[0.0, 1.0]]])
    seen = []
    for step, selectors in enumerate([soft, hard, hard, soft, hard], start=1):
        history.add(step, [Routing(selectors.mean(-2), {}, selectors)], 16, 1)
        seen.append(history.binary_since)
    assert seen == [0, 2, 2, 0, 5]
    nearly = hard.repeat(200, 1, 1, 1).index_fill(0, torch.tensor([0]), 0.5)  # one soft example of 200
    history.add(7, [Routing(nearly.mean(-2), {}, nearly)], 16, 1)
    assert history.binary_since == 5
    for step in range(8, 1200):
        history.add(step, [Routing(hard.mean(-2), {}, hard)], 16, 1)
    assert len(history.steps) == len(history.shares) <= 1000
    history.add(1200, [Routing(torch.rand(3, 5))], 14, 3)
    assert history.shares_by_step()[0][-1] < 1200  # too many shares to keep


def test_flops_of_training_by_hand() -> None:
    """Top-k with 1 of 3 experts and a dense gate: a third of the products of experts, or all of them, three times."""
    spec = DataSpec({"id": Categorical(7)}, [TaskSpec("p", "binary"), TaskSpec("q", "binary")])
    parts = (partial(TabularBottom, embedding_dim=4), partial(StackedDense, units=[5]), TopKGate, partial(Heads))
    module = Recorder(MMoE(spec, 3, *parts).eval(), "pq")
    dense = 2 * (3 * 4 * 5 + 2 * 3 * 4 + 2 * 3 * 5 + 2 * 5)
    one, other = torch.tensor([1.0, 0, 0]), torch.tensor([0, 0.5, 0.5])
    for weights, expected in (
        (torch.stack([one, one]), dense - 2 * (2 * 4 * 5) - 4 * 2 * 5),  # both tasks use the same expert
        (torch.stack([one, other]).expand(6, 2, 3), dense - 3 * 2 * 5),  # every expert is in use
    ):
        callback, history = RoutingMonitor("unused"), History()
        history.add(1, [Routing(weights)], 16, 2)
        history.add(2, [Routing(weights)], 16, 2)
        targets = {"p": torch.ones(7), "q": torch.ones(7)}
        callback._sample, callback._trained = Batch({"id": torch.arange(7)}, targets), 2
        found = callback._flops(module, Report(["p", "q"], {}, {"mixture": history}, Probabilities(), {}))
        every = {"flops_dense": dense, "flops_selected": dense}
        trained = {name: 3 * value for name, value in every.items()}
        assert found == (every | {"multiply_adds": dense / 2}, trained)  # no mixture was seen in the test
        tally = RoutingStats(2)
        tally.add(Routing(weights), 6)
        report = Report(["p", "q"], {"mixture": tally}, {"mixture": history}, Probabilities(), {})
        found = callback._flops(module, report)
        assert found[0]["flops_selected"] == pytest.approx(expected)
        assert found[1]["flops_selected"] == pytest.approx(3 * expected)
        used = int((weights > 0).sum(-1).reshape(-1, 2)[0].sum())  # by the two tasks, a shared expert counts twice
        assert found[0]["multiply_adds"] == pytest.approx(used * (4 * 5 + 5) + 2 * 3 * 4 + 2 * 5)


def test_multiply_adds_of_a_tree_by_hand() -> None:
    """COMET with 3 experts: the split 0 has the leaf of expert 2 to its right, and split 1 the leaves of 0 and 1.

    A path to expert 2 has a split and a leaf, one to expert 0 or 1 two splits and a leaf; each costs 4 multiply-adds.
    """
    spec = DataSpec({"id": Categorical(7)}, [TaskSpec("p", "binary"), TaskSpec("q", "binary")])
    parts = (partial(TabularBottom, embedding_dim=4), partial(StackedDense, units=[5]))
    gate = partial(CometGate, k=1)
    for permutation, selected in ((None, (0, 2)), (Permutation, (1, 0))):
        mixed = {} if permutation is None else {"permutation": permutation}
        network = MMoE(spec, 3, *parts, gate, partial(Heads), **mixed).eval()
        if permutation is not None:  # output j takes the weight of order[j]: experts 0 and 2 become 1 and 0
            network.mixture.gate.permutation.harden(torch.tensor([[2, 0, 1]]))
        module = Recorder(network, "pq")
        leaves = torch.nn.functional.one_hot(torch.tensor(selected), 3).float().expand(7, 2, 3)
        callback = RoutingMonitor("unused")
        callback.on_test_epoch_start(trainer(), module)
        batch = Batch({"id": torch.arange(7)}, {"p": torch.ones(7), "q": torch.ones(7)})
        outputs = {"routings": {"mixture": Routing(leaves, {}, leaves[:, :, None])}}
        callback.on_test_batch_end(trainer(), module, outputs, batch, 0)
        found = callback._flops(module, Report(["p", "q"], callback._tallies, {}, Probabilities(), {}))[0]
        experts, paths, mixtures, heads = 2 * 4 * 5, (3 + 2) * 4, 2 * 5, 2 * 5
        assert found["multiply_adds"] == pytest.approx(experts + paths + mixtures + heads)
        every_node = 2 * 5 * 4  # the execution computes all splits and leaves of both trees
        assert found["flops_selected"] == 2 * (experts + every_node + mixtures + heads)


def test_weights_below_1e_5_are_not_counted_as_experts() -> None:
    logged = monitor([(Routing(torch.tensor([[[1.0, 1.1e-5, 0.9e-5, 0.0]]])), 1)], "p")
    assert (logged["test/experts_per_sample"], logged["test/union_per_sample"]) == (2, 3)


def test_share_of_the_steps_until_selectors_are_binary() -> None:
    history, tally = History(), RoutingStats(1)
    soft, hard = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]]), torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])  # [T, K, E]
    for step, selectors in enumerate([soft, soft, hard, hard], start=1):
        history.add(10 * step, [Routing(selectors.mean(-2), {}, selectors)], 16, 1)
    tally.add(Routing(hard.mean(-2), {}, hard), 3)
    report = Report(["p"], {"mixture": tally}, {"mixture": history}, Probabilities(), {})
    assert report.binary_after(40) == {"binary_after": 0.75}
    history.add(50, [Routing(soft.mean(-2), {}, soft)], 16, 1)
    assert math.isnan(report.binary_after(50)["binary_after"])
    other = Report(["p"], {"mixture": tally}, {"mixture": History()}, Probabilities(), {})
    assert other.binary_after(50) == {}


def test_execution_adapts_once_in_an_accumulated_step(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = MixtureOfExperts(3, 1, 4, TopKGate, partial(StackedDense, units=[2]))
    seen: list[int] = []
    monkeypatch.setattr(LayerAdaptation, "EVERY", 2)
    layer.dispatch.adapt = lambda *weights: seen.extend(map(len, weights))
    module, callback = Recorder(torch.nn.ModuleDict({"mixture": layer})), LayerAdaptation()
    for batch in range(12):
        rows = torch.full((batch + 1, 1, 4), 0.25)
        outputs = {"routings": {"mixture": [Routing(rows, exact_zeros=True), Routing(rows[:1], exact_zeros=True)]}}
        callback.on_train_batch_end(
            trainer((batch + 1) // 3, num_training_batches=12, accumulate_grad_batches=3), module, outputs, None, batch
        )
    assert seen == [3, 1, 9, 1]  # the batches on which steps 1 and 3 were taken


def test_execution_follows_all_batches_of_a_step() -> None:
    layer = MixtureOfExperts(3, 2, 4, TopKGate, partial(StackedDense, units=[2]))
    module, callback = Recorder(torch.nn.ModuleDict({"mixture": layer})), LayerAdaptation()
    full, narrow = torch.full((6, 1, 4), 0.25), torch.eye(4)[:2, None]

    def is_sparse_after(*batches: Routing) -> bool:
        callback.on_train_batch_end(trainer(1), module, {"routings": {"mixture": batches}}, None, 0)
        return layer.dispatch.sparse

    assert not is_sparse_after(Routing(full, exact_zeros=True), Routing(narrow, exact_zeros=True))  # 26 of 32 pairs
    assert not is_sparse_after(Routing(full), Routing(narrow, exact_zeros=True))  # one still learns from zeros
    assert is_sparse_after(Routing(narrow, exact_zeros=True), Routing(narrow, exact_zeros=True))


def test_selected_and_heaviest_experts() -> None:
    weights = torch.tensor([[0.7, 0.3, 0.0, 0.0]])
    assert selected_experts(Routing(weights)).tolist() == [[True, True, False, False]]
    selectors = torch.tensor([[[0.9, 0.1, 0, 0], [0.2, 0.1, 0.7, 0]]])  # two selectors of one task
    assert selected_experts(Routing(weights, {}, selectors)).tolist() == [[True, False, True, False]]
    weights = torch.tensor([[0.1, 0.5, 0.0, 0.4], [1.0, 0, 0, 0]])
    assert heaviest_experts(weights, 2).tolist() == [[False, True, False, True], [True, False, False, False]]
    chosen = torch.tensor([[[1, 1, 0], [1, 0, 0], [0, 0, 1]]]).bool()
    expected = torch.tensor([[[1, 0.5, 0], [0.5, 1, 0], [0, 0, 1]]], dtype=torch.float64)
    torch.testing.assert_close(jaccard(chosen), expected)


def test_selections_against_the_simulated_truth() -> None:
    ground_truth = {"true_experts": torch.tensor([0, 3]), "task_group": torch.tensor([0, 0, 1])}
    weights = torch.tensor([[0.5, 0.5, 0, 0], [1.0, 0, 0, 0], [0, 0, 0, 1.0]])  # tasks x experts
    expected = {"true_experts_found": 1, "jaccard_related": 0.5, "jaccard_unrelated": 0, "distinct_experts": 4 / 3}
    assert compare_selections(Routing(weights), ground_truth) == pytest.approx(expected)
    found = monitor([(Routing(weights), 5), (Routing(weights[[0, 0, 0]]), 1)], "abc", ground_truth)
    assert found["test/distinct_experts"] == pytest.approx((4 / 3 * 5 + 2) / 6)


def test_tasks_without_an_expert_are_counted() -> None:
    tally = RoutingStats(2)
    tally.add(Routing(torch.tensor([[0.5, 0.5], [0.0, 0.0]])), rows=4)
    assert tally.values()["idle_tasks"] == 0.5
    tally.add(Routing(torch.tensor([[0.5, 0.5], [1.0, 0.0]])), rows=4)
    assert tally.values()["idle_tasks"] == 0.25
    one = RoutingStats(1, rows=1, task_rows=torch.ones(1), active=torch.ones(1), share=torch.ones(1, 1))
    assert "idle_tasks" not in one.values()


def test_selectors_are_binary_when_those_of_every_task_are() -> None:
    hard, soft = torch.eye(2)[None, None], torch.full((1, 1, 2, 2), 0.5)  # [B, T, K, E]
    history = History()
    for step, (first, last) in enumerate([(soft, hard), (hard, soft), (hard, hard)], 1):
        batches = [Routing(each.mean(-2), {}, each, tasks=[task]) for task, each in enumerate((first, last))]
        history.add(step, batches, 16, 2)
    assert history.binary_since == 3


def test_batches_of_some_tasks_count_for_those_tasks() -> None:
    tally = RoutingStats(3)
    tally.add(Routing(torch.tensor([[1.0, 0.0]]), tasks=[2]), rows=4)
    tally.add(Routing(torch.tensor([[0.5, 0.5]]), tasks=[0]), rows=2)
    tally.add(Routing(torch.tensor([[[0.0, 1.0]]] * 4), tasks=[2]), rows=4)
    values, parts = tally.values(), tally.parts(["a", "b", "c"], 100)
    assert [parts[name, "experts_per_sample"] for name in "abc"] == [2.0, 0.0, 1.0]
    assert tally.shares().tolist() == [[0.5, 0.5], [0.0, 0.0], [0.5, 0.5]]
    assert values["union_per_sample"] == 1.2
    history = History()
    history.add(1, [Routing(torch.tensor([[0.25, 0.75]]), tasks=[1])], 6, 3)
    history.add(2, [Routing(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]), tasks=[2])], 6, 3)
    history.add(3, [Routing(torch.ones(1, 2), tasks=[1])], 5, 3)  # too many shares to keep
    steps, course = history.shares_by_step()
    assert steps == [1, 2]
    assert course.nan_to_num(-1).tolist() == [[[-1, -1], [0.25, 0.75], [-1, -1]], [[-1, -1], [-1, -1], [0.5, 0.5]]]
    history = History()
    history.add(4, [Routing(torch.tensor([[0.25, 0.75]]), tasks=[1]), Routing(torch.eye(2)[:, None], tasks=[2])], 6, 3)
    assert history.shares[0].nan_to_num(-1).tolist() == [[-1, -1], [0.25, 0.75], [0.5, 0.5]]
    assert (history.batches, history.unused, history.unmixed) == (1, 0.5, 0.5)  # 0 in one batch, 1 in the other
    panels = [axes.collections[1] for axes in curves([1, 2], course, list("abc"), None).axes]  # of the coloured lines
    lines = [[path.vertices[:, 0].tolist() for path in panel.get_paths()] for panel in panels]
    assert lines[:3] == [[[], []], [[1], [1]], [[2], [2]]]
