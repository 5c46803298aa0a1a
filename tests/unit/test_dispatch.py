"""Sparse execution equals dense execution: outputs, every gradient, dropout, and a whole course of training."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from mtl.experts.dense import MANY_EXPERTS, StackedDense, StackedLinear
from mtl.experts.dispatch import Dispatch, used_share
from mtl.experts.kernels import mix, stacked_linear
from mtl.experts.pairs import Pairs
from mtl.functional import keep_mask
from mtl.gates import (
    CometGate,
    DSelectKGate,
    FixedGate,
    GumbelSoftmaxGate,
    HashGate,
    SoftmaxSelectorGate,
    TaskTop1Gate,
    TopKGate,
)
from mtl.networks.bottom import TabularBottom
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.permutation import Permutation
from mtl.types import Batch, Categorical, DataSpec, InputError, Routing, TaskSpec
from tests.dropout import relu_dropout
from tests.routing import random_weights

EXPERTS, WIDTH = 8, 5
SPEC = DataSpec(
    {"user": Categorical(20), "item": Categorical(30)},
    [TaskSpec("a", "binary"), TaskSpec("b", "regression"), TaskSpec("c", "multiclass", num_classes=3)],
)
GATES = {
    "topk": partial(TopKGate, k=2),
    "topk_before": partial(TopKGate, k=1, normalize="before"),
    "hash": partial(HashGate, input_name="user"),
    "dselect_k": partial(DSelectKGate, k=2, gamma=1e-3, entropy_weight=0.1),
    "comet": partial(CometGate, k=2, gamma=1e-3, entropy_weight=0.1),
    "softmax_selector": partial(SoftmaxSelectorGate, k=2, temperature=1e-5),
    "task_top1": TaskTop1Gate,
    "gumbel_softmax": partial(GumbelSoftmaxGate, initial_probability=0.2),
}

UNUSED = partial(FixedGate, weights=[[0.5, 0.5, 0, 0, 0, 0, 0, 0]] * 2 + [[0, 0.2, 0, 0, 0.8, 0, 0, 0]])
HARD_GATES = {**GATES, "fixed": UNUSED}


def gradients(layer: StackedDense, execution: str, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(3)
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    layer.zero_grad()
    mixed = Dispatch(execution)(layer, x, Routing(weights))
    (mixed.cos() * torch.arange(1.0, 1.0 + mixed[0].numel(), dtype=x.dtype).view_as(mixed[0])).sum().backward()
    used = torch.where(weights != 0, weights.grad, 0.0)  # what a gate with exact zeros lets through
    named = {name: p.grad.clone() for name, p in layer.named_parameters()}
    return {"mixed": mixed.detach(), "x": x.grad, "weights": used, **named}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("units", [[WIDTH], [7, WIDTH], [7, 6, WIDTH], []])
@pytest.mark.parametrize("dropout", [0.0, 0.5, 0.3])
@pytest.mark.parametrize("rows", [1, 7, 512])
@pytest.mark.parametrize("experts", [EXPERTS, MANY_EXPERTS])
def test_sparse_equals_dense(experts: int, rows: int, dropout: float, units: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    layer = StackedDense(experts, 6, units, dropout).to(dtype)
    x, weights = torch.randn(rows, 6, dtype=dtype), random_weights(rows, 3, experts, 2).to(dtype)
    weights[:, :, 3] = 0.0  # an expert that nobody wants
    dense, sparse = (gradients(layer, execution, x, weights) for execution in ("dense", "sparse"))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    for name, value in dense.items():
        scale = max(1.0, float(value.abs().max()))
        assert torch.allclose(value / scale, sparse[name] / scale, rtol=0, atol=tolerance), name


@pytest.mark.parametrize(
    "weights", [random_weights(4, 2, EXPERTS, 3)[0], torch.zeros(2, EXPERTS)], ids=["some", "none"]
)
def test_static_weights(weights: Tensor) -> None:
    layer = StackedDense(EXPERTS, 6, [7, WIDTH], 0.5)
    x = torch.randn(9, 6)
    dense, sparse = (gradients(layer, execution, x, weights) for execution in ("dense", "sparse"))
    for name, value in dense.items():
        assert torch.allclose(value, sparse[name], atol=1e-5), name


def test_no_weight_at_all() -> None:
    layer = StackedDense(EXPERTS, 6, [WIDTH])
    x, weights = torch.randn(9, 6), torch.zeros(9, 2, EXPERTS)
    values = gradients(layer, "sparse", x, weights)
    assert all((value == 0).all() for name, value in values.items() if name != "mixed")
    assert (values["mixed"] == 0).all()


@pytest.mark.parametrize("experts", [EXPERTS, MANY_EXPERTS])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_mixture_equals_autograd(p: float, experts: int) -> None:
    """The fused function against einsum and a mask, differentiated by torch's autograd where it can."""
    torch.manual_seed(0)
    layer = StackedDense(experts, 6, [7, WIDTH], p).double()
    x = torch.randn(11, 6, dtype=torch.float64)
    weights = torch.rand(11, 3, experts, dtype=torch.float64)

    def plain() -> Tensor:
        keys = layer.draw_keys()
        rows, h = torch.arange(11 * experts), x
        for linear, key in zip(layer.layers, keys, strict=True):
            h = torch.einsum("ehd,bed->beh", linear.weight, h.expand(experts, -1, -1).transpose(0, 1) if h is x else h)
            h = (h + linear.bias).relu()
            if p:
                h = h * 2 * keep_mask(key, rows, h.shape[-1], p, h.dtype).view_as(h)
        return torch.einsum("bte,beh->bth", weights, h)

    values = []
    for run in (plain, lambda: layer.mixture(x, weights)):
        torch.manual_seed(5)
        layer.zero_grad()
        mixed = run()
        mixed.sin().sum().backward()
        values.append([mixed.detach(), *(parameter.grad.clone() for parameter in layer.parameters())])
    for one, other in zip(*values, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("experts", [EXPERTS, MANY_EXPERTS])
def test_outputs_and_pairs_agree(experts: int) -> None:
    layer = StackedDense(experts, 6, [7, WIDTH], 0.5)
    x, weights = torch.randn(10, 6), random_weights(10, 2, experts, 2)
    keys, pairs = layer.draw_keys(), Pairs(weights)
    everything = layer(x, None, keys)  # [B, E, H]
    assert torch.allclose(layer.pairs_mixture(x, weights, pairs, keys), mix(everything, weights), atol=1e-6)
    assert torch.allclose(layer(x, [4, 1], keys), everything[:, [4, 1]], atol=1e-6)
    linear = StackedLinear(experts, 6, 3)
    assert torch.allclose(linear(x), torch.einsum("bd,ehd->beh", x, linear.weight), atol=1e-6)
    assert torch.allclose(layer.mixture(x, weights, None, keys), mix(everything, weights), atol=1e-6)
    assert sum(pairs.counts) == len(pairs.sample) == int((weights != 0).any(1).sum())


def test_weights_that_cancel_still_need_their_expert() -> None:
    weights = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]], [[0.0, 0.0], [0.0, 0.5]]])  # [B, T, E]
    pairs = Pairs(weights)
    assert pairs.counts == [1, 1]
    assert pairs.sample.tolist() == [0, 1]


