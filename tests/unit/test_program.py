"""Exported programs give what the networks give, for any number of rows and any length of texts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtl.experts.conv import StackedConv
from mtl.experts.dense import StackedDense
from mtl.gates import CometGate, GumbelMatrixGate, Permutation, SoftmaxGate, TopKGate
from mtl.networks.adatt import AdaTT
from mtl.networks.bottom import build_bottom
from mtl.networks.components import DenseLayers
from mtl.networks.heads import Heads
from mtl.networks.mixture import MixtureOfExperts
from mtl.networks.mmoe import MMoE
from mtl.networks.ple import PLE
from mtl.networks.routed import RoutedNetwork
from mtl.networks.stem import STEM
from mtl.predictions import to_predictions
from mtl.types import Bag, Categorical, DataSpec, Image, Numeric, TaskSpec, Tokens
from mtl.use.program import Readable, export, exportable, random_inputs, save, save_onnx
from tests.gate_cases import CASES, IDS, GateCase
from tests.transformers import shake, transformer

TASKS = [
    TaskSpec("a", "regression", mean=1.7e9 + 0.48, std=3.0),
    TaskSpec("b", "multiclass", 3),
    TaskSpec("c.d", "binary"),
]
ROWS = DataSpec({"id": Categorical(9), "tags": Bag(7, 4), "x": Numeric(3)}, TASKS)
IMAGES = DataSpec({"image": Image(1, 12, 12, 0.1, 0.3)}, TASKS)
TEXTS = DataSpec({"tokens": Tokens(40, 12), "segments": Tokens(2, 12)}, TASKS[1:2])
CONV = partial(StackedConv, convolutions=[{"channels": 2, "kernel": 3, "pool": 2}], units=[4])


def mixture(spec: DataSpec, gate: Any, experts: Any, **options: Any) -> MMoE:
    return MMoE(spec, 5, partial(build_bottom, embedding_dim=4), experts, gate, Heads, **options)


def ple(gate: Any, static: bool) -> PLE:
    return PLE(ROWS, 3, 1, 2, partial(build_bottom, embedding_dim=4), DENSE, gate, Heads, static_gate=static)


def adatt(gate: Any, static: bool) -> AdaTT:
    return AdaTT(ROWS, 2, 1, 2, partial(build_bottom, embedding_dim=4), DENSE, gate, Heads, static_gate=static)


def routed() -> RoutedNetwork:
    layers = [{"components": [partial(DenseLayers, units=[4])], "copies": 4}] * 2
    gate = partial(GumbelMatrixGate, initial_probability=0.5)
    return RoutedNetwork(ROWS, partial(build_bottom, embedding_dim=4), layers, gate, Heads)


def text(**options: Any) -> nn.Module:
    config = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformer(
        spec=TEXTS, config=config, width=8, num_experts=3, expert_init="random", shared_neurons=0, **options
    )


BAGS: dict[str, Any] = {"embedding_dim": 4, "list_pooling": "sqrtn", "list_dim": 6, "list_dropout": 0.5}
DENSE = partial(StackedDense, units=[6])
NETWORKS: dict[str, tuple[DataSpec, Callable[[], nn.Module]]] = {
    "comet+": (ROWS, lambda: mixture(ROWS, CometGate, DENSE, permutation=Permutation)),
    "static": (ROWS, lambda: mixture(ROWS, TopKGate, DENSE, static_gate=True, permutation=Permutation)),
    "bags": (ROWS, lambda: MMoE(ROWS, 5, partial(build_bottom, **BAGS), DENSE, CometGate, Heads)),
    "images": (IMAGES, lambda: mixture(IMAGES, partial(CometGate, k=1), CONV)),
    "ple": (ROWS, lambda: ple(CometGate, False)),
    "ple static": (ROWS, lambda: ple(TopKGate, True)),
    "adatt": (ROWS, lambda: adatt(CometGate, False)),
    "adatt static": (ROWS, lambda: adatt(TopKGate, True)),
    "stem": (ROWS, lambda: STEM(ROWS, 1, 1, partial(build_bottom, embedding_dim=4), DENSE, CometGate, Heads)),
    "routed": (ROWS, routed),
    "tokens": (TEXTS, lambda: text(gate=CometGate)),
    "sentences": (TEXTS, lambda: text(gate=TopKGate, route="sentence")),
}


def build(name: str) -> tuple[DataSpec, nn.Module, dict[str, Tensor]]:
    torch.manual_seed(1)
    spec, make = NETWORKS[name]
    network = make().float()
    shake(network)
    return spec, network.eval(), random_inputs(spec.inputs, 6)


def check(program: Callable[..., dict[str, Tensor]], network: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Compare with the network, with as many rows as the export saw, with fewer, and with shorter texts."""
    for rows, length in ((6, None), (1, None), (4, 5)):
        some = {name: v[:rows, :length] if name in TEXTS.inputs else v[:rows] for name, v in inputs.items()}
        found, raw = program(some), network(some).predictions
        for task in network.tasks:
            pair = found[task.name], to_predictions(task, raw[task.name])
            pair = tuple(map(task.standardize, pair)) if task.kind == "regression" else pair
            torch.testing.assert_close(*pair, atol=1e-5, rtol=1e-5)


