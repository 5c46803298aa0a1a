"""What is particular to one gate: losses by hand, noise, tables, patterns, routing matrices, refused options."""

from __future__ import annotations

import math

import pytest
import torch

from mtl.checks import InputError
from mtl.gates import (
    FixedGate,
    Gate,
    GumbelMatrixGate,
    GumbelSoftmaxGate,
    HashGate,
    SoftmaxSelectorGate,
    TaskTop1Gate,
    TopKGate,
)
from mtl.gates import gumbel_matrix as module
from mtl.gates.balance import balance_loss, importance_loss, load_loss, z_loss
from mtl.types import Categorical, Numeric

D, E = 4, 8


def test_z_loss_by_hand() -> None:
    logits = torch.full((3, 2, E), 1.5)
    assert float(z_loss(logits)) == pytest.approx(2 * (1.5 + torch.tensor(float(E)).log().item()) ** 2)


def test_start_of_top_k() -> None:
    drawn = TopKGate(2, 50, 150, initial_range=0.2)
    assert 0.19 < float(drawn.weight.detach().abs().max()) <= 0.2
    assert 0.15 < float(drawn.bias.detach().abs().max()) <= 0.2
    glorot = TopKGate(2, 50, 150, initial_range=None)
    bound = (6 / 200) ** 0.5
    assert 0.99 * bound < float(glorot.weight.detach().abs().max()) <= bound
    assert not glorot.bias.any()
    static = TopKGate(40, 12, None, initial_range=None)
    assert 0.48 < float(static.bias.detach().abs().max()) <= 0.5  # sqrt(3 / 12)


def test_hash_table() -> None:
    inputs = {"x": Numeric(2), "user": Categorical(100), "item": Categorical(30)}
    gate = HashGate(2, E, D, inputs=inputs)
    assert gate.input_name == "user"
    assert gate.table.shape == (2, 100)
    assert not torch.equal(gate.table[0], gate.table[1])
    counts = torch.bincount(gate.table[0], minlength=E)
    assert int(counts.max() - counts.min()) <= 1
    assert torch.equal(gate.table, HashGate(2, E, D, inputs=inputs).table)
    assert not torch.equal(gate.table, HashGate(2, E, D, inputs=inputs, seed=1).table)
    ids = torch.tensor([7, 99])
    weights = gate(torch.randn(2, D), {"user": ids, "item": ids * 0}).weights
    assert torch.equal(weights.argmax(-1), gate.table[:, ids].T)
    named = HashGate(2, E, D, inputs=inputs, input_name="item")
    assert named.table.shape == (2, 30)
    with pytest.raises(InputError, match=r"reads the raw input 'item'; got \['user'\]"):
        named(torch.randn(2, D), {"user": ids})


def test_hash_assignments() -> None:
    """Random tables draw each id alone; balanced ones give every expert about the same number of rows."""
    counts = torch.tensor([50, 20, 20, 10, 10, 10, *[0] * 94])
    described = {"id": Categorical(100, counts)}
    drawn = HashGate(1, 4, inputs=described, assignment="random", seed=1).table[0]
    assert drawn.bincount(minlength=4).tolist() != [25] * 4
    assert drawn.bincount(minlength=4).min() > 10
    table = HashGate(1, 4, inputs=described, assignment="balanced", seed=1).table[0]
    rows = torch.zeros(4, dtype=torch.int64).index_add(0, table, counts)
    assert sorted(rows.tolist()) == [20, 20, 30, 50]
    assert table.bincount(minlength=4).max() <= 60  # ids that never occur are spread as well
    assert not torch.equal(table, HashGate(1, 4, inputs=described, assignment="balanced", seed=2).table[0])
    with pytest.raises(InputError, match=r"^assignment=balanced"):
        HashGate(1, 4, inputs={"id": Categorical(100)}, assignment="balanced")


def test_fixed_patterns() -> None:
    full = FixedGate(2, 4, D)(None).weights
    assert torch.equal(full, torch.full((2, 4), 0.25))
    none = FixedGate(2, 4, D, pattern="none")(None).weights
    assert none.tolist() == [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]]
    bottom = FixedGate(2, 4, D, pattern="shared_bottom")(None).weights
    assert bottom.tolist() == [[1, 0, 0, 0]] * 2
    random = FixedGate(5, 16, D, pattern="random", k=3, seed=1)(None).weights
    assert ((random > 0).sum(-1) == 3).all()
    assert torch.equal(random, FixedGate(5, 16, D, pattern="random", k=3, seed=1)(None).weights)
    given = FixedGate(2, 2, D, weights=[[1, 0], [0.25, 0.75]])(None).weights
    assert given.tolist() == [[1, 0], [0.25, 0.75]]


