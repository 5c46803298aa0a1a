"""PLE and CGC: the equations in numpy, what a task sees, and every gate in both."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mtl.callbacks.scheduled_buffer import ScheduledBuffer
from numpy.typing import NDArray
from omegaconf import OmegaConf
from torch import Tensor

from mtl.analysis.patterns import connections
from mtl.analysis.report import Report
from mtl.analysis.tally import Probabilities, RoutingStats
from mtl.checks import InputError
from mtl.experts.conv import StackedConv
from mtl.experts.dense import StackedDense
from mtl.gates import CometGate, GumbelMatrixGate, SoftmaxGate, SoftmaxSelectorGate, TopKGate
from mtl.gates.permuted import Permutation
from mtl.networks.bottom import ImageBottom, TabularBottom
from mtl.networks.cgc import SpreadGate
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.networks.ple import PLE
from mtl.types import Categorical, DataSpec, Image, Numeric, TaskSpec
from tests.conftest import ROOT
from tests.experts import GatedExperts
from tests.gate_cases import CASES, IDS, GateCase, harden
from tests.integration.helpers import composed

TASKS = [TaskSpec("a", "binary"), TaskSpec("b", "regression"), TaskSpec("c", "multiclass", num_classes=3)]
SPEC = DataSpec({"id": Categorical(IDS), "x": Numeric(3)}, TASKS)
PARTS: dict[str, Any] = {
    "bottom": partial(TabularBottom, embedding_dim=4),
    "experts": partial(StackedDense, units=[6, 5], dropout=0.3),
    "heads": Heads,
}
MMOE_GATES = ("topk_noisy", "topk_bias", "comet", "hash", "gumbel_matrix", "fixed")
every_gate = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def ple(levels: int, gate: Any = SoftmaxGate, num_experts: int = 4, num_task_experts: int = 2, **options: Any) -> PLE:
    torch.manual_seed(4)
    return PLE(SPEC, num_experts, num_task_experts, levels, gate=gate, **PARTS | options).double()


def rows(count: int = 9) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {"id": torch.randint(IDS, (count,), generator=draw), "x": torch.randn(count, 3, generator=draw).double()}


def softmax(x: NDArray[Any]) -> NDArray[Any]:
    exp = np.exp(x - x.real.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def reference(p: dict[str, NDArray[Any]], x: NDArray[Any], num_tasks: int, levels: int) -> NDArray[Any]:
    """Return the predictions ``[B, T]`` as Tang et al. 2020 write them: S^k, w^k, g^k, one example and level at a time.

    Sections 4.1 and 4.2. Experts are one dense layer with relu.
    """

    def outputs(level: int, part: int, x: NDArray[Any]) -> list[NDArray[Any]]:
        layer = f"levels.{level}.experts.parts.{part}.layers.0"
        mapped = [w @ x + b for w, b in zip(p[f"{layer}.weight"], p[f"{layer}.bias"], strict=True)]
        return [np.where(value.real > 0, value, 0) for value in mapped]

    predictions = []
    for row in x:
        own, shared = [row] * num_tasks, row  # g^k and g^s of the level below
        for level in range(levels):
            last, gates = level == levels - 1, f"levels.{level}.gate"
            gate = f"{gates}.gate" if last else f"{gates}.gates.tasks.gate"
            of_all = outputs(level, 0, shared)
            of_tasks = [outputs(level, 1 + k, own[k]) for k in range(num_tasks)]
            mixed = []
            for k in range(num_tasks):
                weights = softmax(p[f"{gate}.weight"][k] @ own[k] + p[f"{gate}.bias"][k])
                mixed.append(weights @ np.stack(of_all + of_tasks[k]))
            if not last:
                gate = f"{gates}.gates.shared"
                weights = softmax(p[f"{gate}.weight"][0] @ shared + p[f"{gate}.bias"][0])
                shared = weights @ np.stack(of_all + [output for outputs in of_tasks for output in outputs])
            own = mixed
        head = zip(p["heads.output.1.weight"], p["heads.output.1.bias"], own, strict=True)
        predictions.append([(w @ h + b)[0] for w, b, h in head])
    return np.array(predictions)


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_values_and_gradients_equal_the_papers_equations(levels: int) -> None:
    """Gradients by complex steps: f'(p) = Im f(p + ih) / h, without rounding errors."""
    spec = DataSpec({"x": Numeric(3)}, [TaskSpec("a", "binary"), TaskSpec("b", "regression")])
    torch.manual_seed(levels)
    network = PLE(spec, 3, 1, levels, TabularBottom, partial(StackedDense, units=[4]), SoftmaxGate, Heads).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn_like(parameter))
    x = torch.randn(5, 3, dtype=torch.float64)
    found = torch.stack(list(network({"x": x}).predictions.values()), 1)
    values = {name: p.detach().numpy().astype(complex) for name, p in network.named_parameters()}
    assert np.abs(found.detach().numpy() - reference(values, x.numpy(), 2, levels)).max() < 1e-10
    factors = torch.linspace(-1, 1, 10, dtype=torch.float64).view(5, 2)
    (found * factors).sum().backward()
    for name, parameter in network.named_parameters():
        for place in np.ndindex(parameter.shape):
            values[name][place] += 1e-30j
            slope = (reference(values, x.numpy(), 2, levels) * factors.numpy()).sum().imag / 1e-30
            values[name][place] = values[name][place].real
            assert abs(slope - float(parameter.grad[place])) < 1e-10 * max(1, abs(slope)), (name, place)


