"""ReMoE, the cosine router, DeepSeek-V3's scores and bias, and gates that see columns: by hand, and what adapts."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mtl.checks import InputError
from mtl.experts.dense import StackedDense
from mtl.gates import (
    CometGate,
    CosineGate,
    FixedGate,
    Gate,
    HashGate,
    ReMoEGate,
    SoftmaxGate,
    TopKGate,
    update_adaptive_gates,
)
from mtl.gates.joined import JoinedGates
from mtl.gates.permuted import Permutation
from mtl.networks.bottom import build_bottom
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.networks.ple import PLE
from mtl.types import Bag, Categorical, DataSpec, Numeric, TaskSpec
from tests.gate_cases import CASES, GateCase, harden

B, T, E, D, K = 6, 2, 5, 3, 2
RNG = np.random.default_rng(0)
X, C = RNG.normal(size=(B, D)), RNG.normal(size=(B, T, E))  # C: the gradient of the objective by each weight


def compare(gate: Gate, weights: Any, gradients: dict[str, Any]) -> None:
    """Compare weights and gradients of sum(C * weights) by parameters with those computed by numpy."""
    got = gate(torch.tensor(X)).weights
    np.testing.assert_allclose(got.detach().numpy(), weights, atol=1e-10)
    (got * torch.tensor(C)).sum().backward()
    for name, expected in gradients.items():
        np.testing.assert_allclose(gate.get_parameter(name).grad.numpy(), expected, atol=1e-10, err_msg=name)


def drawn(gate: Gate) -> tuple[Gate, list[Any]]:
    """Return the gate in float64 with random parameters, and these as arrays."""
    gate = gate.double()
    for parameter in gate.parameters():
        parameter.data = torch.tensor(RNG.normal(size=parameter.shape))
    return gate, [parameter.detach().numpy() for parameter in gate.parameters()]


def test_remoe_by_hand() -> None:
    gate, (w, b) = drawn(ReMoEGate(T, E, D, k=K, initial_l1=0.25))
    logits = np.einsum("bd,ted->bte", X, w) + b
    active = logits > 0
    weights = np.where(active, logits, 0)
    compare(gate, weights, {"weight": np.einsum("bte,bd->ted", C * active, X), "bias": (C * active).sum(0)})
    f = E / (K * B) * active.sum(0)  # [T, E]
    routing = gate(torch.tensor(X))
    np.testing.assert_allclose(float(routing.losses["l1"].detach()), 0.25 * (f * weights).sum() / B, atol=1e-10)
    gate.zero_grad()
    routing.losses["l1"].backward()
    np.testing.assert_allclose(gate.bias.grad.numpy(), 0.25 * (f * active).sum(0) / B, atol=1e-10)
    plain, _ = drawn(ReMoEGate(T, E, D, balance=False, initial_l1=0.25))
    routing = plain(torch.tensor(X))
    torch.testing.assert_close(routing.losses["l1"], 0.25 * routing.weights.sum() / B)


def softmax(z: Any) -> Any:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def largest(scores: Any) -> Any:
    return scores >= np.sort(scores, -1)[..., [-K]]


def test_cosine_router_by_hand() -> None:
    gate, (w, e, s) = drawn(CosineGate(T, E, D, k=K, dim=4))

    p, a = np.einsum("bd,tpd->btp", X, w), np.exp(s)[:, None]
    lengths, sizes = np.linalg.norm(p, axis=-1, keepdims=True), np.linalg.norm(e, axis=-1, keepdims=True)
    u, v = p / lengths, e / sizes
    z = a * np.einsum("btp,tep->bte", u, v)
    probabilities = softmax(z)
    weights = np.where(largest(probabilities), probabilities, 0)
    dz = weights * C - probabilities * (weights * C).sum(-1, keepdims=True)
    du, dv = np.einsum("bte,tep->btp", a * dz, v), np.einsum("bte,btp->tep", a * dz, u)
    dp, de = ((d - n * (n * d).sum(-1, keepdims=True)) / size for d, n, size in ((du, u, lengths), (dv, v, sizes)))
    gradients = {"project_weight": np.einsum("btp,bd->tpd", dp, X), "embedding": de, "log_scale": (dz * z).sum((0, 2))}
    compare(gate, weights, gradients)
    twice = gate(torch.tensor(2 * X)).weights
    torch.testing.assert_close(twice, gate(torch.tensor(X)).weights)  # the length of x does not matter


@pytest.mark.parametrize("normalize", ["after", "before"])
def test_sigmoid_scores_and_bias_by_hand(normalize: Any) -> None:
    gate, (w, b) = drawn(TopKGate(T, E, D, k=K, scores="sigmoid", bias_rate=0.1, normalize=normalize))
    gate.expert_bias.copy_(bias := torch.tensor(RNG.normal(size=(T, E))))
    scores = 1 / (1 + np.exp(-(np.einsum("bd,ted->bte", X, w) + b)))
    kept = largest(scores + bias.numpy())
    weights, slope = np.where(kept, scores, 0), C * kept
    if normalize == "after":
        total = weights.sum(-1, keepdims=True)
        slope = kept * (C - (C * weights / total).sum(-1, keepdims=True)) / total
        weights = weights / total
    slope = slope * scores * (1 - scores)
    compare(gate, weights, {"weight": np.einsum("bte,bd->ted", slope, X), "bias": slope.sum(0)})
    before, load = bias.numpy().copy(), kept.sum(0)
    update_adaptive_gates(gate, gate(torch.tensor(X)).measured)
    expected = before + 0.1 * np.sign(load.mean(-1, keepdims=True) - load)
    np.testing.assert_allclose(gate.expert_bias.numpy(), expected, atol=1e-10)


def test_the_penalty_grows_until_k_experts_are_used() -> None:
    gate, x = ReMoEGate(2, 4, 1, k=2), torch.zeros(3, 1)
    gate.bias.data = torch.tensor([[1.0, 1.0, 1.0, -1.0], [1.0, -1.0, -1.0, -1.0]])
    for _ in range(3):
        update_adaptive_gates(gate, gate(x).measured)
    torch.testing.assert_close(gate.l1, torch.tensor([1e-4 * 1.02**3, 1e-4 / 1.02**3]))
    gate.bias.data[:, :2] = 1.0
    gate.bias.data[:, 2:] = -1.0
    before = gate.l1.clone()
    update_adaptive_gates(gate, gate(x).measured)
    assert torch.equal(gate.l1, before)  # exactly k
    assert gate.eval()(x).measured == ()


ADAPTIVE = [case for case in CASES if case.name in ("remoe", "topk_bias")]


@pytest.mark.parametrize("case", ADAPTIVE, ids=lambda case: case.name)
def test_a_step_adapts_to_all_its_batches_and_only_to_tasks_that_had_rows(case: GateCase) -> None:
    """Also within local search, and with a gate of its own for each task, as with all rows in one batch."""
    x = torch.randn(24, D)
    whole, parts = case.build(3, 4, D), case.build(3, 4, D)
    parts.load_state_dict(whole.state_dict())
    own = [case.build(1, 4, D) for _ in range(3)]
    separate = JoinedGates({str(task): gate for task, gate in enumerate(own)})
    for name, value in whole.state_dict().items():
        for task, gate in enumerate(own):
            gate.state_dict()[name].copy_(value[[task]])
    update_adaptive_gates(whole, whole(x).measured)
    update_adaptive_gates(
        parts, [pair for rows in x.split(9) for t in ([1, 0], [2]) for pair in parts(rows, tasks=t).measured]
    )
    assert torch.equal(parts.state(), whole.state())
    update_adaptive_gates(separate, separate(x, tasks=[0, 2]).measured)
    assert torch.equal(own[0].state(), whole.state()[[0]])
    assert torch.equal(own[1].state(), case.build(1, 4, D).state())


def test_gates_of_their_own_need_the_products_of_one_gate() -> None:
    one, gates = CometGate(2, 4, D, k=1), {task: CometGate(1, 4, D, k=1) for task in ("a", "b")}
    separate = JoinedGates(gates)
    for gate in (one, *gates.values()):
        harden(gate)
    x = torch.randn(9, D)
    assert one.active_fraction(one(x).selectors) == pytest.approx(3 / 7)
    for tasks in (None, [1]):
        assert separate.active_fraction(separate(x, tasks=tasks).selectors) == pytest.approx(3 / 7)


TABLE = {
    "scenario": Categorical(3),
    "tags": Bag(4, 3),
    "numeric columns": Numeric(3, ("age", "pay", "pay")),  # pay has a mark of missing values
    "item": Categorical(7),
}
PARTS: dict[str, Any] = {
    "bottom": partial(build_bottom, embedding_dim=4),
    "experts": partial(StackedDense, units=[5]),
    "heads": partial(Heads, units=[]),
}
SPEC = DataSpec(TABLE, [TaskSpec(name, "binary") for name in "abc"])


def table(rows: int = 8) -> dict[str, Tensor]:
    return {
        "scenario": torch.arange(rows) % 3,
        "tags": torch.tensor([[1, 2, 0], [3, 3, 1]] * (rows // 2)),
        "numeric columns": torch.randn(rows, 3),
        "item": torch.randint(7, (rows,)),
    }


def test_a_gate_sees_its_columns_alone() -> None:
    gate, inputs = SoftmaxGate(2, E, D, inputs=TABLE, columns=["pay", "tags", "scenario"]), table()
    assert gate.weight.shape == (2, E, 2 + 4 + 3)
    seen = gate.columns_read(inputs, torch.float64)
    assert seen[:, 2:6].tolist()[:2] == [[0, 0.5, 0.5, 0], [0, pytest.approx(1 / 3), 0, pytest.approx(2 / 3)]]
    assert torch.equal(seen[:, 6:], torch.eye(3).double()[inputs["scenario"]])
    torch.testing.assert_close(seen[:, :2].float(), inputs["numeric columns"][:, 1:])
    weights = gate(torch.randn(8, D), inputs).weights
    assert torch.equal(weights, gate(torch.randn(8, D), inputs).weights)
    other = inputs | {
        "item": inputs["item"] * 0,
        "numeric columns": inputs["numeric columns"] * torch.tensor([0, 1, 1]),
    }
    assert torch.equal(weights, gate(torch.randn(8, D), other).weights)


LOOKING = [case for case in CASES if case.name in ("comet", "topk_bias", "cosine", "task_top1_shared")]


@pytest.mark.parametrize("case", LOOKING, ids=lambda case: case.name)
@pytest.mark.parametrize(
    "make", [partial(MMoE, num_experts=4), partial(PLE, num_experts=4, num_task_experts=1, num_levels=2)]
)
def test_every_network_routes_by_scenario(case: GateCase, make: Any) -> None:
    def gate(**sizes: Any) -> Gate:
        return case.make(**sizes, columns=["scenario"])

    network = make(spec=SPEC, gate=gate, permutation=Permutation, **PARTS)
    output = network(table())
    sum(value.sum() for value in output.predictions.values()).backward()
    assert all(p.grad is not None for name, p in network.named_parameters() if "gate" in name)
    for routing in network.eval()(table(12)).routings.values():
        assert torch.equal(routing.weights[:3], routing.weights[9:])  # the scenarios repeat, all else differs


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            CometGate,
            {"columns": ["scenaro"]},
            r"^columns=\[scenaro\]: .*; did you mean scenario\? It has scenario, tags, age",
        ),
        (
            SoftmaxGate,
            {"columns": ["x", "item"]},
            r"^columns=\[x, item\]: .* no x for a gate to see\. It",
        ),
        (SoftmaxGate, {"columns": ["item"], "input_dim": None}, "SoftmaxGate cannot take columns: it is static"),
        (HashGate, {"columns": ["item"]}, "HashGate cannot take columns: it reads"),
        (CosineGate, {"input_dim": None}, "the cosine gate compares examples with experts"),
        (ReMoEGate, {"input_dim": None}, "the ReMoE gate cannot be static"),
        (TopKGate, {"bias_rate": 0.1, "input_dim": None}, r"^bias_rate=0.1: needs a gate that depends on the example"),
        (ReMoEGate, {"k": 6}, "^k=6: cannot select 6 of 5 experts"),
        (ReMoEGate, {"l1_factor": 1.0}, "^l1_factor=1.0: must be greater than 1"),
        (TopKGate, {"load_weight": 0.1}, r"^load_weight\b"),
        (CometGate, {"gamma": float("nan")}, r"^gamma\b"),
        (FixedGate, {"weights": [[1, 0]]}, "tasks x experts"),
        (FixedGate, {"num_experts": 1, "weights": [[0.5], [1.0]]}, "sum to 1"),
        (HashGate, {"inputs": {"x": Numeric(2)}}, r"needs a categorical input; the inputs .* are: x \(Numeric\)"),
    ],
)
def test_refused_options(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(**{"num_tasks": 2, "num_experts": E, "input_dim": D, "inputs": TABLE, **options})