def test_gumbel_switches() -> None:
    gate = GumbelSoftmaxGate(1, E, D, sparsity_weight=0.5, initial_probability=0.5)
    x = torch.randn(200, D)
    routing = gate(x)
    alpha = (x @ gate.weight[0].T + gate.bias[0]).softmax(-1)
    ratio = routing.weights[:, 0] / alpha
    torch.testing.assert_close(ratio, (ratio > 0.5).float())  # binary in the forward pass
    assert 0.4 < float(ratio.detach().mean()) < 0.6
    logits = x @ gate.switch_weight[0].T + gate.switch_bias[0]
    torch.testing.assert_close(routing.losses["sparsity"], 0.5 * logits.sigmoid().log().sum(-1).mean())
    gate.eval()
    torch.testing.assert_close(gate(x).weights[:, 0], alpha * (logits > 0))


def normal_cdf(x: float) -> float:
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def test_load_by_hand() -> None:
    """An expert's threshold is the k-th largest of the others: a kept one is compared with the best dropped one."""
    clean, noisy, stddev = [1.0, 0.5, -1.0], [2.0, 1.0, 0.0], [0.5, 1.0, 2.0]
    thresholds = [1.0, 2.0, 2.0]  # k = 1
    load = [normal_cdf((c - t) / s) for c, t, s in zip(clean, thresholds, stddev, strict=True)]
    mean = sum(load) / 3
    expected = sum((value - mean) ** 2 for value in load) / 3 / mean**2
    actual = load_loss(*(torch.tensor([[row]], dtype=torch.float64) for row in (clean, noisy, stddev)), k=1)
    assert float(actual) == pytest.approx(expected)


def test_importance_by_hand() -> None:
    weights = torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]]])  # sums 1.5 and 0.5: mean 1, variance 0.25
    assert float(importance_loss(weights)) == pytest.approx(0.25)
    assert float(importance_loss(weights.expand(2, 3, 2))) == pytest.approx(0.75)  # summed over tasks


def test_balance_by_hand() -> None:
    probabilities = torch.tensor([[[0.7, 0.3]], [[0.6, 0.4]], [[0.2, 0.8]]])
    selected = probabilities > 0.5
    expected = 2 * (2 / 3 * 0.5 + 1 / 3 * 0.5)
    assert float(balance_loss(probabilities, selected)) == pytest.approx(expected)
    both = torch.ones_like(selected)
    assert float(balance_loss(probabilities, both)) == pytest.approx(1.0)  # shares, not counts: any k has minimum 1


def test_a_static_gate_is_a_batch_of_one() -> None:
    gate = TopKGate(2, E, k=2, importance_weight=0.3, balance_weight=0.2, z_weight=0.1)
    routing = gate(None)
    weights, probabilities = routing.weights[None], gate.bias.softmax(-1)[None]
    torch.testing.assert_close(routing.losses["importance"], 0.3 * importance_loss(weights))
    torch.testing.assert_close(routing.losses["balance"], 0.2 * balance_loss(probabilities, weights > 0))
    torch.testing.assert_close(routing.losses["z"], 0.1 * gate.bias.logsumexp(-1).square().sum())
    top1 = TaskTop1Gate(2, E, balance_weight=0.5)
    routing = top1(None)
    expected = 0.5 * balance_loss(top1.bias.softmax(-1)[None], (routing.weights > 0)[None])
    torch.testing.assert_close(routing.losses["balance"], expected)


def test_gumbel_gradient_is_that_of_the_relaxation() -> None:
    """Straight through: the value is binary, the slope is the sigmoid's at the drawn noise and temperature."""
    gate = GumbelSoftmaxGate(2, E, temperature=0.7).double()
    gate.temperature.fill_(0.7)
    torch.manual_seed(3)
    gate(None).weights.sum().backward()
    torch.manual_seed(3)
    uniform = torch.rand(2, E, dtype=torch.float64)
    noisy = gate.switch_bias.detach() + uniform.log() - (1 - uniform).log()
    relaxed = (noisy / 0.7).sigmoid()
    expected = gate.bias.detach().softmax(-1) * relaxed * (1 - relaxed) / 0.7
    torch.testing.assert_close(gate.switch_bias.grad, expected)


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


@pytest.mark.parametrize("kind", [GumbelMatrixGate, GumbelSoftmaxGate, SoftmaxSelectorGate])
def test_a_run_that_resumes_without_its_schedule_keeps_the_temperature(kind: type[Gate]) -> None:
    old, new = kind(2, 4), kind(2, 4)
    old.temperature.fill_(30.0)
    new.load_state_dict(old.state_dict())
    assert float(new.temperature) == 30.0


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
    assert (gate.logits.grad != 0).all()  # a connection that is off has a gradient, so training can switch it on again


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


def test_an_annealed_temperature_is_saved() -> None:
    """Evaluation depends on it, so a checkpoint without it would evaluate another gate."""
    gate, other = SoftmaxSelectorGate(1, E, D), SoftmaxSelectorGate(1, E, D)
    gate.temperature.fill_(0.05)
    other.load_state_dict(gate.state_dict())
    assert float(other.temperature) == pytest.approx(0.05)
