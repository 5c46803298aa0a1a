"""Stacked convolutional experts equal separate modules, dense and sparse, for every published architecture."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from mtl.checks import InputError
from mtl.experts.conv import StackedConv
from mtl.experts.dispatch import Dispatch
from mtl.gates import CometGate
from mtl.networks.bottom import ImageBottom, TabularBottom, build_bottom
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.types import Categorical, DataSpec, Image, Routing, TaskSpec

LENET = [{"channels": 10, "kernel": 5, "pool": 2}, {"channels": 20, "kernel": 5, "pool": 2}]
CELEBA = [{"channels": n, "kernel": 3, "pool": 2} for n in (4, 4, 4, 1)]
PUBLISHED = {
    "multi_mnist": ((1, 36, 36), LENET, [50, 50]),
    "dselect_1": ((1, 36, 36), LENET, [50]),
    "dselect_5": ((1, 36, 36), LENET, [50] * 5),
    "digits": ((3, 32, 32), LENET, [50]),
    "celeba": ((3, 64, 64), CELEBA, []),
}
EVERY = pytest.mark.parametrize("name", list(PUBLISHED))


def separate(layer: StackedConv, shape: tuple[int, int, int]) -> nn.ModuleList:
    """Return one ordinary module per expert with the same parameters."""
    modules = nn.ModuleList()
    for expert in range(layer.num_experts):
        parts: list[nn.Module] = []
        for weight, bias, pool in zip(layer.weights, layer.biases, layer.pools, strict=True):
            conv = nn.Conv2d(weight.shape[2], weight.shape[1], weight.shape[-1])
            conv.weight, conv.bias = (nn.Parameter(p[expert].detach().clone()) for p in (weight, bias))
            parts += [conv, nn.ReLU(), nn.MaxPool2d(pool)]
        parts.append(nn.Flatten())
        for dense in layer.dense.layers:
            linear = nn.Linear(dense.weight.shape[2], dense.weight.shape[1])
            linear.weight, linear.bias = (nn.Parameter(p[expert].detach().clone()) for p in (dense.weight, dense.bias))
            parts += [linear, nn.ReLU()]
        modules.append(nn.Sequential(*parts).to(layer.weights[0].dtype))
    return modules


def mixed(weights: Tensor) -> Tensor:
    keep = torch.zeros_like(weights).scatter_(-1, weights.topk(2, -1).indices, 1.0)
    keep[..., 1] = 0.0  # nobody wants expert 1
    return weights * keep


@EVERY
@pytest.mark.parametrize("execution", ["dense", "sparse"])
def test_equals_separate_modules(name: str, execution: str) -> None:
    torch.manual_seed(0)
    shape, convolutions, units = PUBLISHED[name]
    layer = StackedConv(4, shape, convolutions, units)
    x, weights = torch.rand(6, *shape), mixed(torch.rand(6, 2, 4))
    modules = separate(layer, shape)
    for parameter in (*layer.parameters(), *modules.parameters()):
        parameter.grad = None
    expected = torch.einsum("bte,beh->bth", weights, torch.stack([module(x) for module in modules], 1))
    got = Dispatch(execution)(layer, x, Routing(weights, exact_zeros=True))
    assert torch.allclose(got, expected, atol=1e-5)
    probe = torch.randn_like(expected)
    (expected * probe).sum().backward()
    (got * probe).sum().backward()
    theirs = [[p.grad for p in module.parameters()] for module in modules]
    weights_of = [*layer.weights, *[dense.weight for dense in layer.dense.layers]]
    biases_of = [*layer.biases, *[dense.bias for dense in layer.dense.layers]]
    for expert, grads in enumerate(theirs):
        for index, (weight, bias) in enumerate(zip(weights_of, biases_of, strict=True)):
            for mine, other in ((weight.grad[expert], grads[2 * index]), (bias.grad[expert], grads[2 * index + 1])):
                other = torch.zeros_like(mine) if other is None else other
                assert torch.allclose(mine, other, atol=1e-5 * max(1.0, float(other.abs().max())))


def test_sparse_equals_dense_with_dropout_and_static_weights() -> None:
    layer = StackedConv(4, (1, 12, 12), [{"channels": 3, "kernel": 3, "pool": 2}], [6], dropout=0.5)
    x = torch.rand(9, 1, 12, 12)
    for weights in (mixed(torch.rand(9, 2, 4)), mixed(torch.rand(2, 4)), torch.zeros(2, 4), torch.zeros(9, 2, 4)):
        results = []
        for execution in ("dense", "sparse"):
            torch.manual_seed(1)
            results.append(Dispatch(execution)(layer, x, Routing(weights, exact_zeros=True)))
        assert torch.allclose(*results, atol=1e-6)


SPEC = DataSpec(
    {"image": Image(1, 12, 12, 0.1, 0.3)}, [TaskSpec("a", "multiclass", 10), TaskSpec("b", "multiclass", 10)]
)


def test_a_trunk_computes_the_input_of_the_gate() -> None:
    experts = partial(StackedConv, convolutions=[{"channels": 3, "kernel": 3, "pool": 2}], units=[6])
    trunk = partial(StackedConv, convolutions=[{"channels": 2, "kernel": 3, "pool": 4}], units=[7])
    make = partial(MMoE, SPEC, 4, build_bottom, experts, CometGate, partial(Heads, units=[5]))
    inputs = {"image": torch.randint(256, (5, 1, 12, 12), dtype=torch.uint8)}
    for network, width in ((make(), 144), (make(gate_trunk=trunk), 7)):
        predictions = network(inputs).predictions
        assert {name: value.shape for name, value in predictions.items()} == {"a": (5, 10), "b": (5, 10)}
        assert network.mixture.gate.input_dim == width
    with pytest.raises(InputError, match=r"static_gate=true: a static gate has no input"):
        make(gate_trunk=trunk, static_gate=True)


def test_bottom_of_images() -> None:
    bottom = ImageBottom(SPEC.inputs)
    image = torch.randint(256, (3, 1, 12, 12), dtype=torch.uint8)
    expected = (image.float() / 255 - 0.1) / 0.3
    assert torch.allclose(bottom({"image": image}), expected, atol=1e-6)
    assert torch.allclose(bottom({"image": image.float() / 255}), expected, atol=1e-6)
    assert isinstance(build_bottom({"id": Categorical(3)}), TabularBottom)
    with pytest.raises(InputError, match="one image and no other input"):
        build_bottom({"image": Image(1, 2, 2), "id": Categorical(3)})


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([{"channels": 2, "kernel": 13}], r"convolutions\[0\]: images of \(12, 12\) pixels are too small"),
        ([{"channels": 2, "kernel": 3, "strides": 2}], r"convolutions\[0\].strides: no such option"),
    ],
)
def test_bad_layers(layers: list[dict[str, int]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        StackedConv(2, (1, 12, 12), layers)
    with pytest.raises(InputError, match="need images as input"):
        StackedConv(2, 7, [{"channels": 2, "kernel": 3}])
