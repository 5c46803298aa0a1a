"""Local search around every gate: soft phase, hardening, hard phase, and what must not change."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mtl.checkpoints.files import CheckpointIO, read
from mtl.checkpoints.warm_start import start_from
from mtl.experts.dense import StackedDense
from mtl.gates import CometGate
from mtl.gates.permuted import Permutation, PermutedGate
from mtl.networks.bottom import TabularBottom
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.types import Categorical, DataSpec, Routing, TaskSpec
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


def test_the_products_of_some_tasks_with_matrices_of_their_own() -> None:
    """Which tasks they are is not told, so all products count."""
    gate = PermutedGate(CometGate(3, 4, 5, k=1), Permutation(4, num_tasks=3, per_task=True)).eval()
    harden(gate.gate)
    routings = [gate(torch.randn(6, 5), tasks=tasks) for tasks in (None, [1], [0, 2])]
    assert [gate.active_fraction(routing.selectors) for routing in routings] == pytest.approx([3 / 7, 1, 1])


def test_an_order_of_other_experts_is_not_taken_over(tmp_path: Path) -> None:
    """Nor that it has been found: local search begins anew."""
    small, large = Permutation(4), Permutation(8)
    small.harden(torch.tensor([[3, 2, 1, 0]]))
    state = {f"network.{name}": value for name, value in small.state_dict().items()}
    CheckpointIO().save_checkpoint({"config": {}, "state_dict": state}, tmp_path / "x.ckpt")
    start_from(large, read(tmp_path / "x.ckpt"))
    assert not large.is_hard


def test_noise_only_in_training() -> None:
    permutation = Permutation(6, noise=1.0, tau=1.0)
    assert not torch.equal(permutation.soft(), permutation.soft())
    permutation.eval()
    assert torch.equal(permutation.soft(), permutation.soft())
