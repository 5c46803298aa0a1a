"""Networks with every gate, and evaluation at its edges: what a run meets only once its data is uneven."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from mtl.experts.dense import StackedDense
from mtl.gates import CometGate, SoftmaxGate
from mtl.networks.baselines import SharedBottom, SingleTask
from mtl.networks.bottom import TabularBottom
from mtl.networks.frozen_experts import FrozenExpertsMoE
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.training.evaluation import Evaluation
from mtl.types import MISSING_CLASS, Categorical, DataSpec, Numeric, TaskSpec
from tests.gate_cases import CASES, GateCase, harden

TASKS = [
    TaskSpec("click", "binary"),
    TaskSpec("kind", "multiclass", num_classes=3),
    TaskSpec("seconds", "regression"),
    TaskSpec("buy", "binary"),
]
SPEC = DataSpec({"id": Categorical(50), "age": Numeric(2)}, TASKS)
PARTS = {
    "bottom": partial(TabularBottom, embedding_dim=4),
    "experts": partial(StackedDense, units=[8, 6]),
    "heads": partial(Heads, units=[5]),
}


def inputs(rows: int = 5) -> dict[str, Tensor]:
    return {"id": torch.randint(50, (rows,)), "age": torch.randn(rows, 2)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("wanted", [["kind"], ["click", "buy"], ["kind", "seconds", "buy"]], ids="+".join)
def test_some_tasks_alone_with_every_gate(case: GateCase, wanted: list[str]) -> None:
    network, x = MMoE(SPEC, num_experts=4, gate=case.make, **PARTS).eval(), inputs()
    whole, part = network(x).predictions, network(x, wanted)
    assert list(part.predictions) == wanted
    assert part.routings["mixture"].weights.shape[-2:] == (len(wanted), 4)
    for task in wanted:
        torch.testing.assert_close(part.predictions[task], whole[task])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("execution", ["dense", "sparse"])
def test_a_batch_without_rows_forward_and_backward(case: GateCase, execution: str) -> None:
    """As a process gets it that runs short of rows."""
    network = MMoE(SPEC, num_experts=4, gate=case.make, execution=execution, **PARTS)
    network.mixture.dispatch.sparse = execution == "sparse"
    for training in (False, True):
        predictions = network.train(training)(inputs(0)).predictions
        assert {len(value) for value in predictions.values()} == {0}
        sum(value.sum() for value in predictions.values()).backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in network.parameters())


@pytest.mark.parametrize("make", [partial(MMoE, num_experts=3, gate=SoftmaxGate), SharedBottom, SingleTask])
def test_a_prediction_depends_on_its_own_row_alone(make: partial[MMoE] | type) -> None:
    """Rows and experts are both counted in some dimension; with as many rows as experts a mix-up would not crash."""
    network, x = make(spec=SPEC, **PARTS).eval(), inputs(3)
    before = network(x).predictions
    after = network({"id": x["id"], "age": x["age"] + torch.tensor([[0.0], [100.0], [0.0]])}).predictions
    for task in SPEC.task_names:
        torch.testing.assert_close(before[task][[0, 2]], after[task][[0, 2]])
        assert not torch.allclose(before[task][1], after[task][1])


@pytest.mark.parametrize("task", range(len(TASKS)))
def test_single_tasks_are_trained_apart(task: int) -> None:
    network = SingleTask(SPEC, **PARTS)
    network(inputs()).predictions[TASKS[task].name].sum().backward()
    for index, part in enumerate(network.networks):
        touched = [p for p in part.parameters() if p.grad is not None and bool((p.grad != 0).any())]
        assert bool(touched) == (index == task)


def test_shared_bottom_shares_its_trunk_and_not_its_heads() -> None:
    network = SharedBottom(SPEC, **PARTS)
    network(inputs()).predictions["seconds"].sum().backward()
    assert all((layer.weight.grad != 0).any() for layer in network.trunk.layers)
    touched = (network.heads.hidden.layers[0].bias.grad != 0).any(-1)
    assert touched.tolist() == [False, False, True, False]


def test_unselected_experts_get_exactly_no_gradient_from_a_batch() -> None:
    network = MMoE(SPEC, num_experts=16, gate=partial(CometGate, k=1), static_gate=True, **PARTS)
    harden(network.mixture.gate)
    output = network(inputs(9))
    sum(value.square().sum() for value in output.predictions.values()).backward()
    used = (output.routings["mixture"].weights > 0).any(0)
    assert 1 <= int(used.sum()) <= len(TASKS)
    for layer in network.mixture.experts.layers:
        per_expert = layer.weight.grad.flatten(1).abs().amax(-1)
        assert (per_expert[~used] == 0).all()
        assert (per_expert[used] > 0).any()


def test_frozen_experts_by_hand_and_after_a_step() -> None:
    """f_e(x) = sum_u relu(w_eu . x), mixed, then scaled and shifted; a step of training leaves w as it is."""
    known = torch.randn(3, 4, 2)
    spec = DataSpec({"x": Numeric(2)}, [TASKS[0], TASKS[3]], {"expert_weight": known})
    network, x = FrozenExpertsMoE(spec, gate=SoftmaxGate), torch.randn(6, 2)
    with torch.no_grad():
        network.head.scale.copy_(torch.tensor([2.0, -1.0]))
        network.head.bias.copy_(torch.tensor([0.5, 3.0]))
    units = torch.stack([(x @ w.T).relu().sum(-1) for w in known], -1)  # [B, E]
    weights = network.mixture.gate.bias.softmax(-1)
    predictions = network({"x": x}).predictions
    torch.testing.assert_close(predictions["click"], 2 * (units @ weights[0]) + 0.5)
    torch.testing.assert_close(predictions["buy"], -(units @ weights[1]) + 3)
    torch.testing.assert_close(network({"x": x}, ["buy"]).predictions["buy"], predictions["buy"])
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    sum(value.square().sum() for value in predictions.values()).backward()
    assert all((p.grad != 0).any() for p in network.parameters())
    optimizer.step()
    assert torch.equal(network.mixture.experts.weight, known)


def test_auroc_counts_pairs_and_ties_as_half() -> None:
    scores, labels = torch.randint(-3, 4, (60,)).float() / 2, torch.randint(2, (60,)).float()
    pairs = [(a, b) for a in scores[labels == 1].tolist() for b in scores[labels == 0].tolist()]
    expected = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)
    evaluation = Evaluation([TASKS[0]])
    for start in range(0, 60, 7):
        evaluation.update({"click": scores[start : start + 7]}, {"click": labels[start : start + 7]})
    assert evaluation.compute()["click/auroc"] == pytest.approx(expected, abs=1e-6)


def test_a_batch_of_small_logits_is_not_taken_for_probabilities() -> None:
    """Logits in [0, 1] look like probabilities; ranked beside another batch's, they must be logits all the same."""
    evaluation = Evaluation([TASKS[0]])
    evaluation.update({"click": torch.tensor([0.2, 0.3])}, {"click": torch.tensor([1.0, 1.0])})
    evaluation.update({"click": torch.tensor([-0.3, -2.0])}, {"click": torch.tensor([0.0, 0.0])})
    result = evaluation.compute()
    assert result["click/auroc"] == pytest.approx(1.0)
    assert result["click/accuracy"] == pytest.approx(1.0)


