"""Auxiliary losses and switches by hand: the values that published numbers rest on, and where gradients pass."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mtl.checks import InputError
from mtl.gates import DSelectKGate, FixedGate, GumbelSoftmaxGate, HashGate, SoftmaxSelectorGate, TaskTop1Gate, TopKGate
from mtl.gates.balance import balance_loss, importance_loss, load_loss
from mtl.types import Categorical

D, E = 4, 8


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


@pytest.mark.parametrize("width", [D, None], ids=["per_example", "static"])
def test_noise_learns_from_the_weights_too(width: int | None) -> None:
    gate = TopKGate(2, E, width, k=2, noisy=True)
    weights = gate(None if width is None else torch.randn(32, width)).weights
    (weights * torch.randn_like(weights)).sum().backward()
    noise = [parameter for name, parameter in gate.named_parameters() if name.startswith("noise_")]
    assert noise
    assert all(parameter.grad.abs().max() > 0 for parameter in noise)


def test_noise_has_the_learnt_size() -> None:
    """Tiny noise must leave the clean choice, large noise must override it."""
    gate = TopKGate(1, E, D, k=1, noisy=True)
    x = torch.randn(400, D)
    with torch.no_grad():
        gate.noise_weight.zero_()
        agreement = []
        for size in (-30.0, 30.0):  # softplus: 1e-13 and 30
            gate.noise_bias.fill_(size)
            chosen = gate(x).weights.argmax(-1)
            agreement.append(float((chosen == gate.eval()(x).weights.argmax(-1)).float().mean()))
            gate.train()
    assert agreement[0] > 0.99
    assert agreement[1] < 0.3  # one in eight by chance


@pytest.mark.parametrize("width", [D, None], ids=["per_example", "static"])
def test_reachability_by_hand(width: int | None) -> None:
    gate = DSelectKGate(3, 5, width, k=2, reachability_weight=0.4)
    routing = gate(None if width is None else torch.randn(6, width))
    rows = 1 if width is None else 6
    expected = 0.4 * (1 / (1e-6 + routing.selectors.sum(-1))).sum() / rows
    torch.testing.assert_close(routing.losses["reachability"], expected)
    with torch.no_grad():
        gate.selector_bias.fill_(1e9)  # code 111 is expert 7, which is not there
    unreached = gate(None if width is None else torch.randn(6, width))
    assert (unreached.weights == 0).all()
    assert float(unreached.losses["reachability"].detach()) == pytest.approx(0.4 * 6 * 1e6, rel=1e-4)


def test_reachability_is_for_surplus_codes_only() -> None:
    assert "reachability" not in DSelectKGate(1, 8, D)(torch.randn(2, D)).losses


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


def test_gumbel_starts_mostly_on() -> None:
    gate = GumbelSoftmaxGate(50, 40, initial_probability=0.8)
    share = float((gate(None).weights > 0).float().mean())
    assert share == pytest.approx(0.8, abs=0.04)
    assert (gate.eval()(None).weights > 0).all()


def test_an_annealed_temperature_is_saved() -> None:
    """Evaluation depends on it, so a checkpoint without it would evaluate another gate."""
    gate = SoftmaxSelectorGate(1, E, D)
    gate.temperature.fill_(0.05)
    other = SoftmaxSelectorGate(1, E, D)
    other.load_state_dict(gate.state_dict())
    assert float(other.temperature) == pytest.approx(0.05)


def test_hash_tables_of_shared_and_one_task_gates() -> None:
    inputs = {"user": Categorical(60)}
    gate = HashGate(3, E, D, inputs=inputs, shared=True)
    ids = torch.arange(60)
    weights = gate(torch.randn(60, D), {"user": ids}).weights
    assert gate.table.shape == (1, 60)
    assert torch.equal(weights.argmax(-1), gate.table[0][:, None].expand(60, 3))
    own = HashGate(3, E, D, inputs=inputs)
    one = own(torch.randn(60, D), {"user": ids.int()}, [2]).weights  # ids may be int32
    assert torch.equal(one.argmax(-1)[:, 0], own.table[2])


@pytest.mark.parametrize(
    ("make", "options", "name"),
    [
        (TopKGate, {"importance_weight": float("nan")}, "importance_weight"),
        (SoftmaxSelectorGate, {"k": 0}, "k"),
        (SoftmaxSelectorGate, {"temperature": -1}, "temperature"),
        (SoftmaxSelectorGate, {"entropy_weight": float("inf")}, "entropy_weight"),
        (DSelectKGate, {"entropy_weight": -1e-9}, "entropy_weight"),
        (GumbelSoftmaxGate, {"temperature": 0}, "temperature"),
        (GumbelSoftmaxGate, {"sparsity_weight": -1}, "sparsity_weight"),
        (GumbelSoftmaxGate, {"initial_probability": 0}, "initial_probability"),
        (HashGate, {"table_size": 0}, "table_size"),
        (FixedGate, {"weights": [[float("nan")] * 16] * 2}, "weights"),
    ],
    ids=str,
)
def test_more_refused_options(make: Any, options: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError, match=rf"gate\.{name}"):
        make(2, 16, D, **options)
