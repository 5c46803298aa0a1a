"""AdaTT and STEM: the equations of their papers in numpy, which task trains what, sparse and dense execution."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mtl.checks import InputError
from mtl.experts.dense import StackedDense
from mtl.gates import CometGate, SoftmaxGate, TopKGate
from mtl.networks.adatt import AdaTT
from mtl.networks.bottom import ImageBottom, TabularBottom
from mtl.networks.heads import Heads
from mtl.networks.stem import STEM
from mtl.types import Categorical, DataSpec, Image, Numeric, TaskSpec

TASKS = [TaskSpec("a", "binary"), TaskSpec("b", "regression"), TaskSpec("c", "regression")]
SPEC = DataSpec({"id": Categorical(7), "x": Numeric(3)}, TASKS)
PARTS: dict[str, Any] = {
    "bottom": partial(TabularBottom, embedding_dim=4),
    "experts": partial(StackedDense, units=[5]),
    "heads": Heads,
}
Values = dict[str, NDArray[Any]]
B, T = 6, len(TASKS)


def made(make: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    network = make(SPEC, **PARTS | options).double()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter))
    return network


def rows(count: int = B) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {"id": torch.randint(7, (count,), generator=draw), "x": torch.randn(count, 3, generator=draw).double()}


def softmax(x: NDArray[Any]) -> NDArray[Any]:
    exp = np.exp(x - x.real.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def experts(p: Values, name: str, x: NDArray[Any]) -> list[NDArray[Any]]:
    """Return the outputs of the experts of one owner for one row."""
    mapped = [w @ x + b for w, b in zip(p[f"{name}.layers.0.weight"], p[f"{name}.layers.0.bias"], strict=True)]
    return [np.where(value.real > 0, value, 0) for value in mapped]


def heads(p: Values, mixed: list[NDArray[Any]]) -> list[Any]:
    return [(w @ h + b)[0] for w, b, h in zip(p["heads.output.1.weight"], p["heads.output.1.bias"], mixed, strict=True)]


def bottom(p: Values, name: str, row: int) -> NDArray[Any]:
    inputs = rows()
    return np.concatenate([p[f"{name}.embeddings.0.weight"][inputs["id"][row]], inputs["x"][row].numpy()])


def adatt(p: Values, levels: int, shared: int, own: int) -> NDArray[Any]:
    """Section 3.3 of Li et al.: AllExpertGF plus NativeExpertLF, one row, level and unit at a time; ``[B, T]``."""
    found = []
    for row in range(B):
        units = [bottom(p, "bottom", row)] * (T + (shared > 0))
        for level in range(levels):
            name = f"levels.{level}"
            outputs = [experts(p, f"{name}.experts.parts.{u}", x) for u, x in enumerate(units)]
            every = np.stack([output for part in outputs for output in part])
            fused = []
            for unit in range(T if level == levels - 1 else len(units)):
                gate = f"{name}.gate.gate"
                weights = softmax(p[f"{gate}.weight"][unit] @ units[unit] + p[f"{gate}.bias"][unit])
                native = sum(
                    p[f"{name}.gate.native"][unit, unit * own + place] * output
                    for place, output in enumerate(outputs[unit])
                )
                fused.append(weights @ every + native)
            units = fused
        found.append(heads(p, units))
    return np.array(found)


def stem(p: Values, frozen: Values, shared: int, own: int) -> NDArray[Any]:
    """Section 4 of Su et al., ``[B, T]``; of other tasks' experts and embeddings, the values ``frozen``."""
    found = []
    for row in range(B):
        mixed = []
        for task in range(T):
            x = [bottom(p if owner in (task, T) else frozen, f"bottoms.{owner}", row) for owner in range(T + 1)]
            outputs = [
                experts(p if owner in (task, T) else frozen, f"mixture.experts.parts.{owner}", x[owner])
                for owner in range(T + 1)
            ]
            gate = "mixture.gate"
            weights = softmax(p[f"{gate}.weight"][task] @ (x[task] + x[T]) + p[f"{gate}.bias"][task])
            mixed.append(weights @ np.stack([output for part in outputs for output in part]))
        found.append(heads(p, mixed))
    return np.array(found)


