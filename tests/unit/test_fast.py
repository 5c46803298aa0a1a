"""Each fast version gives the values and gradients of its plain function, and runs where ``applies`` says so only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtl import fast
from mtl.dropout import Masks
from mtl.experts.conv import StackedConv
from mtl.experts.dense import StackedDense
from mtl.experts.ffn import StackedFFN
from mtl.experts.pairs import Pairs
from mtl.gates import CometGate, DSelectKGate
from mtl.gates.comet import comet_weights
from mtl.gates.dselect_k import dselect_weights
from mtl.gates.permuted import sinkhorn
from mtl.linear import affine, grouped_linear
from mtl.networks.mixture import MixtureOfExperts
from tests.routing import random_weights

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
ROWS = (0, 1, 7, 600)  # 600: enough for the products that oneDNN is given


@dataclass
class Call:
    """A name for messages, the arguments of a call, and which tensors are differentiated."""

    name: str
    args: tuple[Any, ...]
    leaves: list[Tensor]


Build = Callable[[], Call]


def random(*size: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*size, dtype=dtype)).requires_grad_()


def of_affine(rows: int, dtype: torch.dtype) -> Iterator[Build]:
    def build(grad: bool, sizes: tuple[int, ...], width: int) -> Call:
        x, weight, bias = (random(*size, dtype=dtype) for size in ((rows, width), (*sizes, width), sizes))
        x = x.requires_grad_() if grad else x.detach()
        return Call(f"{sizes} grad={grad}", (x, weight, bias), [x, weight, bias] if grad else [weight, bias])

    for grad in (False, True):
        yield partial(build, grad, (3, 16, 2), 64)
        yield partial(build, grad, (2, 3), 5)
        yield partial(build, grad, (2, 0, 3), 5)  # COMET's splits of a single expert


def of_comet_weights(rows: int, dtype: torch.dtype) -> Iterator[Build]:
    def build(experts: int, scale: float, static: bool, gamma: float) -> Call:
        first = () if static else (rows,)
        split = random(*first, 3, experts - 1, 2, dtype=dtype, scale=scale)
        leaf = random(*first, 3, experts, 2, dtype=dtype)
        return Call(f"E={experts} scale={scale} static={static}", (split, leaf, gamma), [split, leaf])

    for experts in (1, 2, 3, 5, 6, 8, 16):
        for scale in (0.1, 1.0, 1e4):  # undecided, partly decided, all decided
            yield partial(build, experts, scale, False, 1.0)
            if rows == 1:
                yield partial(build, experts, scale, True, 0.7)


def of_dselect_weights(rows: int, dtype: torch.dtype) -> Iterator[Build]:
    def build(experts: int, scale: float, static: bool, gamma: float) -> Call:
        first, bits = () if static else (rows,), (experts - 1).bit_length()
        logits = random(*first, 3, 2, bits, dtype=dtype, scale=scale)
        mix = random(*first, 3, 2, dtype=dtype)
        return Call(f"E={experts} scale={scale} static={static}", (logits, mix, gamma, experts), [logits, mix])

    for experts in (1, 2, 3, 5, 6, 8, 16):
        for scale in (0.1, 1.0, 1e4):
            yield partial(build, experts, scale, False, 1.0)
            if rows == 1:
                yield partial(build, experts, scale, True, 0.7)


def of_sinkhorn(rows: int, dtype: torch.dtype) -> Iterator[Build]:
    def build(count: int, experts: int, tau: float, rounds: int) -> Call:
        logits = random(count, experts, experts, dtype=dtype, scale=0.05)
        return Call(f"P={count} E={experts} tau={tau}", (logits, tau, rounds), [logits])

    for count, experts in ((1, 1), (1, 6), (3, 8)):
        yield partial(build, count, experts, 0.5, 7)
        yield partial(build, count, experts, 0.1, 1)
        yield partial(build, count, experts, 0.02, 150)


def of_grouped_linear(rows: int, dtype: torch.dtype) -> Iterator[Build]:
    def build(counts: list[int]) -> Call:
        x = random(sum(counts), 16, dtype=dtype)
        weight, bias = random(len(counts), 8, 16, dtype=dtype), random(len(counts), 8, dtype=dtype)
        return Call(str(counts), (x, weight, bias, counts), [x, weight, bias])

    yield partial(build, [rows])
    yield partial(build, [rows // 2, 0, rows])
    yield partial(build, [0, 0])


def dense_layers(experts: int, width: int, units: list[int], dtype: torch.dtype) -> StackedDense:
    layer = StackedDense(experts, width, units).to(dtype)
    with torch.no_grad():
        for linear in layer.layers:
            linear.bias.normal_()
    return layer


def masks_of(dropout: float, experts: int, rows: int) -> list[Masks | None]:
    """Return no masks, those of a whole batch, and those of some rows of a batch."""
    if not dropout:
        return [None]
    return [Masks(dropout, experts), Masks(dropout, experts, torch.arange(rows).flip(0) + 3)]


UNITS = {0.0: [24], 0.5: [40, 24], 0.3: [24, 17, 24]}  # by dropout


def of_dense_outputs(rows: int, dtype: torch.dtype) -> Iterator[Build]:
    def build(units: list[int], dropout: float, number: int, subset: list[int] | None, own: bool) -> Call:
        layer, count = dense_layers(6, 20, units, dtype), 6 if subset is None else len(subset)
        x = random(rows, *([count] if own else []), 20, dtype=dtype)  # or an input for each expert, as heads have
        name = f"units={units} dropout={dropout} subset={subset} own={own}"
        return Call(name, (layer, x, subset, masks_of(dropout, 6, rows)[number]), [x, *layer.parameters()])

    for dropout, units in UNITS.items():
        for number in range(2 if dropout else 1):
            for subset in (None, [4, 1], []):
                yield partial(build, units, dropout, number, subset, False)
                yield partial(build, units, dropout, number, subset, True)
    yield partial(build, [], 0.0, 0, [2, 3], False)


def of_dense_mixture(rows: int, dtype: torch.dtype) -> Iterator[Build]:
    def build(units: list[int], dropout: float, number: int, subset: list[int] | None, static: bool) -> Call:
        layer, count = dense_layers(6, 20, units, dtype), 6 if subset is None else len(subset)
        x, weights = random(rows, 20, dtype=dtype), random(*([] if static else [rows]), 3, count, dtype=dtype)
        name = f"units={units} dropout={dropout} subset={subset} static={static}"
        arguments = (layer, x, weights, subset, masks_of(dropout, 6, rows)[number])
        return Call(name, arguments, [x, weights, *layer.parameters()])

    for dropout, units in UNITS.items():
        for number in range(2 if dropout else 1):
            for subset in (None, [4, 1]):
                for static in (False, True):
                    yield partial(build, units, dropout, number, subset, static)
    yield partial(build, [], 0.0, 0, None, False)
    yield partial(build, [24], 0.0, 0, [], True)


def sparse_weights(rows: int, experts: int, dtype: torch.dtype, k: int = 2) -> Tensor:
    weights = random_weights(rows, 3, experts, k).to(dtype)
    weights[:, :, 1] = 0.0  # an expert that nobody wants
    return weights.requires_grad_()


def of_dense_pairs(rows: int, dtype: torch.dtype) -> Iterator[Build]:
    def build(experts: int, units: list[int], dropout: float, number: int, k: int) -> Call:
        layer, x = dense_layers(experts, 20, units, dtype), random(rows, 20, dtype=dtype)
        weights = sparse_weights(rows, experts, dtype, k)
        arguments = (layer, x, weights, Pairs(weights.detach()), masks_of(dropout, experts, rows)[number])
        leaves = [x, weights, *layer.parameters()]
        return Call(f"E={experts} units={units} dropout={dropout} k={k}", arguments, leaves)

    for dropout, units in UNITS.items():
        for number in range(2 if dropout else 1):
            for experts in (6, 40):
                yield partial(build, experts, units, dropout, number, 2)
    yield partial(build, 6, [], 0.0, 0, 2)
    yield partial(build, 6, [24], 0.5, 0, 0)  # no weight at all


def of_ffn_pairs(rows: int, dtype: torch.dtype) -> Iterator[Build]:
    def build(own_norm: bool, dropout: float, number: int, k: int, tasks: int) -> Call:
        layer, x = StackedFFN(5, 32, 64, dropout, own_norm).to(dtype), random(rows, 32, dtype=dtype)
        with torch.no_grad():
            layer.up.bias.normal_()
            layer.down.bias.normal_()
        weights = sparse_weights(rows, 5, dtype, k)[:, :tasks].detach().requires_grad_()
        arguments = (layer, x, weights, Pairs(weights.detach()), masks_of(dropout, 5, rows)[number])
        name = f"own_norm={own_norm} dropout={dropout} k={k} tasks={tasks}"
        return Call(name, arguments, [x, weights, *layer.parameters()])

    for own_norm in (False, True):
        yield partial(build, own_norm, 0.0, 0, 1, 1)
        yield partial(build, own_norm, 0.0, 0, 2, 2)
        yield partial(build, own_norm, 0.3, 1, 2, 2)
    yield partial(build, False, 0.0, 0, 0, 1)  # no weight at all


def conv_layers(pool: int, padding: int, channels: int, dtype: torch.dtype) -> StackedConv:
    convolutions = [{"channels": 3, "kernel": 3, "pool": pool, "padding": padding}, {"channels": 2, "kernel": 2}]
    layer = StackedConv(4, (channels, 9, 10), convolutions, [6]).to(dtype)
    with torch.no_grad():
        for bias in layer.biases:
            bias.normal_()
    return layer


def of_conv(kind: str, rows: int, dtype: torch.dtype) -> Iterator[Build]:
    rows = min(rows, 70)

    def build(pool: int, padding: int, channels: int, grad: bool, dropout: float, subset: list[int] | None) -> Call:
        layer, x = conv_layers(pool, padding, channels, dtype), random(rows, channels, 9, 10, dtype=dtype)
        x = x if grad else x.detach()
        masks, leaves = masks_of(dropout, 4, rows)[-1], [x, *layer.parameters()] if grad else list(layer.parameters())
        name = f"pool={pool} padding={padding} channels={channels} grad={grad} dropout={dropout} subset={subset}"
        if kind == "outputs":
            return Call(name, (layer, x, subset, masks), leaves)
        if kind == "mixture":
            weights = random(rows, 2, 4 if subset is None else len(subset), dtype=dtype)
            return Call(name, (layer, x, weights, subset, masks), [weights, *leaves])
        weights = sparse_weights(rows, 4, dtype)
        return Call(name, (layer, x, weights, Pairs(weights.detach()), masks), [weights, *leaves])

    for pool, padding, channels in ((2, 0, 1), (1, 1, 3), (3, 0, 2)):
        for grad in (False, True):
            yield partial(build, pool, padding, channels, grad, 0.0, None)
    yield partial(build, 2, 0, 1, False, 0.5, None)
    if kind != "pairs":
        yield partial(build, 2, 0, 1, False, 0.3, [2, 0])
    if kind == "outputs":
        yield partial(build, 2, 0, 1, False, 0.0, [])


CASES: dict[str, Callable[[int, torch.dtype], Iterator[Build]]] = {
    "affine": of_affine,
    "comet_weights": of_comet_weights,
    "dselect_weights": of_dselect_weights,
    "sinkhorn": of_sinkhorn,
    "grouped_linear": of_grouped_linear,
    "grouped_linear on a GPU": of_grouped_linear,
    "StackedDense.outputs": of_dense_outputs,
    "StackedDense.mixture": of_dense_mixture,
    "StackedDense.pairs_mixture": of_dense_pairs,
    "StackedFFN.pairs_mixture": of_ffn_pairs,
    "StackedConv.outputs": partial(of_conv, "outputs"),
    "StackedConv.mixture": partial(of_conv, "mixture"),
    "StackedConv.pairs_mixture": partial(of_conv, "pairs"),
}


def test_every_pair_has_a_case() -> None:
    assert CASES.keys() == fast.REGISTER.keys()


def values_of(function: Callable[..., Any], build: Build, plain: bool) -> dict[str, Tensor]:
    """Return the results of a call, and the gradients that each result, and all together, give its arguments."""
    torch.manual_seed(5)
    call = build()
    torch.manual_seed(6)  # the keys of dropout masks are drawn when they are first needed
    if plain:
        with fast.disabled():
            results = function(*call.args)
    else:
        results = function(*call.args)
    results = results if isinstance(results, tuple) else (results,)
    values = {f"result {index}": result.detach() for index, result in enumerate(results)}
    generator = torch.Generator().manual_seed(7)
    pulls = [torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result.dtype) for result in results]
    indices = range(len(results))
    for chosen in (c for size in range(1, len(indices) + 1) for c in combinations(indices, size)):
        total = torch.stack([(results[index] * pulls[index]).sum() for index in chosen]).sum()
        grads: Any = [None] * len(call.leaves)
        if total.requires_grad:  # else a constant: the tree of a single expert
            grads = torch.autograd.grad(total, call.leaves, retain_graph=True, allow_unused=True)
        for number, (grad, leaf) in enumerate(zip(grads, call.leaves, strict=True)):
            values[f"gradient {number} of results {chosen}"] = torch.zeros_like(leaf) if grad is None else grad
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", CASES)
def test_fast_equals_plain(name: str, rows: int, dtype: torch.dtype) -> None:
    check_pair(name, rows, dtype)


def check_pair(name: str, rows: int, dtype: torch.dtype) -> None:
    """Compare the two functions of ``name`` on all its cases."""
    plain, quick = fast.REGISTER[name]
    for build in CASES[name](rows, dtype):
        expected, got = values_of(plain, build, plain=True), values_of(quick, build, plain=False)
        assert expected.keys() == got.keys()
        for key, value in expected.items():
            where = f"{build().name}, {key}"
            assert got[key].shape == value.shape, where
            assert got[key].dtype == value.dtype, where
            scale = max(1.0, float(value.abs().max())) if value.numel() else 1.0
            assert torch.allclose(got[key] / scale, value / scale, rtol=0, atol=TOLERANCE[dtype]), where


@pytest.mark.parametrize("rows", ROWS)
def test_grouped_linear_in_half_precision(rows: int) -> None:
    """What a GPU computes with one kernel, on the CPU."""
    plain, quick = fast.REGISTER["grouped_linear on a GPU"]
    for build in of_grouped_linear(rows, torch.bfloat16):
        expected, got = values_of(plain, build, plain=True), values_of(quick, build, plain=False)
        assert expected.keys() == got.keys()
        for key, value in expected.items():
            assert got[key].dtype == torch.bfloat16
            scale = max(1.0, float(value.float().abs().max())) if value.numel() else 1.0
            assert torch.allclose(got[key].float() / scale, value.float() / scale, rtol=0, atol=0.02), key


@pytest.mark.parametrize("variant", [0, 1], ids=["plain", "fast"])
def test_decided_splits_pass_no_gradient(variant: int) -> None:
    generator = torch.Generator().manual_seed(8)
    split, leaf = (torch.randn(5, 3, n, 2, generator=generator, dtype=torch.float64) for n in (7, 8))
    split, leaf = (1e4 * split).requires_grad_(), leaf.requires_grad_()
    weights, v = fast.REGISTER["comet_weights"][variant](split, leaf, 1.0)
    assert ((v == 0) | (v == 1)).all()
    assert (weights > 0).sum(-1).max() <= 2
    (weights.square().sum() + v.square().sum()).backward()
    assert not split.grad.any()
    assert not leaf.grad[v == 0].any()


@pytest.mark.parametrize("variant", [0, 1], ids=["plain", "fast"])
@pytest.mark.parametrize("gamma", [0.015, 0.03, 0.1, 0.7, 1.0, 3.3, 10.0])
@pytest.mark.parametrize("side", [-1, 1])
def test_ends_of_the_smooth_step_are_flat(gamma: float, side: int, variant: int) -> None:
    """At t = -gamma/2 and gamma/2 themselves the smooth step is exactly 0 and 1, and so are the weights."""
    t = (side * torch.tensor(gamma / 2)).expand(8, 1, 1, 1).clone().requires_grad_()
    weights, v = fast.REGISTER["comet_weights"][variant](t, torch.zeros(8, 1, 2, 1), gamma)
    assert torch.equal(v[..., 0], weights)
    assert set(weights.flatten().tolist()) == {0.0, 1.0}
    codes, s = fast.REGISTER["dselect_weights"][variant](t, torch.ones(8, 1, 1), gamma, 2)
    assert set(codes.flatten().tolist()) == set(s.flatten().tolist()) == {0.0, 1.0}
    (weights[..., 0].sum() + codes[..., 0].sum()).backward()
    assert not t.grad.any()


# Where the fast versions run


def test_applies_to_float32_and_float64_on_its_device() -> None:
    for dtype in (torch.float32, torch.float64):
        assert fast.applies(torch.ones(1, dtype=dtype))
    for dtype in (torch.float16, torch.bfloat16, torch.int64):
        assert not fast.applies(torch.ones(1, dtype=dtype))
    assert not fast.applies(torch.ones(1), on="cuda")
    assert not fast.applies(torch.ones(1, device="meta"))
    assert fast.applies(torch.ones(1, device="meta", dtype=torch.bfloat16), on="meta")  # a GPU takes any precision


def test_applies_not_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert not fast.applies(torch.ones(1))
        with torch.autocast("cpu", enabled=False):
            assert fast.applies(torch.ones(1))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")  # torch's own in jvp
def test_applies_not_inside_transforms() -> None:
    seen: list[bool] = []

    def function(x: Tensor) -> Tensor:
        seen.append(fast.applies(x))
        return x.square().sum()

    x = torch.ones(3, 2)
    torch.func.vmap(function)(x)
    torch.func.grad(function)(x)
    torch.func.jacrev(function)(x)
    torch.func.jvp(function, (x,), (x,))
    assert seen == [False] * 4
    function(x)
    assert seen[-1]


def test_applies_not_while_compiling_or_exporting() -> None:
    class Sign(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if fast.applies(x) else -x

    x = torch.ones(2)
    assert torch.equal(Sign()(x), x)
    assert torch.equal(torch.compile(Sign(), backend="eager", fullgraph=True)(x), -x)
    assert torch.equal(torch.export.export(Sign(), (x,)).module()(x), -x)


def mixture() -> tuple[MixtureOfExperts, Tensor]:
    return MixtureOfExperts(6, 2, 4, CometGate, partial(StackedDense, units=[5]), execution="dense"), torch.randn(7, 6)


def test_used_lists_what_ran() -> None:
    fast.enable(True)
    assert fast.used() == []
    layer, x = mixture()
    layer(x)
    assert fast.used() == ["StackedDense.mixture", "affine", "comet_weights"]
    DSelectKGate(2, 4)(None)
    assert fast.used() == ["StackedDense.mixture", "affine", "comet_weights", "dselect_weights"]
    layer.dispatch.execution = "sparse"
    layer(x)
    assert "StackedDense.pairs_mixture" in fast.used()
    fast.enable(True)
    assert fast.used() == []


def test_switched_off_and_on_again() -> None:
    layer, x = mixture()
    fast.enable(False)
    assert not fast.applies(x)
    expected, _ = layer(x)
    assert fast.used() == []
    with fast.disabled():
        assert not fast.applies(x)
    assert not fast.applies(x)  # the context restores what was
    fast.enable(True)
    assert fast.applies(x)
    assert torch.allclose(layer(x)[0], expected, atol=1e-6)
    assert fast.used()


def test_disabled_ends_also_with_an_error() -> None:
    def fail() -> None:
        with fast.disabled():
            assert not fast.applies(torch.ones(1))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert fast.applies(torch.ones(1))


def test_half_precision_runs_the_plain_functions() -> None:
    fast.enable(True)
    x = torch.randn(7, 16, dtype=torch.bfloat16)
    layer = StackedDense(4, 16, [8]).bfloat16()
    layer(x)
    grouped_linear(x, layer.layers[0].weight, layer.layers[0].bias, [3, 4, 0, 0])
    with torch.autocast("cpu", torch.bfloat16):
        layer.float()(x.float())
    assert fast.used() == []


def test_decorated_functions_keep_their_name_and_documentation() -> None:
    for function in (affine, comet_weights, dselect_weights, sinkhorn, grouped_linear, StackedDense.outputs):
        plain, quick = fast.REGISTER[function.__qualname__]
        assert function.__doc__ == plain.__doc__
        assert function not in (plain, quick)


def test_chunks_are_for_large_batches_without_gradient() -> None:
    x = torch.ones(2 * fast.CHUNK_ROWS + 5, 1)
    assert fast.chunk_rows(x) is None
    with torch.no_grad():
        assert fast.chunk_rows(x) == fast.CHUNK_ROWS
        assert fast.chunk_rows(x.bfloat16()) is None
        with fast.disabled():
            assert fast.chunk_rows(x) is None
