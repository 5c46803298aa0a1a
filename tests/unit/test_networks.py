"""Networks: stacked parts equal separate ones, tasks alone, what must not learn does not, and what parts show."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtl.checks import InputError
from mtl.experts.dense import StackedDense
from mtl.experts.relu_sum import ReluSum
from mtl.gates import CometGate, DSelectKGate, FixedGate, SoftmaxGate, TopKGate
from mtl.gates.joined import separate_gates, task_key
from mtl.networks.adatt import AdaTT
from mtl.networks.baselines import SharedBottom, SingleTask
from mtl.networks.bottom import TabularBottom
from mtl.networks.frozen_experts import FrozenExpertsMoE
from mtl.networks.heads import Heads, NoHeads, heads_per_task
from mtl.networks.mixture import MixtureOfExperts
from mtl.networks.mmoe import MMoE
from mtl.networks.ple import PLE
from mtl.networks.stem import STEM
from mtl.training.module import MultiTaskModule
from mtl.types import Categorical, DataSpec, NetworkOutput, Numeric, TaskSpec

B = 5
TASKS = [
    TaskSpec("click", "binary"),
    TaskSpec("kind", "multiclass", num_classes=3),
    TaskSpec("seconds", "regression"),
    TaskSpec("buy", "binary"),
]
SPEC = DataSpec({"id": Categorical(50), "age": Numeric(2)}, TASKS)
PARTS: dict[str, Any] = {
    "bottom": partial(TabularBottom, embedding_dim=4),
    "experts": partial(StackedDense, units=[8, 6]),
    "heads": partial(Heads, units=[5]),
}
NETWORKS = {
    "mmoe": lambda: MMoE(SPEC, num_experts=4, gate=SoftmaxGate, **PARTS),
    "mmoe_static": lambda: MMoE(SPEC, num_experts=4, gate=DSelectKGate, static_gate=True, **PARTS),
    "ple": lambda: PLE(SPEC, num_experts=4, num_task_experts=1, num_levels=3, gate=CometGate, **PARTS),
    "adatt": lambda: AdaTT(SPEC, num_task_experts=2, num_shared_experts=1, num_levels=2, gate=CometGate, **PARTS),
    "stem": lambda: STEM(SPEC, num_task_experts=1, num_shared_experts=1, gate=SoftmaxGate, **PARTS),
    "shared_bottom": lambda: SharedBottom(SPEC, **PARTS),
    "single_task": lambda: SingleTask(SPEC, **PARTS),
}


def inputs(rows: int = B) -> dict[str, Tensor]:
    return {"id": torch.randint(50, (rows,)), "age": torch.randn(rows, 2)}


def check_shapes(output: NetworkOutput) -> None:
    shapes = {name: tuple(value.shape) for name, value in output.predictions.items()}
    assert shapes == {"click": (B,), "kind": (B, 3), "seconds": (B,), "buy": (B,)}


def test_mixture_of_built_parts_equals_one_of_factories() -> None:
    torch.manual_seed(0)
    made = MixtureOfExperts(6, 2, 4, partial(CometGate, k=1), partial(StackedDense, units=[5]))
    torch.manual_seed(0)
    experts = StackedDense(4, 6, [5])
    mixture = MixtureOfExperts(6, 2, 4, CometGate(2, 4, 6, k=1), experts)
    x = torch.randn(3, 6)
    assert torch.equal(mixture(x)[0], made(x)[0])
    with pytest.raises(InputError, match=r"num_experts=4, input_dim=6 does not fit .* num_experts=3, input_dim=6"):
        MixtureOfExperts(6, 2, 3, CometGate(2, 4, 6), StackedDense(3, 6, [5]))
    with pytest.raises(InputError, match="4 experts do not fit into a mixture with num_experts=3"):
        MixtureOfExperts(6, 2, 3, CometGate, experts)
    assert MixtureOfExperts(6, 2, 4, CometGate(2, 4), experts)(x)[1].weights.shape == (2, 4)  # a static gate


def test_every_task_has_a_gate_of_its_own_whatever_its_name() -> None:
    names = ["a.b", "a_b", "a%2Eb", "a%b", "a..b", "A.b", "items", ""]
    gate = separate_gates(CometGate, names, 4, 6)
    assert len({id(gate.gates[task_key(name)]) for name in names}) == len(names)


def test_a_group_without_rows_leaves_the_others_and_the_losses_alone() -> None:
    mixture = MixtureOfExperts(6, 2, 4, partial(CometGate, entropy_weight=1.0), partial(StackedDense, units=[5]))
    x, groups = torch.randn(4, 6), torch.tensor([0, 2, 2, 0])
    mixed, routing = mixture(x, groups=groups, num_groups=4)
    assert torch.allclose(mixed, mixture(x, groups=groups // 2)[0], atol=1e-6)
    loss = mixed.sum() + sum(routing.losses.values())
    loss.backward()
    assert all(torch.isfinite(value).all() for value in (loss, *(p.grad for p in mixture.parameters())))


@pytest.mark.parametrize("name", NETWORKS)
def test_some_tasks_alone(name: str) -> None:
    network, x = NETWORKS[name](), inputs()
    whole = network(x)
    check_shapes(whole)
    for wanted in (["buy"], ["click", "seconds"], ["kind", "buy"]):
        part = network(x, wanted).predictions
        assert list(part) == wanted
        for task in wanted:
            torch.testing.assert_close(part[task], whole.predictions[task])


@pytest.mark.parametrize("names", [("type", "items"), ("a.b", "embeddings")])
def test_inputs_may_have_any_name(names: tuple[str, ...]) -> None:
    bottom = TabularBottom({name: Categorical(5) for name in names}, 3)
    assert bottom({name: torch.zeros(2, dtype=torch.long) for name in names}).shape == (2, 6)


def test_a_network_without_heads_predicts_the_mixture() -> None:
    """As DSelect-k's supplement C.1: y_t(x) = sum_e w_te sum_u relu(w_eu . x + b_eu)."""
    tasks = [TaskSpec("a", "regression"), TaskSpec("b", "regression")]
    gate = partial(FixedGate, weights=[[0.2, 0.8, 0.0], [0.0, 0.5, 0.5]])
    experts = partial(ReluSum, units=4)
    network = MMoE(DataSpec({"x": Numeric(5)}, tasks), 3, TabularBottom, experts, gate, NoHeads, static_gate=True)
    x, layer = torch.randn(6, 5), network.mixture.experts.layer
    units = torch.stack([x @ w.T + b for w, b in zip(layer.weight, layer.bias, strict=True)], 1).relu()
    found = network({"x": x}).predictions
    torch.testing.assert_close(found["a"], 0.2 * units[:, 0].sum(-1) + 0.8 * units[:, 1].sum(-1))
    torch.testing.assert_close(network({"x": x}, ["b"]).predictions["b"], units[:, 1:].sum(-1).mean(-1))
    assert not list(network.heads.parameters())
    wide = NoHeads(tasks, 3)(torch.ones(6, 2, 3), [0, 1])
    assert wide["b"].tolist() == [3.0] * 6


