"""Local search around every gate: soft phase, hardening, hard phase, and what must not change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mtl.callbacks.hardening import PermutationHardening
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from mtl.experts.dense import StackedDense
from mtl.gates import CometGate, Gate, TopKGate
from mtl.gates.permuted import Permutation, PermutedGate, sinkhorn
from mtl.networks.bottom import TabularBottom
from mtl.networks.components import DenseLayers
from mtl.networks.frozen_experts import FrozenExpertsMoE
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.networks.routed import RoutedNetwork
from mtl.types import Categorical, DataSpec, Numeric, Routing, TaskSpec
from mtl.use.prune import prune
from tests.gate_cases import CASES, IDS, GateCase, harden

EXPERTS = 8
SPEC = DataSpec({"id": Categorical(IDS)}, [TaskSpec("a", "binary"), TaskSpec("b", "regression")])
EVERY_GATE = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def network(case: GateCase, per_task: bool = False, dropout: float = 0.0) -> MMoE:
    options = {} if case.k is None or case.name.startswith(("task", "hash")) else {"k": case.k}
    return MMoE(
        SPEC,
        EXPERTS,
        partial(TabularBottom, embedding_dim=6),
        partial(StackedDense, units=[5], dropout=dropout),
        partial(case.make, **options),
        partial(Heads),
        permutation=partial(Permutation, per_task=per_task, entropy_weight=0.1, tau=0.1, rounds=30),
    )


def weights_of(net: MMoE, inputs: dict[str, Tensor]) -> Tensor:
    return net.mixture.gate.gate(net.bottom(inputs), inputs).weights


@EVERY_GATE
@pytest.mark.parametrize("per_task", [False, True])
def test_every_gate_trains_hardens_and_keeps_its_sparsity(case: GateCase, per_task: bool) -> None:
    torch.manual_seed(0)
    net = network(case, per_task)
    inputs = {"id": torch.randint(IDS, (40,))}
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    before = net.mixture.gate.permutation.logits.detach().clone()
    for step in range(12):
        output = net(inputs)
        if step < 6:
            assert not output.routings["mixture"].exact_zeros  # dense while P is soft
        loss = sum((value - 1).square().mean() for value in output.predictions.values()) + sum(output.losses.values())
        optimizer.zero_grad()
        loss.backward()
        logits = net.mixture.gate.permutation.logits
        assert logits.grad is not None
        assert torch.isfinite(logits.grad).all()
        assert bool(logits.grad.any()) == (step < 6)
        optimizer.step()
        if step == 5:
            assert not torch.equal(before, logits)
            expected = net.mixture.gate.permutation.matrix().clone()
            net.mixture.gate.permutation.harden()
            assert torch.equal(
                net.mixture.gate.permutation.matrix(), expected
            )  # what evaluation used is what it becomes
            optimizer.state.pop(logits, None)
            frozen = logits.detach().clone()
    assert torch.equal(frozen, net.mixture.gate.permutation.logits)
    harden(net.mixture.gate.gate)
    net.eval()
    permuted, plain = net(inputs).routings["mixture"].weights, weights_of(net, inputs)
    assert torch.equal((permuted != 0).sum(-1).expand(40, 2), (plain != 0).sum(-1).expand(40, 2))
    assert torch.equal(permuted.sort(-1).values, plain.sort(-1).values.expand(permuted.shape))


def routed(gate: Callable[..., Gate], permutation: Callable[..., Permutation]) -> RoutedNetwork:
    layers = [{"components": [partial(DenseLayers, units=[7])], "copies": 6}] * 2
    bottom = partial(TabularBottom, embedding_dim=6)
    return RoutedNetwork(SPEC, bottom, layers, gate, Heads, permutation=permutation)


def frozen(gate: Callable[..., Gate], permutation: Callable[..., Permutation]) -> FrozenExpertsMoE:
    spec = DataSpec({"x": Numeric(3)}, SPEC.tasks, {"expert_weight": torch.randn(EXPERTS, 4, 3)})
    return FrozenExpertsMoE(spec, gate, permutation=permutation)


@pytest.mark.parametrize("per_task", [False, True])
@pytest.mark.parametrize("gate", [partial(TopKGate, k=2), partial(CometGate, k=2)], ids=["topk", "comet"])
@pytest.mark.parametrize("make", [routed, frozen])
def test_other_networks_train_harden_and_prune(
    make: Callable[..., nn.Module], gate: Callable[..., Gate], per_task: bool
) -> None:
    net = make(gate, partial(Permutation, per_task=per_task, entropy_weight=0.1, tau=0.1, rounds=30))
    inputs = {"id": torch.randint(IDS, (40,)), "x": torch.randn(40, 3)}
    gates = [part for part in net.modules() if isinstance(part, PermutedGate)]
    assert len(gates) == (2 if make is routed else 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for step in range(8):
        soft = step < 4
        output = net(inputs)
        assert "permutation" in output.losses
        assert all(routing.exact_zeros != soft for routing in output.routings.values())
        loss = sum((value - 1).square().mean() for value in output.predictions.values()) + sum(output.losses.values())
        optimizer.zero_grad()
        loss.backward()
        for part in gates:
            assert bool(part.permutation.logits.grad.any()) == soft
            assert any(bool(parameter.grad.any()) for parameter in part.gate.parameters())
        optimizer.step()
        if step == 3:
            for part in gates:
                part.permutation.harden(torch.randperm(part.num_experts).expand(len(part.permutation.order), -1))
                optimizer.state.pop(part.permutation.logits)
    for part in gates:
        harden(part.gate)
    whole = net.eval()(inputs)
    assert all(((routing.weights != 0).sum(-1) <= 2).all() for routing in whole.routings.values())
    for part, routing in zip(gates, whole.routings.values(), strict=True):
        order = part.permutation.order.expand(2, -1)
        assert torch.equal(routing.weights, part.gate(None).weights.gather(-1, order))
    for task in SPEC.task_names:
        pruned = prune(net, task)
        torch.testing.assert_close(pruned(inputs).predictions[task], whole.predictions[task])
        assert not any(isinstance(part, Permutation) for part in pruned.modules())


def test_one_task_of_two_uses_its_own_matrix() -> None:
    permutation = Permutation(4, num_tasks=2, per_task=True)
    permutation.harden(torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]]))
    weights = torch.rand(5, 2, 4)
    both = permutation(Routing(weights)).weights
    assert torch.equal(both[:, 0], weights[:, 0])
    assert torch.equal(both[:, 1], weights[:, 1].flip(-1))
    assert torch.equal(permutation(Routing(weights[:, 1:]), [1]).weights[:, 0], both[:, 1])
    assert torch.equal(permutation(Routing(weights[0])).weights, both[0])  # a static gate


def test_selectors_move_with_the_weights() -> None:
    permutation = Permutation(4, num_tasks=2, per_task=True).eval()
    permutation.harden(torch.stack([torch.randperm(4), torch.randperm(4)]))
    selectors = torch.rand(5, 2, 3, 4)
    routing = permutation(Routing(selectors.mean(-2), {}, selectors))
    assert torch.allclose(routing.selectors.mean(-2), routing.weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sinkhorn_at_the_extremes(dtype: torch.dtype) -> None:
    logits = torch.zeros(1, 4, 4, dtype=dtype)
    logits[0] = torch.eye(4) * 1e4
    logits.requires_grad_()
    matrix = sinkhorn(logits, 1e-7, 150)
    matrix.square().sum().backward()
    assert torch.isfinite(matrix).all()
    assert torch.isfinite(logits.grad).all()
    assert torch.allclose(matrix[0], torch.eye(4, dtype=dtype))


def test_noise_only_in_training() -> None:
    permutation = Permutation(6, noise=1.0, tau=1.0)
    assert not torch.equal(permutation.soft(), permutation.soft())
    permutation.eval()
    assert torch.equal(permutation.soft(), permutation.soft())


@pytest.fixture
def assigned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that gets an entry for each matrix that the Hungarian method is run on."""
    matrices: list[Any] = []

    def counting(matrix: Any, maximize: bool) -> Any:
        matrices.append(matrix)
        return linear_sum_assignment(matrix, maximize=maximize)

    monkeypatch.setattr("mtl.gates.permuted.linear_sum_assignment", counting)
    return matrices


