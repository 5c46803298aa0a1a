"""Sparse execution equals dense execution: outputs, every gradient, dropout, and a whole course of training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mtl.experts.assignments import Assignments
from mtl.experts.base import Experts
from mtl.experts.conv import StackedConv
from mtl.experts.dense import StackedDense
from mtl.experts.dispatch import Dispatch, used_share
from mtl.experts.ffn import StackedFFN
from mtl.experts.relu_sum import ReluSum
from mtl.types import Routing
from tests.experts import GatedExperts

EXPERTS, WIDTH = 8, 5
Kind = Callable[..., Experts]

KINDS = {
    "no layer": partial(StackedDense, units=[]),
    "one layer": partial(StackedDense, units=[WIDTH]),
    "two layers": partial(StackedDense, units=[7, WIDTH]),
    "three layers": partial(StackedDense, units=[7, 6, WIDTH]),
    "gated": partial(GatedExperts, units=WIDTH),
    "sums of units": lambda experts, width, dropout=0.0: ReluSum(experts, width, 4),
    "ffn": partial(StackedFFN, width=7),
    "ffn with a norm": partial(StackedFFN, width=7, own_norm=True),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))


def random_weights(rows: int, tasks: int, experts: int, k: int) -> Tensor:
    """Return weights ``[rows, tasks, experts]``, ``k`` of each row and task not 0."""
    weights = torch.rand(rows, tasks, experts)
    keep = torch.zeros_like(weights).scatter_(-1, weights.topk(k, -1).indices, 1.0)
    return weights * keep


def gradients(layer: Experts, execution: str, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(3)
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    layer.zero_grad()
    mixed = Dispatch(execution)(layer, x, Routing(weights, exact_zeros=True))
    (mixed.cos() * torch.arange(1.0, 1.0 + mixed[0].numel(), dtype=x.dtype).view_as(mixed[0])).sum().backward()
    used = torch.where(weights != 0, weights.grad, 0.0)  # what a gate with exact zeros lets through
    named = {name: p.grad.clone() for name, p in layer.named_parameters()}
    return {"mixed": mixed.detach(), "x": x.grad, "weights": used, **named}


@every_kind
@pytest.mark.parametrize(
    ("rows", "dropout", "dtype"), [(1, 0.5, torch.float64), (300, 0.3, torch.float64), (300, 0.0, torch.float32)]
)
def test_sparse_equals_dense(rows: int, dropout: float, kind: Kind, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    layer = kind(EXPERTS, 6, dropout=dropout).to(dtype)
    x, weights = torch.randn(rows, 6, dtype=dtype), random_weights(rows, 3, EXPERTS, 2).to(dtype)
    weights[:, :, 3] = 0.0  # an expert that nobody wants
    dense, sparse = (gradients(layer, execution, x, weights) for execution in ("dense", "sparse"))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    for name, value in dense.items():
        scale = max(1.0, float(value.abs().max()))
        assert torch.allclose(value / scale, sparse[name] / scale, rtol=0, atol=tolerance), name


@every_kind
@pytest.mark.parametrize("k", [3, 0])
def test_static_weights(k: int, kind: Kind) -> None:
    layer = kind(EXPERTS, 6, dropout=0.5).double()
    x, weights = torch.randn(9, 6, dtype=torch.float64), random_weights(1, 2, EXPERTS, k)[0].double()
    dense, sparse = (gradients(layer, execution, x, weights) for execution in ("dense", "sparse"))
    for name, value in dense.items():
        assert torch.allclose(value, sparse[name], rtol=0, atol=1e-10), name
    assert dense["mixed"].shape == sparse["mixed"].shape == (9, 2, layer.output_dim)


@every_kind
def test_outputs_mixture_and_pairs_agree(kind: Kind) -> None:
    layer = kind(EXPERTS, 6, dropout=0.5)
    x, weights = torch.randn(10, 6), random_weights(10, 2, EXPERTS, 2)
    masks, pairs = layer.masks(), Assignments(weights)
    everything = layer.outputs(x, None, masks)  # [B, E, H]
    assert torch.allclose(layer.outputs(x, [4, 1], masks), everything[:, [4, 1]], atol=1e-6)
    expected = torch.einsum("bte,beh->bth", weights, everything)
    assert torch.allclose(layer.mixture(x, weights, None, masks), expected, atol=1e-6)
    assert torch.allclose(
        layer.mixture(x, weights[:, :, [4, 1]], [4, 1], masks),
        weights[:, :, [4, 1]] @ everything[:, [4, 1]],
        atol=1e-6,
    )
    assert torch.allclose(layer.sparse_mixture(x, weights, pairs, masks), expected, atol=1e-6)
    assert sum(pairs.counts) == len(pairs.sample) == int((weights != 0).any(1).sum())


def test_weights_that_cancel_still_need_their_expert() -> None:
    weights = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]], [[0.0, 0.0], [0.0, 0.5]]])  # [B, T, E]
    pairs = Assignments(weights)
    assert pairs.counts == [1, 1]
    assert pairs.sample.tolist() == [0, 1]


def test_zeros_need_no_promise_where_no_gradient_is_taken() -> None:
    layer, x, weights = StackedDense(EXPERTS, 6, [WIDTH]), torch.randn(9, 6), random_weights(9, 2, EXPERTS, 2)
    computed: list[int] = []
    layer.sparse_mixture = lambda x, weights, pairs, masks: computed.append(len(pairs.sample))
    Dispatch("sparse")(layer, x, Routing(weights))
    with torch.no_grad():
        Dispatch("sparse")(layer, x, Routing(weights))
    assert computed == [int((weights != 0).any(1).sum())]


def test_auto_follows_the_share_of_all_processes_and_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch, layer, x = Dispatch("auto"), StackedDense(EXPERTS, 6, [WIDTH]), torch.randn(20, 6)
    wide = Routing(torch.rand(20, 2, EXPERTS) + 0.1, exact_zeros=True)
    narrow = Routing(random_weights(20, 1, EXPERTS, 1), exact_zeros=True)
    between = Routing(torch.cat([torch.ones(20, 1, 5), torch.zeros(20, 1, 3)], -1), exact_zeros=True)  # 0.625
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
    monkeypatch.setattr("mtl.experts.dispatch.world_size", lambda: 2)
    monkeypatch.setattr("mtl.experts.dispatch.all_reduce_sum", lambda share: share + 0.8)  # of the other process
    resumed.adapt(wide.weights)
    assert not resumed.sparse
    resumed.adapt(between.weights)  # 0.625 here, 0.71 in all
    assert not resumed.sparse
    monkeypatch.setattr("mtl.experts.dispatch.all_reduce_sum", lambda share: share + 0.5)
    resumed.adapt(between.weights)
    assert resumed.sparse
    fixed = Dispatch("dense")
    fixed.adapt(narrow.weights)
    assert not fixed.sparse


def test_autocast_runs_both_ways() -> None:
    x, weights = torch.randn(10, 6), random_weights(10, 2, EXPERTS, 2)
    layer = StackedDense(EXPERTS, 6, [7, WIDTH], 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        dense, sparse = (gradients(layer, execution, x, weights) for execution in ("dense", "sparse"))
    for name, value in dense.items():
        assert torch.allclose(value.float(), sparse[name].float(), atol=0.05, rtol=0.05), name


class Conversions(TorchDispatchMode):
    """Record the pairs of precisions that tensors are converted between."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.seen.append((args[0].dtype, result.dtype))
        return result


@pytest.mark.parametrize("execution", ["dense", "sparse"])
@pytest.mark.parametrize("name", ["two layers", "three layers", "sums of units", "ffn", "conv"])
def test_autocast_stays_in_its_precision_between_layers(name: str, execution: str) -> None:
    conv = [{"channels": 3, "kernel": 2}, {"channels": 2, "kernel": 2}]
    images = {"conv": lambda: StackedConv(EXPERTS, (1, 6, 6), conv, [4, 3])}
    layer = images[name]() if name in images else KINDS[name](EXPERTS, 6)
    x = torch.randn(10, 1, 6, 6) if name in images else torch.randn(10, 6)
    routing = Routing(random_weights(10, 2, EXPERTS, 2), exact_zeros=True)
    with torch.autocast("cpu", torch.bfloat16), Conversions() as conversions:
        mixed = Dispatch(execution)(layer, x, routing)
    assert mixed.dtype == torch.bfloat16
    assert (torch.float32, torch.bfloat16) in conversions.seen
    assert (torch.bfloat16, torch.float32) not in conversions.seen
