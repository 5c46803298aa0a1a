"""What every gate must do, whatever the number of experts: the contract that networks rely on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtl.gates import Gate
from tests.gate_cases import CASES, GateCase, harden, route

T, D = 3, 6
EXPERTS = (1, 2, 3, 5, 6, 8, 16)
every_gate = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
learning_gates = pytest.mark.parametrize("case", [c for c in CASES if c.learns], ids=lambda case: case.name)
static_gates = pytest.mark.parametrize("case", [c for c in CASES if c.static], ids=lambda case: case.name)


def check_weights(case: GateCase, gate: Gate, weights: Tensor) -> None:
    assert torch.isfinite(weights).all()
    assert (weights >= 0).all()
    total = weights.sum(-1)
    if case.whole(gate.num_experts):
        torch.testing.assert_close(total, torch.ones_like(total), atol=1e-5, rtol=0)
    else:
        assert (total <= 1 + 1e-5).all()


@every_gate
@pytest.mark.parametrize("num_experts", EXPERTS)
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_weights_are_on_the_simplex(case: GateCase, num_experts: int, rows: int, training: bool) -> None:
    gate = case.build(T, num_experts, D).train(training)
    routing = route(gate, torch.randn(rows, D), rows)
    weights = routing.weights.expand(rows, T, num_experts)
    check_weights(case, gate, weights)
    assert all(loss.dim() == 0 and torch.isfinite(loss) for loss in routing.losses.values())
    if routing.selectors is not None:
        assert routing.selectors.shape[-3:] == (T, min(case.k or 0, num_experts), num_experts)


@static_gates
@pytest.mark.parametrize("num_experts", EXPERTS)
def test_static_gates(case: GateCase, num_experts: int) -> None:
    gate = case.build(T, num_experts, None)
    routing = gate(None)
    assert routing.weights.shape == (T, num_experts)
    check_weights(case, gate, routing.weights)
    assert torch.isfinite(sum(routing.losses.values(), torch.zeros(())))


@pytest.mark.parametrize("case", [c for c in CASES if c.k is not None], ids=lambda case: case.name)
@pytest.mark.parametrize("num_experts", EXPERTS)
def test_at_most_k_experts_once_binary(case: GateCase, num_experts: int) -> None:
    gate = case.build(T, num_experts, D)
    harden(gate)
    weights = route(gate, torch.randn(7, D)).weights
    assert case.k is not None
    assert ((weights > 0).sum(-1) <= case.k).all()


@learning_gates
@pytest.mark.parametrize("num_experts", EXPERTS)
@pytest.mark.parametrize("size", [1.0, 1e4])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_extreme_logits_stay_finite(case: GateCase, num_experts: int, size: float, autocast: bool) -> None:
    gate = case.build(T, num_experts, D)
    with torch.no_grad():
        for parameter in gate.parameters():  # logits of about +-size
            parameter.copy_(torch.randn_like(parameter).sign() * size / D)
    x = torch.ones(7, D, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        routing = route(gate, x)
        assert routing.weights.dtype == torch.float32
        check_weights(case, gate, routing.weights)
        (routing.weights.square().sum() + sum(routing.losses.values())).backward()
    assert not case.looks or torch.isfinite(x.grad).all()
    for name, parameter in gate.named_parameters():
        assert parameter.grad is None or torch.isfinite(parameter.grad).all(), name


@learning_gates
@pytest.mark.parametrize("num_experts", [e for e in EXPERTS if e > 2])
def test_every_parameter_learns_from_the_start(case: GateCase, num_experts: int) -> None:
    gate = case.build(T, num_experts, D)
    weights = route(gate, torch.randn(32, D), 32).weights
    (weights * torch.randn_like(weights)).sum().backward()
    for name, parameter in gate.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@every_gate
@pytest.mark.parametrize("num_experts", [3, 8])
def test_state_dict_round_trip(case: GateCase, num_experts: int) -> None:
    torch.manual_seed(1)
    first = case.build(T, num_experts, D).eval()
    torch.manual_seed(2)
    second = case.build(T, num_experts, D).eval()
    second.load_state_dict(first.state_dict())
    x = torch.randn(7, D)
    assert torch.equal(route(first, x).weights, route(second, x).weights)


@every_gate
def test_some_tasks_are_the_slice_of_all(case: GateCase) -> None:
    gate = case.build(T, 5, D).eval()
    x = torch.randn(7, D)
    whole = route(gate, x).weights
    part = route(gate, x, tasks=[2, 0]).weights
    torch.testing.assert_close(part, whole[..., [2, 0], :])


@every_gate
def test_evaluation_has_no_noise(case: GateCase) -> None:
    gate = case.build(T, 8, D).eval()
    x = torch.randn(7, D)
    assert torch.equal(route(gate, x).weights, route(gate, x).weights)


@every_gate
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(case: GateCase, dtype: torch.dtype) -> None:
    gate = case.build(T, 8, D).to(dtype)
    weights = route(gate, torch.randn(7, D, dtype=dtype)).weights
    assert torch.isfinite(weights).all()
    if case.learns:  # arithmetic in float32 at least
        assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("case", [c for c in CASES if c.name.endswith("_shared")], ids=lambda case: case.name)
def test_a_shared_gate_is_one_gate(case: GateCase) -> None:
    gate = case.build(T, 8, D)
    assert all(len(parameter) == 1 for parameter in gate.parameters())
    weights = route(gate, torch.randn(7, D)).weights
    assert weights.shape == (7, T, 8)
    assert torch.equal(weights[:, 0], weights[:, 2])


def test_a_per_example_gate_needs_examples() -> None:
    with pytest.raises(ValueError, match="input_dim=None"):
        CASES[0].build(T, 4, D)(None)