def test_cgc_is_one_level_of_ple() -> None:
    cgc, one = composed(["network=cgc"]), composed(["network=ple", "network.num_levels=1"])
    assert cgc.network == one.network
    assert isinstance(ple(1).levels[0].gate, SpreadGate)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in MMOE_GATES], ids=lambda case: case.name)
@pytest.mark.parametrize("static", [False, True])
def test_without_own_experts_it_is_mmoe(case: GateCase, static: bool) -> None:
    if not (case.static if static else case.looks):
        return
    options: Any = {"static_gate": static, "permutation": Permutation}
    ours, theirs = (
        ple(1, case.make, num_task_experts=0, **options),
        MMoE(SPEC, 4, gate=case.make, **PARTS, **options).double(),
    )
    renamed = {"mixture.gate.": "levels.0.gate.gate.", "mixture.experts.": "levels.0.experts.parts.0."}
    renamed["mixture.dispatch."] = "levels.0.dispatch."
    state = theirs.state_dict()
    for old, new in renamed.items():
        state = {name.replace(old, new): value for name, value in state.items()}
    ours.load_state_dict(state)
    results = []
    for network in (ours, theirs):
        torch.manual_seed(2)
        output = network(rows())
        total = sum(p.sin().sum() for p in output.predictions.values()) + sum(output.losses.values())
        total.backward()
        gradients = [network.get_parameter(name).grad for name in ("bottom.embeddings.0.weight", "heads.output.1.bias")]
        results.append([*output.predictions.values(), *output.losses.values(), *gradients])
    for our, their in zip(*results, strict=True):
        torch.testing.assert_close(our, their, atol=1e-12, rtol=0)


def steps(case: GateCase, execution: str, experts: Any) -> tuple[PLE, list[float]]:
    """Train for some steps, with dropout; return the network and the losses."""
    make = partial(case.make, k=case.k) if case.k and not case.name.startswith(("task", "hash")) else case.make
    network = ple(2, make, execution=execution, **({"experts": experts} if experts else {}))
    if case.name != "softmax_selector":  # whose weights would be exactly 0 only at a low temperature
        harden(network)
    optimizer, losses = torch.optim.Adam(network.parameters(), lr=1e-2), []
    torch.manual_seed(7)
    for _ in range(3):
        for level in network.levels:
            level.dispatch.sparse = execution == "sparse"
        output = network(rows(40))
        loss = sum((p - 1).square().mean() for p in output.predictions.values()) + sum(output.losses.values())
        optimizer.zero_grad()
        loss.backward()
        missing = [name for name, p in network.named_parameters() if p.grad is None and p.numel()]
        assert not missing  # DDP waits for a gradient of every parameter
        optimizer.step()
        losses.append(float(loss.detach()))
    return network, losses


@every_gate
def test_every_gate_trains_alike_in_sparse_and_dense_execution(case: GateCase) -> None:
    gated = partial(GatedExperts, units=5, dropout=0.5)
    for experts in (None, gated) if case.name == "topk" else (None,):
        (dense, expected), (sparse, losses) = (steps(case, way, experts) for way in ("dense", "sparse"))
        assert losses == pytest.approx(expected, abs=1e-10)
        for (name, p), q in zip(dense.named_parameters(), sparse.parameters(), strict=True):
            torch.testing.assert_close(p, q, atol=1e-8, rtol=0, msg=lambda m, name=name: f"{name}: {m}")
        whole = dense.eval()(rows())
        assert all(torch.isfinite(value).all() for value in whole.predictions.values())
        for wanted in (["b"], ["a", "c"]):
            part = dense(rows(), wanted)
            assert list(part.predictions) == wanted
            for task, value in part.predictions.items():
                torch.testing.assert_close(value, whole.predictions[task])