def check(network: nn.Module, reference: Any) -> None:
    """Compare values, and gradients by complex steps, f'(p) = Im f(p + ih) / h, which have no rounding errors."""
    found = torch.stack(list(network(rows()).predictions.values()), 1)
    values = {name: p.detach().numpy().astype(complex) for name, p in network.named_parameters()}
    assert np.abs(found.detach().numpy() - reference(values)).max() < 1e-10
    factors = torch.linspace(-1, 1, B * T, dtype=torch.float64).view(B, T)
    (found * factors).sum().backward()
    for name, parameter in network.named_parameters():
        for place in np.ndindex(parameter.shape if parameter.requires_grad else (0,)):
            values[name][place] += 1e-30j
            slope = (reference(values) * factors.numpy()).sum().imag / 1e-30
            values[name][place] = values[name][place].real
            assert parameter.grad is not None
            assert abs(slope - float(parameter.grad[place])) < 1e-10 * max(1, abs(slope)), (name, place)


@pytest.mark.parametrize(("levels", "shared", "own"), [(1, 0, 2), (2, 0, 1), (2, 1, 2)])
def test_adatt_equals_the_papers_equations(levels: int, shared: int, own: int) -> None:
    sizes = {"num_task_experts": own, "num_shared_experts": shared, "num_levels": levels}
    check(made(AdaTT, gate=SoftmaxGate, **sizes), lambda p: adatt(p, levels, shared, own))


@pytest.mark.parametrize(("shared", "own"), [(1, 1), (2, 2)])
def test_stem_equals_the_papers_equations(shared: int, own: int) -> None:
    network = made(STEM, gate=SoftmaxGate, num_task_experts=own, num_shared_experts=shared)
    frozen = {name: p.detach().numpy().copy() for name, p in network.named_parameters()}
    check(network, lambda p: stem(p, frozen, shared, own))


def test_a_task_of_stem_trains_its_own_and_the_shared_parts_alone() -> None:
    network = made(STEM, gate=CometGate, num_task_experts=1, num_shared_experts=1)
    network(rows()).predictions["b"].sum().backward()
    touched = [bool(p.grad is not None and p.grad.abs().sum() > 0) for p in network.bottoms.parameters()]
    assert touched == [False, True, False, True]
    trained = [bool(p.weight.grad.abs().sum() > 0) for part in network.mixture.experts.parts for p in part.layers]
    assert trained == [False, True, False, True]


@pytest.mark.parametrize("gate", [partial(TopKGate, k=2), partial(CometGate, k=1)])
@pytest.mark.parametrize("static", [False, True])
def test_adatt_is_the_same_in_sparse_and_dense_execution(gate: Any, static: bool) -> None:
    results = []
    for execution in ("dense", "sparse"):
        options = {
            "num_task_experts": 2,
            "num_shared_experts": 1,
            "num_levels": 2,
            "static_gate": static,
            "execution": execution,
        }
        network = made(AdaTT, gate=gate, experts=partial(StackedDense, units=[5], dropout=0.4), **options).train()
        for level in network.levels:
            level.dispatch.sparse = execution == "sparse"
        torch.manual_seed(3)
        output = network(rows(40))
        (sum(p.sin().sum() for p in output.predictions.values()) + sum(output.losses.values())).backward()
        results.append([*output.predictions.values(), *(p.grad for p in network.parameters() if p.requires_grad)])
    for dense, sparse in zip(*results, strict=True):
        torch.testing.assert_close(dense, sparse, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    "make",
    [
        partial(AdaTT, num_task_experts=1, num_shared_experts=1, num_levels=2),
        partial(STEM, num_task_experts=1, num_shared_experts=1),
    ],
)
def test_some_tasks_alone_have_the_same_predictions(make: Any) -> None:
    network = made(make, gate=CometGate).eval()
    whole = network(rows()).predictions
    for wanted in (["b"], ["a", "c"]):
        part = network(rows(), wanted).predictions
        assert list(part) == wanted
        for task, value in part.items():
            torch.testing.assert_close(value, whole[task])


def test_stem_needs_embeddings() -> None:
    spec = DataSpec({"image": Image(1, 8, 8)}, TASKS)
    with pytest.raises(InputError, match="network=stem: tasks share embeddings of rows, and images have none"):
        STEM(spec, 1, 1, **PARTS | {"bottom": ImageBottom}, gate=SoftmaxGate)