def fresh_assignment(permutation: Permutation) -> Tensor:
    other = Permutation(permutation.logits.shape[-1], len(permutation.logits), per_task=True)
    other.load_state_dict(permutation.state_dict())
    return other.assignment()


def test_assignment_is_computed_when_what_it_depends_on_has_changed(assigned: list[Any]) -> None:
    permutation = Permutation(6).eval()
    twin = Permutation(6).eval()
    new = [torch.randn_like(permutation.logits) for _ in range(2)]

    def change(logits: Tensor) -> None:
        with torch.no_grad():
            permutation.logits.copy_(logits)

    changes = [
        lambda: None,
        lambda: change(new[0]),
        lambda: permutation.load_state_dict(twin.state_dict()),
        lambda: permutation.logits.data.copy_(new[1]),
        lambda: permutation.tau.fill_(1e-7),
        lambda: permutation.rounds.fill_(3),
    ]
    weights = torch.rand(5, 2, 6, requires_grad=True)
    for number, changed in enumerate(changes, 1):
        changed()
        with torch.inference_mode():
            first = permutation(Routing(weights)).weights
        for _ in range(3):
            again = permutation(Routing(weights)).weights
            again.sum().backward()  # what an evaluation has computed may be used in training
            assert torch.equal(again, first)
        assert len(assigned) == number
        expected = weights[..., fresh_assignment(permutation)[0]]
        assert torch.equal(first, expected)
        assigned.pop()


class Module(torch.nn.Module):
    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Module()
        self.network.permutation = Permutation(4)
        self.logged: dict[str, float] = {}

    def log(self, name: str, value: float, **options: Any) -> None:
        self.logged[name] = value


def test_hardening_at_its_step() -> None:
    module = Module()
    optimizer = torch.optim.Adam(module.parameters())
    module.network.permutation.soft().sum().backward()
    optimizer.step()
    trainer = SimpleNamespace(
        global_step=3,
        accumulate_grad_batches=1,
        num_training_batches=4,
        max_steps=-1,
        max_epochs=2,
        optimizers=[optimizer],
        strategy=SimpleNamespace(broadcast=lambda value: value),
    )
    callback = PermutationHardening(fraction=0.5)
    callback.on_train_batch_start(trainer, module, None, 0)
    assert not module.network.permutation.is_hard
    assert optimizer.state
    trainer.global_step = 4
    callback.on_train_batch_start(trainer, module, None, 0)
    assert module.network.permutation.is_hard
    assert not optimizer.state
    assert module.logged["train/permutation_soft_to_hard"] >= 0
