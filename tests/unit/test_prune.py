"""What is cut out for one task gives what the whole network gives, and costs less."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mtl.analysis.flops import forward_flops
from mtl.checks import InputError
from mtl.experts.conv import StackedConv
from mtl.experts.dense import StackedDense
from mtl.gates import CometGate, FixedGate, GumbelMatrixGate, SoftmaxGate, TopKGate
from mtl.gates.permuted import Permutation
from mtl.networks.baselines import SharedBottom
from mtl.networks.bottom import build_bottom
from mtl.networks.components import Convolutions, DenseLayers, Pooling
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.networks.ple import PLE
from mtl.networks.routed import RoutedNetwork
from mtl.types import Categorical, DataSpec, Image, Numeric, TaskSpec
from mtl.use.program import Readable, export, exportable, save
from mtl.use.prune import prune, savings
from tests.experts import GatedExperts

TASKS = [
    TaskSpec("a", "regression", mean=5.0, std=2.0),
    TaskSpec("b", "multiclass", 3),
    TaskSpec("c", "binary"),
    TaskSpec("d", "binary"),
]
ROWS = DataSpec({"id": Categorical(9), "x": Numeric(3)}, TASKS)
IMAGES = DataSpec({"image": Image(1, 12, 12, 0.1, 0.3)}, TASKS)
INPUTS = {
    "rows": {"id": torch.arange(8), "x": torch.linspace(-1, 1, 24).view(8, 3)},
    "images": {"image": (torch.arange(8 * 144) % 251).to(torch.uint8).view(8, 1, 12, 12)},
}
HEADS = partial(Heads, units=[6], dropout=0.3)


def routed(spec: DataSpec) -> RoutedNetwork:
    gate = partial(GumbelMatrixGate, initial_probability=0.5)
    if spec is ROWS:
        layers = [{"components": [partial(DenseLayers, units=[7])], "copies": 4}] * 2
        network = RoutedNetwork(spec, partial(build_bottom, embedding_dim=5), layers, gate, HEADS, dropout=0.5)
    else:
        conv, pool = (
            partial(Convolutions, channels=4, kernels=[3]),
            partial(Pooling, kind="average", kernel=2, stride=2),
        )
        layers = [{"components": [conv], "copies": 3, "after": [pool]}] * 2
        network = RoutedNetwork(spec, build_bottom, layers, gate, HEADS)
    with torch.no_grad():
        for layer in network.layers:
            layer.gate.logits.normal_()
        network.layers[0].gate.logits[3] = torch.tensor([-1.0, 0.0])  # task d has no connection there
    return network


def mixture(spec: DataSpec, gate: object, **options: Any) -> MMoE:
    experts = options.pop("experts", partial(StackedDense, units=[6, 5], dropout=0.3))
    if spec is IMAGES:
        experts = partial(StackedConv, convolutions=[{"channels": 3, "kernel": 3, "pool": 2}], units=[5])
    return MMoE(spec, 6, partial(build_bottom, embedding_dim=5), experts, gate, HEADS, static_gate=True, **options)


def ple(spec: DataSpec, levels: int, gate: object, **options: Any) -> PLE:
    dense = partial(StackedDense, units=[6, 5], dropout=0.3)
    conv = partial(StackedConv, convolutions=[{"channels": 3, "kernel": 3, "pool": 2}], units=[5])
    bottom, experts = partial(build_bottom, embedding_dim=5), conv if spec is IMAGES else dense
    return PLE(spec, 4, 2, levels, bottom, experts, gate, HEADS, dense, static_gate=True, **options)


NETWORKS = {
    "cgc": lambda: (ple(ROWS, 1, partial(TopKGate, k=2)), "rows"),
    "ple": lambda: (ple(ROWS, 2, partial(TopKGate, k=2), permutation=Permutation), "rows"),
    "three levels": lambda: (ple(ROWS, 3, partial(FixedGate, pattern="random", k=2)), "rows"),
    "ple of images": lambda: (ple(IMAGES, 2, partial(GumbelMatrixGate, initial_probability=0.5)), "images"),
    "routed": lambda: (routed(ROWS), "rows"),
    "routed images": lambda: (routed(IMAGES), "images"),
    "topk": lambda: (mixture(ROWS, partial(TopKGate, k=2)), "rows"),
    "topk+": lambda: (mixture(ROWS, partial(TopKGate, k=2), permutation=Permutation), "rows"),
    "comet": lambda: (mixture(ROWS, partial(CometGate, k=2)), "rows"),
    "gated": lambda: (
        mixture(ROWS, partial(TopKGate, k=2), experts=partial(GatedExperts, units=5, dropout=0.3)),
        "rows",
    ),
    "conv": lambda: (mixture(IMAGES, partial(FixedGate, pattern="random", k=2)), "images"),
    "matrix": lambda: (mixture(IMAGES, partial(GumbelMatrixGate, initial_probability=0.5)), "images"),
}


@pytest.mark.parametrize("name", list(NETWORKS))
def test_pruned_equals_whole_and_costs_less(name: str) -> None:
    torch.manual_seed(3)
    network, kind = NETWORKS[name]()
    inputs = INPUTS[kind]
    before = {key: value.clone() for key, value in network.state_dict().items() if isinstance(value, torch.Tensor)}
    whole = network.eval()(inputs).predictions
    for task in "abcd":
        pruned = prune(network, task).eval()
        assert torch.allclose(pruned(inputs).predictions[task], whole[task], atol=1e-6)
        names = [key for key, _ in pruned.named_parameters()]
        assert not any("gate" in key or "logits" in key or "permutation" in key for key in names)
        report = savings(network, pruned, inputs)
        assert report["pruned_parameters"] == sum(p.numel() for p in pruned.parameters()) < report["parameters"]
        assert report["pruned_flops"] == forward_flops(pruned, inputs)[""] < report["flops"]
    after = network.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())  # the network itself is left alone


def test_a_fixed_gate_is_static_in_any_network() -> None:
    experts, bottom = partial(StackedDense, units=[4]), partial(build_bottom, embedding_dim=5)
    network = MMoE(ROWS, 4, bottom, experts, partial(FixedGate, pattern="none"), Heads).eval()
    pruned = prune(network, "b")
    assert torch.allclose(pruned(INPUTS["rows"]).predictions["b"], network(INPUTS["rows"]).predictions["b"], atol=1e-6)
    assert pruned.mixture.experts.num_experts == 1


@pytest.mark.parametrize("experts", [partial(StackedDense, units=[6, 5]), partial(GatedExperts, units=5)])
def test_a_task_without_connections_can_be_pruned_and_exported(experts: Any, tmp_path: Path) -> None:
    network, inputs = mixture(ROWS, GumbelMatrixGate, experts=experts).eval(), INPUTS["rows"]
    for rows in ([3], slice(None)):  # one task, then all of them
        with torch.no_grad():
            network.mixture.gate.logits[rows] = torch.tensor([-1.0, 0.0])
        expected = network(inputs).predictions["d"]
        pruned = prune(network, "d")
        assert torch.allclose(pruned(inputs).predictions["d"], expected, atol=1e-6)
        assert torch.allclose(exportable(network)(inputs).predictions["d"], expected, atol=1e-6)
    export(Readable(pruned), inputs)


@pytest.mark.parametrize("name", ["topk", "gated", "conv"])
def test_frozen_parameters_stay_frozen(name: str) -> None:
    network, _ = NETWORKS[name]()
    for parameter in [*network.mixture.experts.parameters()][::2] + [*network.heads.parameters()][::2]:
        parameter.requires_grad_(False)
    wanted = {name: p.requires_grad for name, p in network.named_parameters()}
    for smaller in (prune(network, "a"), exportable(network)):
        for name, parameter in smaller.named_parameters():
            assert parameter.requires_grad == wanted[name], name


def test_flops_by_hand() -> None:
    layers = [{"components": [partial(DenseLayers, units=[7])], "copies": 3}]
    gate = partial(FixedGate, weights=[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    spec = DataSpec({"x": Numeric(3)}, [TaskSpec("a", "regression"), TaskSpec("b", "multiclass", 4)])
    network = RoutedNetwork(spec, build_bottom, layers, gate, Heads)
    inputs = {"x": torch.randn(2, 3)}
    a, b = (savings(network, prune(network, task), inputs)["pruned_flops"] for task in "ab")
    assert (a, b) == (2 * 3 * 7 + 2 * 7 + 2 * 7, 2 * 2 * 3 * 7 + 2 * 2 * 7 + 2 * 7 * 4)  # components, mixture, head
    assert savings(network, prune(network, "b"), inputs)["pruned_parameters"] == 2 * (3 * 7 + 7) + 7 * 4 + 4


def test_unprunable_networks_are_refused() -> None:
    experts, bottom = partial(StackedDense, units=[4]), partial(build_bottom, embedding_dim=5)
    with pytest.raises(InputError, match="depends on the example"):
        prune(MMoE(ROWS, 4, bottom, experts, SoftmaxGate, Heads), "a")
    with pytest.raises(InputError, match="no task 'z'; the tasks are a, b, c, d"):
        prune(routed(ROWS), "z")
    with pytest.raises(InputError, match="SharedBottom cannot be pruned"):
        prune(SharedBottom(ROWS, bottom, experts, Heads), "a")


@pytest.mark.parametrize(("name", "task"), [("routed", "a"), ("matrix", "b")])
def test_exported_program_accepts_any_number_of_rows(name: str, task: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    network, kind = NETWORKS[name]()
    inputs = INPUTS[kind]
    program = save(export(Readable(prune(network, task)), inputs), tmp_path / "program.pt2")
    for rows in (1, 2, 8):
        some = {key: value[:rows] for key, value in inputs.items()}
        expected = Readable(network.eval())(some)[task]  # what users read
        assert torch.allclose(program(some)[task], expected, atol=1e-6)
