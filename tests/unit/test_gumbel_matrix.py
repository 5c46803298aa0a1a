"""The routing matrix: its draws, their gradients, the budget, and rows without a connection."""

from __future__ import annotations

import math

import pytest
import torch

from mtl.gates import GumbelMatrixGate
from mtl.gates import gumbel_matrix as module


def set_difference(gate: GumbelMatrixGate, difference: torch.Tensor) -> None:
    with torch.no_grad():
        gate.logits.copy_(torch.stack([difference, torch.zeros_like(difference)], -1))


def with_noise(monkeypatch: pytest.MonkeyPatch, noise: torch.Tensor) -> None:
    monkeypatch.setattr(module, "logistic_noise", lambda like: noise.to(like))


def test_straight_through_gradient_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """T = 1, C = 2, logits 0 and ln 3, noise 1 and -2, temperature 1/2: on and off.

    Forward the weights are (1, 0) / 1. Backward u_c has the slope s (1 - s) / tau of its sigmoid, and with N = u_1 +
    u_2 the loss 5 w_1 + 7 w_2 has dL/du_1 = 5/N - 5/N^2 = 0 and dL/du_2 = 7/N - 5/N^2 = 2.
    """
    gate = GumbelMatrixGate(1, 2, temperature=0.5).double()
    set_difference(gate, torch.tensor([[0.0, math.log(3.0)]], dtype=torch.float64))
    with_noise(monkeypatch, torch.tensor([[1.0, -2.0]]))
    weights = gate(None).weights
    assert weights.tolist() == [[1.0, 0.0]]
    (weights * torch.tensor([[5.0, 7.0]])).sum().backward()
    s = 1 / (1 + math.exp(-(math.log(3.0) - 2.0) / 0.5))
    slope = 2.0 * s * (1 - s) / 0.5
    assert gate.logits.grad[0, :, 0].tolist() == pytest.approx([0.0, slope], abs=1e-12)
    assert gate.logits.grad[0, :, 1].tolist() == pytest.approx([0.0, -slope], abs=1e-12)


def test_budget_is_that_of_all_layers_together() -> None:
    """Two layers with 4 and 2 connections of probability 0.9 and 0.3: the mean is (3.6 + 0.6) / 6 = 0.7."""
    gates = [
        GumbelMatrixGate(2, n, initial_probability=p, budget=0.6, budget_weight=2.0) for n, p in ((2, 0.9), (1, 0.3))
    ]
    GumbelMatrixGate.share_budget(gates)
    losses = [gate(None).losses for gate in gates]
    assert losses[1] == {}
    assert float(losses[0]["budget"].detach()) == pytest.approx(2.0 * 0.1, abs=1e-6)
    losses[0]["budget"].backward()
    assert all((gate.logits.grad != 0).all() for gate in gates)


def test_gradient_of_an_empty_row(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = GumbelMatrixGate(2, 3)
    with_noise(monkeypatch, torch.tensor([[-9.0, -9.0, -9.0], [-9.0, 9.0, 9.0]]))
    weights = gate(None).weights
    assert weights.tolist() == [[0.0, 0.0, 0.0], [0.0, 0.5, 0.5]]
    (weights * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert (gate.logits.grad != 0).all()  # also of what is off: it can come back


def test_expectation_of_the_draws() -> None:
    """The mean of 20,000 draws lies within 5 standard errors for all 12 connections.

    A right gate fails with probability below 12 * 5.8e-7 = 7e-6 (and the seed is fixed).
    """
    gate = GumbelMatrixGate(3, 4, temperature=0.3)
    p = torch.linspace(0.03, 0.97, 12).view(3, 4)
    set_difference(gate, p.logit())
    with torch.no_grad():
        mean = torch.stack([gate._draw(gate.difference()) for _ in range(20_000)]).mean(0)
    assert torch.allclose(gate.probabilities(), p, atol=1e-6)
    assert ((mean - p).abs() < 5 * (p * (1 - p) / 20_000).sqrt()).all()


@pytest.mark.parametrize(("budget", "expected"), [(0.25, 0.5 * 0.25), (0.5, 0.0), (1.0, 0.0), (0.0, 0.5 * 0.5)])
def test_budget_by_hand(budget: float, expected: float) -> None:
    gate = GumbelMatrixGate(2, 2, budget=budget, budget_weight=0.5)
    set_difference(gate, torch.tensor([[0.9, 0.1], [0.6, 0.4]]).logit())  # mean 1/2
    loss = gate(None).losses["budget"]
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-6)
    if expected:
        loss.backward()
        p = gate.probabilities()
        assert torch.allclose(gate.logits.grad[..., 0], 0.5 / 4 * p * (1 - p), atol=1e-6)


def test_evaluation_takes_the_most_likely_matrix() -> None:
    gate = GumbelMatrixGate(2, 3).eval()
    set_difference(gate, torch.tensor([[1.0, -1.0, 0.1], [-1.0, -0.1, -3.0]]))
    routing = gate(None)
    assert routing.weights.tolist() == [[0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]
    assert routing.exact_zeros
    assert gate(None, None, [0]).weights.tolist() == [[0.5, 0.0, 0.5]]
    assert gate.connections().tolist() == [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    drawn = GumbelMatrixGate(20, 30, sample_in_evaluation=True).eval()
    assert not torch.equal(drawn(None).weights, drawn(None).weights)


def test_starts_at_the_initial_probability() -> None:
    gate = GumbelMatrixGate(2, 3, initial_probability=0.8)
    assert torch.allclose(gate.probabilities(), torch.full((2, 3), 0.8))
    assert GumbelMatrixGate(1, 1).eval()(None).weights.tolist() == [[1.0]]