@pytest.mark.parametrize("make", [Heads, partial(Heads, units=[5]), heads_per_task, NoHeads])
def test_heads_read_what_is_the_same_for_all_tasks_once(make: Any) -> None:
    tasks = [task for task in TASKS if make is not NoHeads or task.outputs == 1]
    heads, x = make(tasks=tasks, input_dim=6), torch.randn(B, 1, 6)
    for wanted in (range(len(tasks)), [1], [0, 2]):
        found, expected = heads(x, wanted), heads(x.expand(-1, len(wanted), -1), wanted)
        assert list(found) == [tasks[task].name for task in wanted]
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


def test_a_bare_module_is_refused() -> None:
    with pytest.raises(InputError, match=r"^network: Linear must be a mtl\.MultiTaskNetwork; see docs/extend\.md"):
        MultiTaskModule(nn.Linear(1, 1), TASKS, torch.optim.SGD)


def test_unknown_tasks_are_named() -> None:
    with pytest.raises(InputError, match="no such task: typo"):
        NETWORKS["mmoe"]()(inputs(), ["typo"])


@pytest.mark.parametrize(
    "make",
    [
        *(partial(MMoE, num_experts=3, gate=SoftmaxGate), SharedBottom, SingleTask),
        partial(PLE, num_experts=3, num_task_experts=1, num_levels=2, gate=SoftmaxGate),
        partial(AdaTT, num_task_experts=1, num_shared_experts=0, num_levels=2, gate=SoftmaxGate),
        partial(STEM, num_task_experts=1, num_shared_experts=1, gate=SoftmaxGate),
    ],
)
def test_a_prediction_depends_on_its_own_row_alone(make: partial[nn.Module] | type) -> None:
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


def test_frozen_experts_by_hand_and_after_a_step() -> None:
    """f_e(x) = sum_u relu(w_eu . x), mixed, then scaled and shifted; a step of training leaves w as it is."""
    known = torch.randn(3, 4, 2)
    spec = DataSpec({"x": Numeric(2)}, [TASKS[0], TASKS[3]], {"expert_weight": known})
    network, x = FrozenExpertsMoE(spec, gate=SoftmaxGate), torch.randn(6, 2)
    with torch.no_grad():
        network.heads.scale.copy_(torch.tensor([2.0, -1.0]))
        network.heads.bias.copy_(torch.tensor([0.5, 3.0]))
    units = torch.stack([(x @ w.T).relu().sum(-1) for w in known], -1)  # [B, E]
    weights = network.mixture.gate.bias.softmax(-1)
    predictions = network({"x": x}).predictions
    torch.testing.assert_close(predictions["click"], 2 * (units @ weights[0]) + 0.5)
    torch.testing.assert_close(predictions["buy"], -(units @ weights[1]) + 3)
    torch.testing.assert_close(network({"x": x}, ["buy"]).predictions["buy"], predictions["buy"])
    sum(value.square().sum() for value in predictions.values()).backward()
    assert all((p.grad != 0).any() for p in network.parameters())
    assert torch.equal(network.mixture.experts.weight, known)
    assert not isinstance(network.mixture.experts.weight, nn.Parameter)
    with pytest.raises(InputError, match="synthetic_recovery"):
        FrozenExpertsMoE(SPEC, gate=DSelectKGate)


def test_other_shapes_give_one_sentence() -> None:
    layer = MixtureOfExperts(7, 2, 8, CometGate, partial(StackedDense, units=[6]))
    with pytest.raises(InputError, match=r"x \[2, 5, 7\]: this layer takes x \[B, 7\]; flatten tokens with x.flatten"):
        layer(torch.zeros(2, 5, 7))
    with pytest.raises(InputError, match=r"x \[2, 5\]: CometGate\(tasks=2, .*\) takes x \[B, 7\]"):
        layer.gate(torch.zeros(2, 5))
    with pytest.raises(InputError, match=r"^k=9: cannot select 9 of 8 experts"):
        TopKGate(2, 8, 7, k=9)
