"""The gates' contract where sizes and modes meet: exact shapes, static gates, few experts, huge inputs, noise."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from mtl.gates import Gate, SoftmaxSelectorGate, TopKGate
from tests.gate_cases import CASES, GateCase, harden, route

T, D = 3, 6
EXPERTS = (1, 2, 3, 5, 6, 8, 16)
LOADED = GateCase("topk_load", partial(TopKGate, noisy=True, load_weight=0.1, importance_weight=0.1), k=2)
every_size = pytest.mark.parametrize("num_experts", EXPERTS)
some_sizes = pytest.mark.parametrize("num_experts", [1, 5, 16])  # no split at all, uneven tree, full tree
every_gate = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
static_gates = pytest.mark.parametrize("case", [c for c in CASES if c.static], ids=lambda case: case.name)
learning_gates = pytest.mark.parametrize("case", [c for c in CASES if c.learns], ids=lambda case: case.name)
static_learners = pytest.mark.parametrize(
    "case", [c for c in CASES if c.learns and c.static], ids=lambda case: case.name
)


def twin(case: GateCase, gate: Gate, width: int | None) -> Gate:
    """Build the gate again from another seed: only what a state dict carries can make the two agree."""
    torch.manual_seed(99)
    other = case.build(T, gate.num_experts, width).eval()
    other.load_state_dict(gate.state_dict())
    return other


def check_finite(gate: Gate, weights: Tensor, total: Tensor) -> None:
    assert torch.isfinite(weights).all()
    total.backward()
    for name, parameter in gate.named_parameters():
        if parameter.numel() == 0:  # a single expert leaves nothing to split or select
            continue
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


@every_gate
@every_size
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_shapes_are_exact(case: GateCase, num_experts: int, rows: int) -> None:
    """A missing or extra dimension would broadcast silently in the mixture; weights that do not look have no rows."""
    weights = route(case.build(T, num_experts, D), torch.randn(rows, D), rows).weights
    assert weights.shape == ((rows, T, num_experts) if case.looks else (T, num_experts))


@learning_gates
@some_sizes
def test_a_batch_without_rows_has_gradients_of_zero(case: GateCase, num_experts: int) -> None:
    """As a process gets it that runs short of rows."""
    gate = case.build(T, num_experts, D)
    weights = route(gate, torch.randn(0, D), 0).weights
    if not case.looks or not weights.requires_grad:  # a single expert
        return
    weights.sum().backward()
    for name, parameter in gate.named_parameters():
        assert parameter.grad is None or not parameter.grad.any(), name


@every_gate
@every_size
def test_round_trip_and_slice_at_every_size(case: GateCase, num_experts: int) -> None:
    gate, x = case.build(T, num_experts, D).eval(), torch.randn(7, D)
    whole = route(gate, x).weights
    assert torch.equal(route(twin(case, gate, D), x).weights, whole)
    torch.testing.assert_close(route(gate, x, tasks=[1]).weights, whole[..., [1], :])


@static_gates
@some_sizes
def test_static_round_trip_and_slice(case: GateCase, num_experts: int) -> None:
    gate = case.build(T, num_experts, None).eval()
    whole = gate(None).weights
    assert torch.equal(twin(case, gate, None)(None).weights, whole)
    assert torch.equal(gate(torch.randn(7, D)).weights, whole)  # the example plays no part
    torch.testing.assert_close(gate(None, tasks=[1]).weights, whole[[1]])


@pytest.mark.parametrize("case", [c for c in CASES if c.k and c.static], ids=lambda case: case.name)
@every_size
def test_static_gates_are_sparse_once_binary(case: GateCase, num_experts: int) -> None:
    gate = case.build(T, num_experts, None)
    harden(gate)
    assert ((gate(None).weights > 0).sum(-1) <= min(case.k or 0, num_experts)).all()


@every_size
@pytest.mark.parametrize("width", [D, None], ids=["per_example", "static"])
def test_a_tiny_temperature_makes_selectors_binary(num_experts: int, width: int | None) -> None:
    gate = SoftmaxSelectorGate(T, num_experts, width, k=2, temperature=1e-7)
    routing = gate(None if width is None else torch.randn(7, D))
    assert ((routing.weights > 0).sum(-1) <= 2).all()
    assert ((routing.selectors == 0) | (routing.selectors == 1)).all()


@static_learners
@some_sizes
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_static_gates_at_extreme_logits(case: GateCase, num_experts: int, autocast: bool) -> None:
    gate = case.build(T, num_experts, None)
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.copy_(torch.randn_like(parameter).sign() * 1e4)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        routing = gate(None)
    assert routing.weights.dtype == torch.float32
    check_finite(gate, routing.weights, routing.weights.square().sum() + sum(routing.losses.values()))


@learning_gates
@some_sizes
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_huge_inputs(case: GateCase, num_experts: int, autocast: bool) -> None:
    """Large inputs, unlike large parameters, scale every logit of a row alike, down to COMET's single splits."""
    gate = case.build(T, num_experts, D)
    x = (1e6 * torch.randn(7, D)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        routing = route(gate, x)
    check_finite(gate, routing.weights, routing.weights.square().sum() + sum(routing.losses.values()))
    assert not case.looks or torch.isfinite(x.grad).all()


@static_learners
@pytest.mark.parametrize("num_experts", [e for e in EXPERTS if e > 2])
def test_static_gates_learn_from_the_start(case: GateCase, num_experts: int) -> None:
    gate = case.build(8, num_experts, None)  # of eight tasks at least one draws a switch that is on
    weights = gate(None).weights
    (weights * torch.randn_like(weights)).sum().backward()
    for name, parameter in gate.named_parameters():
        assert parameter.grad.abs().max() > 0, name


@learning_gates
def test_two_experts_suffice_to_learn(case: GateCase) -> None:
    """With all experts kept there is no choice, but their shares must still learn."""
    gate = case.build(T, 2, D)
    weights = route(gate, torch.randn(32, D), 32).weights
    (weights * torch.randn_like(weights)).sum().backward()
    assert max(float(p.grad.abs().max()) for p in gate.parameters() if p.grad is not None) > 0


@pytest.mark.parametrize("num_experts", [e for e in EXPERTS if e > 2])
@pytest.mark.parametrize("rows", [1, 7])
def test_the_load_loss_reaches_all_parameters(num_experts: int, rows: int) -> None:
    gate = LOADED.build(T, num_experts, D)
    routing = route(gate, torch.randn(rows, D), rows)
    assert set(routing.losses) == {"load", "importance"}
    check_finite(gate, routing.weights, routing.losses["load"])
    assert all(parameter.grad.abs().max() > 0 for parameter in gate.parameters())