def test_uneven_missing_labels_and_splits() -> None:
    """Means are over labelled rows of the whole pass, so a batch with few or no labels must not weigh as much."""
    scores, values = torch.randn(12, 3), torch.randn(12)
    classes = torch.tensor([0, 1, 2, 0, *[MISSING_CLASS] * 7, 1])
    real = torch.tensor([float("nan")] * 5 + [1.0, 2.0, 3.0, 4.0] + [float("nan")] * 3)
    known, seen = classes != MISSING_CLASS, ~real.isnan()
    expected = {
        "kind/accuracy": float((scores.argmax(-1) == classes)[known].float().mean()),
        "kind/loss": float(-scores.log_softmax(-1)[known, classes[known]].mean()),
        "seconds/loss": float((values - real)[seen].square().mean()),
    }
    for splits in ([12], [4, 4, 4], [1, 11], [5, 6, 1]):
        evaluation, start = Evaluation(TASKS), 0
        for size in splits:
            part = slice(start, start + size)
            predictions = {"kind": scores[part], "seconds": values[part]}
            evaluation.update(predictions, {"kind": classes[part], "seconds": real[part]})
            start += size
        result = evaluation.compute()
        assert {name: result[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        assert result["seconds/mse"] == pytest.approx(expected["seconds/loss"], rel=1e-5)
