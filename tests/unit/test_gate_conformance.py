"""What every gate must do, whatever the number of experts: the contract that networks rely on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtl.experts.dense import StackedDense
from mtl.experts.dispatch import Dispatch
from mtl.gates import Gate
from mtl.gates.permuted import Permutation, PermutedGate
from mtl.networks.mixture import MixtureOfExperts
from mtl.types import Routing
from tests.gate_cases import CASES, GateCase, harden, route

T, D = 3, 6
EXPERTS = (1, 2, 5, 8)
every_size = pytest.mark.parametrize("num_experts", EXPERTS)
sizes_with_a_choice = pytest.mark.parametrize("num_experts", [e for e in EXPERTS if e > 2])
every_gate = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
learning_gates = pytest.mark.parametrize("case", [c for c in CASES if c.learns], ids=lambda case: case.name)


def check_weights(case: GateCase, gate: Gate, weights: Tensor) -> None:
    """Check that weights are on the simplex, or below it where the gate says so."""
    assert torch.isfinite(weights).all()
    assert (weights >= 0).all()
    total = weights.sum(-1)
    if case.whole(gate.num_experts):
        torch.testing.assert_close(total, torch.ones_like(total), atol=1e-5, rtol=0)
    elif case.bounded:
        assert (total <= 1 + 1e-5).all()


def check_finite(gate: Gate, total: Tensor) -> None:
    """Check that ``total`` is finite, and so is the gradient that it gives each parameter."""
    assert torch.isfinite(total)
    gate.zero_grad()
    total.backward()
    for name, parameter in gate.named_parameters():
        if parameter.numel() == 0:  # a single expert leaves nothing to split or select
            continue
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


def objective(routing: Routing) -> Tensor:
    return routing.weights.square().sum() + sum(routing.losses.values(), torch.zeros(()))


@every_gate
@every_size
def test_weights(case: GateCase, num_experts: int) -> None:
    """Exact shapes: a missing or extra dimension would broadcast silently in the mixture."""
    for training in (True, False):
        gate = case.build(T, num_experts, D).train(training)
        for rows in (0, 1, 7):
            routing = route(gate, torch.randn(rows, D), rows)
            assert routing.weights.shape == ((rows, T, num_experts) if case.looks else (T, num_experts))
            check_weights(case, gate, routing.weights)
            assert all(loss.dim() == 0 for loss in routing.losses.values())
            assert rows == 0 or all(torch.isfinite(loss) for loss in routing.losses.values())
            if routing.selectors is not None:
                assert routing.selectors.shape[-3:] == (T, min(case.k or 0, num_experts), num_experts)
        if case.static:
            gate = case.build(T, num_experts, None).train(training)
            routing = gate(None)
            assert routing.weights.shape == (T, num_experts)
            check_weights(case, gate, routing.weights)
            assert all(loss.dim() == 0 and torch.isfinite(loss) for loss in routing.losses.values())


@every_gate
@every_size
def test_evaluation_is_repeatable_and_part_of_the_state(case: GateCase, num_experts: int) -> None:
    """The same weights again, from a state dict in a gate of another seed, and for some of the tasks alone."""
    for width in (D, None) if case.static else (D,):
        gate, x = case.build(T, num_experts, width).eval(), None if width is None else torch.randn(7, D)
        whole = route(gate, x).weights
        assert torch.equal(route(gate, x).weights, whole)
        torch.manual_seed(99)
        twin = case.build(T, num_experts, width).eval()
        twin.load_state_dict(gate.state_dict())
        assert torch.equal(route(twin, x).weights, whole)
        for tasks in ([1], [2, 0]):
            torch.testing.assert_close(route(gate, x, tasks=tasks).weights, whole[..., tasks, :])
        assert torch.equal(route(gate, x, tasks=range(T)).weights, whole)
        assert route(gate, x, tasks=range(T)).tasks is None  # all of them
        if width is None:  # the example plays no part
            assert torch.equal(route(gate, torch.randn(7, D)).weights, whole)


@pytest.mark.parametrize("case", [c for c in CASES if c.k is not None], ids=lambda case: case.name)
@every_size
def test_at_most_k_experts_once_binary(case: GateCase, num_experts: int) -> None:
    for width in (D, None) if case.static else (D,):
        gate = case.build(T, num_experts, width)
        harden(gate)
        weights = route(gate, None if width is None else torch.randn(7, D)).weights
        assert ((weights > 0).sum(-1) <= min(case.k or 0, num_experts)).all()


@learning_gates
@every_size
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_extreme_logits_stay_finite(case: GateCase, num_experts: int, autocast: bool) -> None:
    """Huge inputs, unlike huge parameters, scale every logit of a row alike, down to COMET's single splits."""
    for size, width, huge in ((1.0, D, 1.0), (1e4, D, 1.0), (1e4, None, 1.0), (0.0, D, 1e6)):
        if width is None and not case.static:
            continue
        gate = case.build(T, num_experts, width)
        with torch.no_grad():
            for parameter in gate.parameters() if size else ():  # logits of about +-size
                parameter.copy_(torch.randn_like(parameter).sign() * size / (D if width else 1))
        x = None if width is None else (huge * (torch.ones(7, D) if size else torch.randn(7, D))).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            routing = route(gate, x)
            assert routing.weights.dtype == torch.float32
            check_weights(case, gate, routing.weights)
            check_finite(gate, objective(routing))
        assert x is None or not case.looks or torch.isfinite(x.grad).all()


