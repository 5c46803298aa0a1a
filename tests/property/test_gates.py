"""Gates against slow, literal versions of their equations, and properties over random sizes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtl.functional import smooth_step
from mtl.gates import CometGate, DSelectKGate, TopKGate
from tests.gate_cases import CASES, harden, route

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("fixed")

experts = st.integers(1, 17)
sizes = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))  # B, D, T
seeds = st.integers(0, 2**31)
scales = st.sampled_from([0.1, 1.0, 10.0, 1000.0])


@given(st.sampled_from(CASES), experts, sizes, scales, seeds)
def test_simplex(case, num_experts: int, size: tuple[int, int, int], scale: float, seed: int) -> None:
    torch.manual_seed(seed)
    rows, width, tasks = size
    gate = case.build(tasks, num_experts, width)
    weights = route(gate, scale * torch.randn(rows, width), rows).weights
    assert weights.shape == (*((rows,) if weights.dim() == 3 else ()), tasks, num_experts)
    assert (weights >= 0).all()
    total = weights.sum(-1)
    assert not case.bounded or (total <= 1 + 1e-5).all()
    if case.whole(num_experts):
        assert (total >= 1 - 1e-5).all()


@given(st.sampled_from([c for c in CASES if c.k]), experts, sizes, seeds)
def test_cardinality(case, num_experts: int, size: tuple[int, int, int], seed: int) -> None:
    torch.manual_seed(seed)
    rows, width, tasks = size
    gate = case.build(tasks, num_experts, width)
    harden(gate)
    count = (route(gate, torch.randn(rows, width), rows).weights > 0).sum(-1)
    assert (count <= min(case.k, num_experts)).all()
    if case.name.startswith("topk"):
        assert (count == min(case.k, num_experts)).all()


def walk(split: Tensor, gamma: float, node: int, num_experts: int, reach: Tensor) -> list[Tensor]:
    """Return the probabilities of the leaves below ``node``, left first: the definition of a COMET tree."""
    if node >= num_experts - 1:
        return [reach]
    left = smooth_step(split[:, node], gamma)
    below = [(2 * node + 1, left), (2 * node + 2, 1 - left)]
    return [leaf for child, h in below for leaf in walk(split, gamma, child, num_experts, reach * h)]


@given(experts, st.integers(1, 3), st.sampled_from([0.1, 1.0, 10.0]), seeds)
def test_comet_is_its_definition(num_experts: int, k: int, gamma: float, seed: int) -> None:
    torch.manual_seed(seed)
    gate = CometGate(2, num_experts, 4, k=k, gamma=gamma).double()
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.normal_(0, 0.3)
    x = torch.randn(5, 4, dtype=torch.float64)
    routing = gate(x)
    for task in range(2):
        split = torch.einsum("bd,nkd->bkn", x, gate.split_weight[task]) + gate.split_bias[task].T
        leaf = torch.einsum("bd,ekd->bke", x, gate.leaf_weight[task]) + gate.leaf_bias[task].T
        one = torch.ones(5, dtype=torch.float64)
        v = torch.stack([torch.stack(walk(split[:, t], gamma, 0, num_experts, one), -1) for t in range(k)], 1)
        torch.testing.assert_close(routing.selectors[:, task], v)
        score = torch.where(v > 0, leaf.exp() * (v + 1e-8), 0.0)
        expected = score.sum(1) / score.sum((1, 2))[:, None]
        torch.testing.assert_close(routing.weights[:, task], expected)


@given(experts, st.integers(1, 3), st.sampled_from([0.1, 1.0, 10.0]), seeds)
def test_dselect_k_is_its_definition(num_experts: int, k: int, gamma: float, seed: int) -> None:
    torch.manual_seed(seed)
    gate = DSelectKGate(2, num_experts, 4, k=k, gamma=gamma).double()
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.normal_(0, 0.3)
    x = torch.randn(5, 4, dtype=torch.float64)
    weights, bits = gate(x).weights, gate.num_bits
    for task in range(2):
        mix = (x @ gate.mix_weight[task].T + gate.mix_bias[task]).softmax(-1)
        z = smooth_step(torch.einsum("bd,kmd->bkm", x, gate.selector_weight[task]) + gate.selector_bias[task], gamma)
        for expert in range(num_experts):
            expected = torch.zeros(5, dtype=torch.float64)
            for j in range(k):
                term = mix[:, j]
                for bit in range(bits):
                    on = (expert >> (bits - 1 - bit)) & 1  # bit 0 is the most significant
                    term = term * (z[:, j, bit] if on else 1 - z[:, j, bit])
                expected = expected + term
            torch.testing.assert_close(weights[:, task, expert], expected)


@given(st.integers(2, 17), seeds)
def test_topk_keeps_exactly_k_where_logits_tie(num_experts: int, seed: int) -> None:
    gate = TopKGate(1, num_experts, 3, k=2)
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.zero_()
    weights = gate(torch.randn(4, 3)).weights
    assert ((weights > 0).sum(-1) == 2).all()


@given(st.floats(1e-3, 100), st.lists(st.floats(-200, 200), min_size=2, max_size=20))
def test_smooth_step(gamma: float, points: list[float]) -> None:
    t = torch.tensor(points, dtype=torch.float64).sort().values.requires_grad_()
    y = smooth_step(t, gamma)
    assert ((y >= 0) & (y <= 1)).all()
    assert (y.diff() >= 0).all()
    torch.testing.assert_close(y + smooth_step(-t, gamma), torch.ones_like(y))
    inside = t.abs() < gamma / 2
    cubic = -2 * t**3 / gamma**3 + 3 * t / (2 * gamma) + 0.5
    torch.testing.assert_close(y[inside], cubic[inside], atol=1e-9, rtol=1e-9)
    assert torch.equal(y[~inside], (t[~inside] > 0).double())
    y.sum().backward()
    assert (t.grad[~inside] == 0).all()
    assert (t.grad >= 0).all()