def test_images_and_a_batch_without_rows() -> None:
    conv = partial(StackedConv, convolutions=[{"channels": 2, "kernel": 3, "pool": 2}], units=[4])
    spec = DataSpec({"image": Image(1, 8, 8)}, TASKS)
    dense = partial(StackedDense, units=[5])
    for execution in ("dense", "sparse"):
        network = PLE(spec, 3, 1, 2, ImageBottom, conv, TopKGate, Heads, upper_experts=dense, execution=execution)
        for count in (0, 4):
            network.levels[0].dispatch.sparse = network.levels[1].dispatch.sparse = execution == "sparse"
            predictions = network({"image": torch.rand(count, 1, 8, 8)}).predictions
            assert {len(value) for value in predictions.values()} == {count}
            sum(value.sum() for value in predictions.values()).backward()


def test_the_shared_gate_has_a_row_in_tables_and_none_among_the_connections_of_tasks(tmp_path: Path) -> None:
    network = ple(2, TopKGate, static_gate=True).eval()
    tally, layer = RoutingStats(len(TASKS)), network.levels[0]
    tally.add(network(rows()).routings["levels.0"], 9)
    report = Report(["a", "b", "c"], {"levels.0": tally}, {}, Probabilities(), {})
    report.write_tables(tmp_path)
    lines = (tmp_path / "expert_share.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["task", "a", "b", "c", "shared experts"]
    assert torch.equal(connections(layer.gate, 3), layer.gate(None).weights[:3] != 0)


def test_the_gates_of_tasks_and_of_shared_experts_are_one() -> None:
    """In any order of tasks; the gate of the shared experts belongs to no task."""
    gate = ple(2).levels[0].gate
    x = torch.randn(5, 4, 7, dtype=torch.float64)  # of each task and of the shared experts
    whole = gate(x).weights
    for tasks in ([3, 0], [1, 3, 2], [2]):
        torch.testing.assert_close(gate(x[:, tasks], tasks=tasks).weights, whole[:, tasks])
    assert {*gate.task_parameters()} == {*gate.gates["tasks"].parameters()}


@pytest.mark.parametrize("name", ["entropy_weight", "temperature"])
@pytest.mark.parametrize("permutation", [None, Permutation])
def test_schedules_reach_every_gate(name: str, permutation: Any) -> None:
    network = ple(2, SoftmaxSelectorGate, permutation=permutation)
    target = str(OmegaConf.load(ROOT / f"conf/schedule/{name}.yaml").target)
    known = [f"network.{key}" for key, _ in network.named_buffers() if key.endswith(f".{name}")]
    assert len(known) == 3
    schedule = ScheduledBuffer(target, 1.0, 0.1, fraction=1.0)
    assert all(schedule._matches(key) for key in known)


@pytest.mark.parametrize(
    ("levels", "own", "message"),
    [
        (1, 5, "num_task_experts=5: must be at most num_experts=4$"),
        (2, 4, "num_task_experts=4: a task sees 4 experts .* with num_levels=2, some must be its own and some shared"),
        (2, 0, "num_task_experts=0: .* some must be its own"),
    ],
)
def test_numbers_of_experts_that_do_not_fit(levels: int, own: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ple(levels, num_task_experts=own)


def test_the_budget_is_that_of_the_gates_of_all_levels() -> None:
    """The mean probability of all connections is within the budget, that of one gate alone is not."""
    network = ple(2, partial(GumbelMatrixGate, budget=0.5, budget_weight=1.0), static_gate=True)
    gates = [module for module in network.modules() if isinstance(module, GumbelMatrixGate)]
    for gate, logit in zip(gates, (-5.0, 5.0, -5.0), strict=True):
        gate.logits.data[..., 0], gate.logits.data[..., 1] = logit, 0.0
    total = sum(float((gate.probabilities() > 0.5).sum()) for gate in gates)
    assert 0 < total < 0.5 * sum(gate.probabilities().numel() for gate in gates)
    losses = network.train()(rows()).losses
    assert [float(value.detach()) for name, value in losses.items() if "budget" in name] == [0.0]


def test_the_products_that_comets_trees_need() -> None:
    """Hard trees of 4 leaves need 3 of 7 nodes, those of the shared gate over 8 leaves 4 of 15."""
    network = ple(2, partial(CometGate, k=1)).eval()
    harden(network)
    found = [network.get_submodule(n).gate.active_fraction(r.selectors) for n, r in network(rows()).routings.items()]
    assert found == pytest.approx([(3 * 3 + 4) / (3 * 7 + 15), 3 / 7])