@learning_gates
def test_nan_stays_nan(case: GateCase) -> None:
    """Weights that are finite although what they come from is not would hide that training went wrong."""
    for training in (True, False):
        for width in (D, None) if case.static else (D,):
            for name, value in case.build(T, 5, width).named_parameters():
                if name.startswith("noise_") and not training:  # plays no part
                    continue
                for number in range(0, value[0].numel(), D if name.endswith("weight") else 1):
                    gate = case.build(T, 5, width).train(training)
                    with torch.no_grad():
                        gate.get_parameter(name)[0].flatten()[number] = torch.nan
                    weights = route(gate, None if width is None else torch.rand(7, D)).weights
                    assert weights.sum((-2, -1)).isnan().all(), name
        if case.looks:
            x = torch.randn(7, D).index_fill(0, torch.tensor([4]), torch.nan)
            weights = route(case.build(T, 5, D).train(training), x).weights
            assert weights.isnan().any(-1).any(-1).tolist() == [row == 4 for row in range(7)]
            assert weights[4].isnan().any(-1).all()


@learning_gates
@sizes_with_a_choice
def test_every_parameter_learns_from_the_start(case: GateCase, num_experts: int) -> None:
    for width in (D, None) if case.static else (D,):
        gate = case.build(
            T if width else 8, num_experts, width
        )  # of eight tasks at least one draws a switch that is on
        weights = route(gate, None if width is None else torch.randn(32, D), 32).weights
        (weights * torch.randn_like(weights)).sum().backward()
        for name, parameter in gate.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name


@learning_gates
def test_two_experts_suffice_to_learn(case: GateCase) -> None:
    """With all experts kept there is no choice, but their shares must still learn."""
    gate = case.build(T, 2, D)
    weights = route(gate, torch.randn(32, D), 32).weights
    (weights * torch.randn_like(weights)).sum().backward()
    assert max(float(p.grad.abs().max()) for p in gate.parameters() if p.grad is not None) > 0


@learning_gates
@pytest.mark.parametrize("num_experts", [1, 5])  # no split at all, uneven tree
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
@pytest.mark.parametrize("permuted", [False, True], ids=["plain", "permuted"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_zeros_that_a_gate_calls_exact_pass_no_gradient(case: GateCase, training: bool, permuted: bool) -> None:
    """Sparse execution leaves out what dense execution computes, and yet every gradient is the same."""
    seen = training and case.name.startswith("gumbel")  # straight-through: no promise
    for scale in (0.3, 3.0, 1e3):  # smooth steps are between 0 and 1, most are not; softmax underflows
        for width in (D, None) if case.static else (D,):
            torch.manual_seed(0)
            gate = case.build(T, 8, width)
            with torch.no_grad():
                for parameter in gate.parameters():
                    parameter.normal_(0.0, scale)
            if permuted:
                gate = PermutedGate(gate, Permutation(8))
                gate.permutation.harden(torch.arange(8).roll(3)[None])
            layer = MixtureOfExperts(D, T, 8, gate, StackedDense(8, D, [5]), width is None).double().train(training)
            x, inputs = torch.randn(9, D, dtype=torch.float64), {"id": torch.arange(9)}
            results = []
            for execution in ("dense", "sparse"):
                torch.manual_seed(1)
                layer.dispatch, given = Dispatch(execution), x.clone().requires_grad_()
                mixed, routing = layer(given, inputs)
                wanted = [given, *layer.parameters()]
                results.append(torch.autograd.grad(mixed.cos().sum(), wanted, materialize_grads=True))
            seen |= routing.exact_zeros and not routing.weights.all()
            for dense, sparse in zip(*results, strict=True):
                torch.testing.assert_close(sparse, dense, atol=1e-10, rtol=1e-10 if case.bounded else 1e-8)
    assert seen


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


@every_gate
def test_tasks_may_have_inputs_of_their_own(case: GateCase) -> None:
    """With ``x [B, T, D]`` each gate routes by its task's input, as it would alone."""
    gate, x = case.build(T, 4, D).eval(), torch.randn(7, T, D)
    together = route(gate, x).weights
    for task in range(T):
        alone = route(gate, x[:, task], tasks=[task]).weights[..., 0, :]
        torch.testing.assert_close(together[..., task, :], alone)
    some = [2, 0]
    torch.testing.assert_close(route(gate, x[:, some], tasks=some).weights, together[..., some, :])
