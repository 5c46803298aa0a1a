"""Gates against slow, literal versions of their equations, and properties over random sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtl.gates import SoftmaxSelectorGate, TaskTop1Gate, TopKGate
from tests.gate_cases import CASES, GateCase, route

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=30)
settings.load_profile("fixed")

experts = st.integers(1, 17)
seeds = st.integers(0, 2**31)
scales = st.sampled_from([0.01, 1.0, 100.0])


@given(st.integers(2, 17), seeds)
def test_topk_keeps_exactly_k_where_logits_tie(num_experts: int, seed: int) -> None:
    gate = TopKGate(1, num_experts, 3, k=2)
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.zero_()
    weights = gate(torch.randn(4, 3)).weights
    assert ((weights > 0).sum(-1) == 2).all()


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


@pytest.mark.parametrize("case", [c for c in CASES if c.learns and c.stacked], ids=lambda case: case.name)
@settings(max_examples=5)
@given(num_experts=experts, order=st.permutations(range(4)), seed=seeds)
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
