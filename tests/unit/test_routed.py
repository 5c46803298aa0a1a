"""Routed layers and networks: what is averaged, what is skipped, what learns faster."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from mtl.checks import InputError
from mtl.gates import CometGate, FixedGate, GumbelMatrixGate
from mtl.networks.bottom import build_bottom
from mtl.networks.components import Component, Convolutions, DenseLayers, Identity, NormRelu, Pooling
from mtl.networks.heads import Heads, heads_per_task
from mtl.networks.routed import RoutedLayer, RoutedNetwork
from mtl.training.module import MultiTaskModule
from mtl.types import Batch, DataSpec, Image, Numeric, TaskSpec

TASKS = [TaskSpec("a", "regression"), TaskSpec("b", "multiclass", 3), TaskSpec("c", "regression")]
VECTORS = DataSpec({"x": Numeric(5)}, TASKS)
IMAGES = DataSpec({"image": Image(1, 12, 12, 0.1, 0.3)}, TASKS)


def fixed(rows: list[list[float]]) -> partial[FixedGate]:
    return partial(FixedGate, num_tasks=len(rows), weights=rows)


def dense_network(gate: object, spec: DataSpec = VECTORS, **options: object) -> RoutedNetwork:
    layers = [{"components": [partial(DenseLayers, units=[4])], "copies": 3}] * 2
    return RoutedNetwork(spec, build_bottom, layers, gate, partial(Heads), **options)


class Counting(Component):
    def __init__(self, input_dim: int) -> None:
        super().__init__()
        self.output_dim, self.rows = input_dim, 0

    def forward(self, x: Tensor) -> Tensor:
        self.rows += len(x)
        return x


def test_components_that_nobody_uses_are_not_evaluated() -> None:
    layer = RoutedLayer(5, [Counting] * 3, fixed([[1.0, 0.0, 0.0], [0.5, 0.0, 0.5]]))
    layer(torch.randn(2, 7, 5), None)
    assert [component.rows for component in layer.components] == [14, 0, 7]
    drawn = RoutedLayer(5, [Counting] * 3, partial(GumbelMatrixGate, num_tasks=2, initial_probability=0.01))
    drawn(torch.randn(2, 7, 5), None)
    assert [component.rows for component in drawn.components] == [14, 14, 14]  # what is off gets a gradient too
    y, _ = drawn.eval()(torch.randn(2, 7, 5), None)
    assert not y.any()  # no connection at all: zeros
    assert y.shape == (2, 7, 5)


@pytest.mark.parametrize("spec", [VECTORS, IMAGES], ids=["vectors", "images"])
@pytest.mark.parametrize("gate", [GumbelMatrixGate, partial(CometGate, k=2, entropy_weight=0.1)])
def test_networks_predict_all_tasks_or_one(spec: DataSpec, gate: object) -> None:
    network, inputs = dense_network(gate), {"x": torch.randn(6, 5)}
    if spec is IMAGES:
        convolutions = partial(Convolutions, channels=4, kernels=[3])
        pooling = partial(Pooling, kind="average", kernel=2, stride=2)
        layers = [{"components": [convolutions] * 3, "after": [pooling]}, {"components": [convolutions], "copies": 2}]
        network = RoutedNetwork(spec, build_bottom, layers, gate, partial(Heads), dropout=0.5)
        inputs = {"image": torch.randint(256, (6, 1, 12, 12), dtype=torch.uint8)}
    output = network(inputs)
    assert [tuple(value.shape) for value in output.predictions.values()] == [(6,), (6, 3), (6,)]
    losses = [value.square().mean() for value in output.predictions.values()] + list(output.losses.values())
    torch.stack(losses).sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    everything = network.eval()(inputs).predictions
    for task in "abc":
        alone = network(inputs, [task]).predictions
        assert list(alone) == [task]
        assert torch.allclose(alone[task], everything[task], atol=1e-6)


def test_only_weights_decay() -> None:
    network = dense_network(GumbelMatrixGate)
    adam = partial(torch.optim.Adam, lr=0.1, weight_decay=3e-4)
    groups = MultiTaskModule(network, TASKS, adam).configure_optimizers().param_groups
    names = {parameter: name for name, parameter in network.named_parameters()}
    assert sum(len(group["params"]) for group in groups) == len(names)
    for group in groups:
        for parameter in group["params"]:
            assert group["weight_decay"] == (3e-4 if names[parameter].endswith("weight") else 0)
            assert group["lr"] == pytest.approx(0.3 if "gate" in names[parameter] else 0.1)


def test_super_batches_add_the_losses_of_their_tasks() -> None:
    network = dense_network(FixedGate)
    module = MultiTaskModule(network, TASKS, partial(torch.optim.SGD, lr=0.1))
    module.log = lambda *args, **kwargs: None
    first = Batch({"x": torch.randn(6, 5)}, {"a": torch.randn(6)})
    second = Batch({"x": torch.randn(4, 5)}, {"b": torch.tensor([0, 1, 2, -100])})
    alone = [module.training_step(batch, 0)["loss"] for batch in (first, second)]
    both = module.training_step([first, second], 0)
    assert torch.allclose(both["loss"], sum(alone))
    assert [[routing.tasks for routing in layer] for layer in both["routings"].values()] == [[[0], [1]]] * 2


@pytest.mark.parametrize(
    ("component", "expected"),
    [
        (partial(Convolutions, channels=6, kernels=[3, 3], same=True, groups=2), (6, 9, 11)),
        (partial(Convolutions, channels=6, kernels=[[1, 7], [7, 1]], same=True, stride=2), (6, 5, 6)),
        (partial(Convolutions, channels=6, kernels=[5]), (6, 5, 7)),
        (partial(Pooling, kind="max", kernel=3, same=True), (4, 9, 11)),
        (partial(Pooling, kind="average", kernel=3, same=True, stride=2), (4, 5, 6)),
        (partial(Pooling, kind="average", kernel=2, stride=2), (4, 4, 5)),
        (Identity, (4, 9, 11)),
        (partial(Identity, stride=2), (4, 5, 6)),
        (partial(NormRelu, groups=2), (4, 9, 11)),
    ],
)
def test_components_say_their_shape(component: object, expected: tuple[int, int, int]) -> None:
    built = component(input_dim=(4, 9, 11))
    assert built.output_dim == expected
    assert tuple(built(torch.randn(2, 4, 9, 11)).shape) == (2, *expected)


def test_bad_layers() -> None:
    with pytest.raises(InputError, match="different shapes"):
        RoutedLayer(5, [partial(DenseLayers, units=[4]), partial(DenseLayers, units=[3])], fixed([[0.5, 0.5]]))
    with pytest.raises(InputError, match=r"layers\[0\].component: no such option"):
        RoutedNetwork(VECTORS, build_bottom, [{"components": [], "component": []}], FixedGate, Heads)
    with pytest.raises(InputError, match="is too small for kernels"):
        Convolutions((1, 4, 4), channels=2, kernels=[5])
    with pytest.raises(InputError, match="kind=min"):
        Pooling((1, 4, 4), kind="min", kernel=2)
    assert isinstance(Identity(5).body, nn.Identity)


COPIES = {
    "convolution": (partial(Convolutions, channels=4, kernels=[3], stride=2), (2, 8, 8)),
    "normalized": (partial(Convolutions, channels=4, kernels=[3], same=True, groups=2), (2, 8, 8)),
    "pair": (partial(Convolutions, channels=4, kernels=[[1, 3], [3, 1]], same=True, groups=2), (2, 8, 8)),
    "dense": (partial(DenseLayers, units=[4, 3]), 5),
    "linear end": (partial(DenseLayers, units=[4], outputs=1), 5),
    "pooling": (partial(Pooling, kind="max", kernel=2), (2, 8, 8)),
}


@pytest.mark.parametrize("case", COPIES)
def test_side_by_side_copies_equal_separate_ones(case: str) -> None:
    component, shape = COPIES[case]
    layer = RoutedLayer(shape, [component], fixed([[0.5, 0.5, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]), copies=4).double()
    x = torch.randn(6, *(shape if isinstance(shape, tuple) else (shape,))).double()
    together, _ = layer(x, None)
    first, second = (layer.components[index](x) for index in (0, 1))
    naive = torch.stack([(first + second) / 2, second])
    assert torch.allclose(together, naive, atol=1e-12)
    assert torch.allclose(layer(torch.stack([x, x]), None)[0], naive, atol=1e-12)  # inputs of their own
    assert torch.allclose(layer(x[None], [1])[0], naive[1:], atol=1e-12)
    pull = torch.randn_like(naive)
    parameters = list(layer.parameters())
    ours = torch.autograd.grad((together * pull).sum(), parameters, allow_unused=True) if parameters else []
    theirs = torch.autograd.grad((naive * pull).sum(), parameters, allow_unused=True) if parameters else []
    for mine, plain in zip(ours, theirs, strict=True):
        assert (mine is None) == (plain is None)  # no gradient, and not zeros, for a component that nobody uses
        assert mine is None or torch.allclose(mine, plain, atol=1e-12)


def test_separate_heads_predict_in_the_order_that_is_wanted() -> None:
    heads = heads_per_task(TASKS, 4)
    x = torch.randn(6, 3, 4)
    everything = heads(x, [0, 1, 2])
    assert list(everything) == [task.name for task in TASKS]
    for index, task in enumerate(TASKS):
        assert torch.equal(heads(x[:, [index]], [index])[task.name], everything[task.name])
        assert torch.equal(heads.only(index)(x[:, [index]], [0])[task.name], everything[task.name])