FAST = ("static", "bags", "images", "routed", "tokens")  # comet+: below
PT2 = [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in NETWORKS if n != "comet+"]


@pytest.mark.parametrize("name", PT2)
@torch.no_grad()
def test_program_equals_network(name: str, tmp_path: Path) -> None:
    spec, network, inputs = build(name)
    texts = [name for name, one in spec.inputs.items() if isinstance(one, Tokens)]
    program = export(Readable(exportable(network)), inputs, texts)
    check(save(program, tmp_path / "model.pt2"), network, inputs)
    if name == "static":  # experts that no task uses are left out
        assert sum(value.numel() for value in program.state_dict.values()) < sum(
            p.numel() for p in network.parameters()
        )


EXPORTED = ("topk", "topk_bias", "remoe", "hash", "dselect_k", "softmax_selector", "task_top1")
GATES = [case for case in CASES if case.name in EXPORTED]
GATES += [GateCase("columns", partial(SoftmaxGate, columns=["id"]))]


class SomeGates(nn.Module):
    """A mixture with each of several gates, beside each other."""

    def __init__(self) -> None:
        super().__init__()
        gates = [case.build(2, 3, 3) for case in GATES]
        self.mixtures = nn.ModuleList(MixtureOfExperts(3, 2, 3, gate, DENSE) for gate in gates)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        raw = {"id": inputs["id"]}
        return {str(i): mixture(inputs["x"], raw)[0] for i, mixture in enumerate(self.mixtures)}


@torch.no_grad()
def test_program_of_other_gates(tmp_path: Path) -> None:
    torch.manual_seed(1)
    network = SomeGates().eval()
    inputs = random_inputs({"id": Categorical(IDS), "x": Numeric(3)}, 7)
    program = save(export(exportable(network), inputs), tmp_path / "gates.pt2")
    for index, value in program(inputs).items():
        torch.testing.assert_close(value, network(inputs)[index], msg=lambda m, i=index: f"{GATES[int(i)].name}: {m}")


@torch.no_grad()
def test_names_of_columns_and_tasks_are_free(tmp_path: Path) -> None:
    """They may be those of operations, of weights, and of each other."""
    columns = ("cat", "linear", "a", "output.bias", "a_prediction")
    names = ["a", "a_prediction", "sigmoid"]
    spec = DataSpec({name: Numeric(1) for name in columns}, [TaskSpec(name, "binary") for name in names])
    network, inputs = mixture(spec, CometGate, DENSE).eval(), random_inputs(spec.inputs, 3)
    program = export(Readable(exportable(network)), inputs)
    check(save(program, tmp_path / "model.pt2"), network, inputs)
    session = save_onnx(program, list(inputs), names, tmp_path / "model.onnx")
    assert [one.name for one in session.get_inputs()] == list(columns)
    assert [one.name for one in session.get_outputs()] == [
        "a_prediction_prediction",
        "a_prediction_prediction_prediction",
        "sigmoid",
    ]

    def run(some: dict[str, Tensor]) -> dict[str, Tensor]:
        values = session.run(None, {name: value.numpy() for name, value in some.items()})
        return dict(zip(names, map(torch.from_numpy, values), strict=True))

    check(run, network, inputs)


@pytest.mark.parametrize("name", ["comet+", "bags"])
@torch.no_grad()
def test_onnx_equals_network(name: str, tmp_path: Path) -> None:
    _, network, inputs = build(name)
    names = [task.name for task in network.tasks]
    program = export(Readable(exportable(network)), inputs)
    check(save(program, tmp_path / "model.pt2"), network, inputs)
    session = save_onnx(program, list(inputs), names, tmp_path / "model.onnx")

    def run(some: dict[str, Tensor]) -> dict[str, Tensor]:
        values = session.run(names, {name: value.numpy() for name, value in some.items()})
        return dict(zip(names, map(torch.from_numpy, values), strict=True))

    check(run, network, inputs)
