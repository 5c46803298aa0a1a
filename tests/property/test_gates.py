"""Gates against slow, literal versions of their equations, and properties over random sizes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtl.functional import smooth_step
from mtl.gates import CometGate, DSelectKGate, SoftmaxSelectorGate, TaskTop1Gate, TopKGate
from tests.gate_cases import CASES, GateCase, route

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=30)
settings.load_profile("fixed")

experts = st.integers(1, 17)
seeds = st.integers(0, 2**31)
scales = st.sampled_from([0.01, 1.0, 100.0])


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


@given(experts, st.integers(1, 17), st.booleans(), scales, seeds)
def test_topk_keeps_the_k_largest(num_experts: int, k: int, before: bool, scale: float, seed: int) -> None:
    torch.manual_seed(seed)
    k = min(k, num_experts)
    gate = TopKGate(2, num_experts, 3, k=k, normalize="before" if before else "after").double()
    x = scale * torch.randn(4, 3, dtype=torch.float64)
    weights = gate(x).weights
    logits = torch.einsum("bd,ted->bte", x, gate.weight) + gate.bias
    kept = logits >= logits.sort(-1).values[..., -k : num_experts - k + 1]
    assert torch.equal(weights > 0, kept)
    expected = logits.exp() * kept
    torch.testing.assert_close(weights, expected / (logits.exp() if before else expected).sum(-1, keepdim=True))


@given(experts, st.integers(1, 5), st.sampled_from([0.01, 0.5, 3.0]), seeds)
def test_softmax_selector_is_its_definition(num_experts: int, k: int, temperature: float, seed: int) -> None:
    torch.manual_seed(seed)
    gate = SoftmaxSelectorGate(2, num_experts, 3, k=k, temperature=temperature).double()
    gate.temperature.fill_(temperature)  # float32 rounded it
    x = torch.randn(4, 3, dtype=torch.float64)
    weights = gate(x).weights
    for task in range(2):
        expected = torch.zeros(4, num_experts, dtype=torch.float64)
        mix = (x @ gate.mix_weight[task].T + gate.mix_bias[task]).softmax(-1)
        for j in range(k):
            beta = x @ gate.selector_weight[task, j].T + gate.selector_bias[task, j]
            expected = expected + mix[:, j, None] * (beta / temperature).softmax(-1)
        torch.testing.assert_close(weights[:, task], expected)
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, 2, dtype=torch.float64))


@given(experts, st.booleans(), scales, seeds)
def test_task_top1_keeps_the_most_probable_unscaled(num_experts: int, shared: bool, scale: float, seed: int) -> None:
    torch.manual_seed(seed)
    gate = TaskTop1Gate(3, num_experts, 4, shared=shared)
    x = scale * torch.randn(5, 4)
    weights = gate(x).weights
    probability = (torch.einsum("bd,ted->bte", x, gate.weight) + gate.bias).softmax(-1)
    assert ((weights > 0).sum(-1) == 1).all()
    torch.testing.assert_close(weights.sum(-1), probability.amax(-1).expand(5, 3))


@given(st.sampled_from([c for c in CASES if c.learns and c.stacked]), experts, st.permutations(range(4)), seeds)
def test_permuted_tasks_permute_the_weights(case: GateCase, num_experts: int, order: list[int], seed: int) -> None:
    """No task may leak into another's gate, and none has a privileged index."""
    torch.manual_seed(seed)
    gate = case.build(4, num_experts, 3).eval()
    x = torch.randn(5, 3)
    before = route(gate, x, 5).weights
    with torch.no_grad():
        for parameter in gate.parameters():
            if len(parameter) == 4:  # a shared gate has nothing to permute
                parameter.copy_(parameter[order])
    torch.testing.assert_close(route(gate, x, 5).weights, before[..., order, :])