@pytest.mark.parametrize("width", [1, 3])
def test_stacked_linear_equals_einsum(width: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(size, dtype=torch.float64) for size in ((5, 2, 4), (2, width, 4), (2, width)))
    arguments = [value.requires_grad_() for value in (x, weight, bias)]
    results = stacked_linear(*arguments), torch.einsum("bed,ehd->beh", x, weight) + bias
    assert torch.allclose(*results, atol=1e-12)
    for one, other in zip(*(torch.autograd.grad(r.sin().sum(), arguments) for r in results), strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def network(gate: object, execution: str, dropout: float = 0.5, width: int = WIDTH, permuted: bool = False) -> MMoE:
    torch.manual_seed(0)
    net = MMoE(
        SPEC,
        EXPERTS,
        partial(TabularBottom, embedding_dim=width // 2 if width > WIDTH else 4),
        partial(StackedDense, units=[width], dropout=dropout),
        gate,
        partial(Heads, units=[width if width > WIDTH else 4], dropout=dropout),
        execution=execution,
        permutation=Permutation if permuted else None,
    )
    if permuted:
        assert net.permutation is not None
        net.permutation.harden(torch.arange(EXPERTS).roll(3)[None])
    return net


def train(net: MMoE, steps: int, seed: int = 1) -> list[float]:
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        batch = Batch({"user": torch.randint(20, (32,)), "item": torch.randint(30, (32,))}, {})
        output = net(batch.inputs)
        loss = sum((p.float() - 1).square().mean() for p in output.predictions.values()) + sum(output.losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        net.dispatch.adapt(output.routing.weights.detach())
        losses.append(float(loss.detach()))
    return losses


def network_gradients(net: MMoE, rows: int) -> dict[str, Tensor]:
    """Return predictions, auxiliary losses and the gradient of every parameter for a batch."""
    torch.manual_seed(7)
    output = net({"user": torch.randint(20, (rows,)), "item": torch.randint(30, (rows,))})
    losses = [p.cos().sum() / rows for p in output.predictions.values()] + list(output.losses.values())
    torch.stack(losses).sum().backward()
    named = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return {**{f"prediction {name}": p.detach() for name, p in output.predictions.items()}, **named}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("rows", [1, 7, 512])
@pytest.mark.parametrize("gate", HARD_GATES.values(), ids=list(HARD_GATES))
def test_whole_networks_agree(gate: object, rows: int, dropout: float, permuted: bool, dtype: torch.dtype) -> None:
    """Wide enough that float32 goes through oneDNN where there is one."""
    results = []
    for execution in ("dense", "sparse"):
        net = network(gate, execution, dropout, width=128, permuted=permuted).to(dtype)
        results.append(network_gradients(net, rows))
    dense, sparse = results
    assert dense.keys() == sparse.keys()
    for name, value in dense.items():
        tolerance = 1e-10 if dtype == torch.float64 else 1e-6 if name.startswith("prediction") else 1e-5
        scale = max(1.0, float(value.abs().max()))
        assert torch.allclose(value / scale, sparse[name] / scale, rtol=0, atol=tolerance), name


@pytest.mark.parametrize("gate", GATES.values(), ids=list(GATES))
def test_a_course_of_training_is_the_same(gate: object) -> None:
    courses = {execution: train(network(gate, execution), 300) for execution in ("dense", "sparse", "auto")}
    for execution in ("sparse", "auto"):
        assert courses[execution] == pytest.approx(courses["dense"], abs=1e-4), execution


def test_zeros_that_carry_a_gradient_stay_dense() -> None:
    net = network(partial(GumbelSoftmaxGate, initial_probability=0.2), "sparse")
    output = net({"user": torch.arange(20), "item": torch.arange(20)})
    assert not output.routing.exact_zeros
    assert net.eval()({"user": torch.arange(20), "item": torch.arange(20)}).routing.exact_zeros


def test_auto_follows_the_share_and_remembers(caplog: pytest.LogCaptureFixture) -> None:
    dispatch, layer, x = Dispatch("auto"), StackedDense(EXPERTS, 6, [WIDTH]), torch.randn(20, 6)
    wide, narrow = Routing(torch.rand(20, 2, EXPERTS) + 0.1), Routing(random_weights(20, 1, EXPERTS, 1))
    between = Routing(torch.cat([torch.ones(20, 1, 5), torch.zeros(20, 1, 3)], -1))  # 0.625
    assert used_share(between.weights) == 0.625
    seen = []
    for routing in (between, narrow, between, wide, between):
        dispatch.adapt(routing.weights)
        dispatch(layer, x, routing)
        seen.append(dispatch.sparse)
    assert seen == [False, True, True, False, False]
    dispatch.adapt(narrow.weights)
    resumed = Dispatch("auto")
    resumed.load_state_dict(dispatch.state_dict())
    assert resumed.sparse
    fixed = Dispatch("dense")
    fixed.adapt(narrow.weights)
    assert not fixed.sparse


def test_large_batches_without_gradient_come_in_chunks() -> None:
    net = network(GATES["topk"], "auto").eval()
    inputs = {"user": torch.randint(20, (1300,)), "item": torch.randint(30, (1300,))}
    whole = net(inputs).predictions
    with torch.no_grad():
        chunked = net(inputs).predictions
    for name, value in whole.items():
        assert torch.allclose(value, chunked[name], atol=1e-6)


def test_autocast_runs_both_ways() -> None:
    x, weights = torch.randn(10, 6), random_weights(10, 2, EXPERTS, 2)
    layer = StackedDense(EXPERTS, 6, [7, WIDTH], 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        dense, sparse = (gradients(layer, execution, x, weights) for execution in ("dense", "sparse"))
    for name, value in dense.items():
        assert torch.allclose(value.float(), sparse[name].float(), atol=0.05, rtol=0.05), name


def test_unknown_execution() -> None:
    with pytest.raises(InputError, match=r"network.execution=fast: accepted are auto, dense, sparse"):
        Dispatch("fast")


def test_masks_are_fair_and_independent() -> None:
    """Rate of kept elements, agreement of masks of neighbouring rows and keys: within 5 standard deviations."""
    rows, width = torch.arange(4000), 64
    for p in (0.5, 0.25, 0.3):
        one, other = (keep_mask(key, rows, width, p) for key in (11, 12))
        count = rows.numel() * width
        assert abs(float(one.mean()) - (1 - p)) < 5 * (p * (1 - p) / count) ** 0.5 + 2**-16
        for a, b in ((one, other), (one[1:], one[:-1]), (one[:, 8:], one[:, :-8]), (one[:, 1:], one[:, :-1])):
            expected = (1 - p) ** 2
            assert abs(float((a * b).mean()) - expected) < 5 * (expected / a.numel()) ** 0.5


def test_rows_choose_the_mask() -> None:
    x = torch.ones(6, 4)
    everything = relu_dropout(x, 0.5, True, key=9)
    some = relu_dropout(x[:2], 0.5, True, key=9, rows=torch.tensor([4, 1]))
    assert torch.equal(some, everything[[4, 1]])


def test_static_weights_that_are_all_zero() -> None:
    layer, x = StackedDense(3, 4, [5]), torch.randn(6, 4)
    for execution in ("dense", "sparse"):
        mixed = Dispatch(execution)(layer, x, Routing(torch.zeros(2, 3)))
        assert mixed.shape == (6, 2, 5)
        assert not mixed.any()
        mixed.sum().backward()
        assert all(not p.grad.any() for p in layer.parameters())
