"""Weightings: what they do to the gradients of a real step, and what they keep between steps."""

from __future__ import annotations

import io
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor, nn
from torchjd.aggregation import PCGrad, TrimmedMean, UPGrad
from torchjd.linalg import QuadprogProjector

from mtl.checks import InputError
from mtl.experts.dense import StackedDense
from mtl.gates import CometGate, Gate
from mtl.gates.permuted import Permutation
from mtl.gates.separate import separate_gates
from mtl.networks.baselines import SharedBottom, SingleTask
from mtl.networks.bottom import TabularBottom
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.run import build
from mtl.training.module import MultiTaskModule
from mtl.training.weighting import GradientWeighting, JacobianWeighting, shared_parameters
from mtl.training.weighting.base import by_task
from mtl.training.weighting.drawn import drawn_at
from mtl.types import Batch, Categorical, DataSpec, Numeric, TaskSpec
from tests.conftest import ROOT
from tests.integration.helpers import composed

FILES = sorted(path.stem for path in (ROOT / "conf/weighting").glob("*.yaml"))
TASKS = [
    TaskSpec("click", "binary"),
    TaskSpec("stars", "regression", weight=0.3),
    TaskSpec("kind", "multiclass", num_classes=3),
    TaskSpec("time", "regression"),
]
SPEC = DataSpec({"id": Categorical(7), "x": Numeric(5)}, TASKS)
EXACT = partial(UPGrad, projector=QuadprogProjector(norm_eps=0.0, reg_eps=1e-10))
ROWS = 24


def batch(rows: int = ROWS, seed: int = 0, without: str = "") -> Batch:
    """Return random rows in which half of the labels of ``stars`` and all of the task ``without`` are missing."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 5, generator=draw).double()
    targets = {
        "click": (x[:, 0] + x[:, 1] > 0).double(),
        "stars": torch.where(torch.arange(rows) % 2 == 0, x[:, 0] - x[:, 2], torch.nan),
        "kind": torch.randint(3, (rows,), generator=draw),
        "time": 3 * x[:, 3].square() - x[:, 0],
    }
    if without:
        targets[without] = torch.full_like(targets[without], -100 if without == "kind" else torch.nan)
    return Batch({"id": torch.randint(7, (rows,), generator=draw), "x": x}, targets)


def network(**options: Any) -> nn.Module:
    torch.manual_seed(1)
    bottom, experts = partial(TabularBottom, embedding_dim=3), partial(StackedDense, units=[6])
    gate = partial(CometGate, k=2, entropy_weight=0.1)
    return MMoE(SPEC, 4, bottom, experts, gate, partial(Heads, units=[4]), **options).double()


def module(weighting: Any = None, net: nn.Module | None = None, seed: int = 3) -> MultiTaskModule:
    """Return a module with a weighting: the name of a file, or what makes one."""
    net = net or network()
    if isinstance(weighting, str):
        weighting = instantiate(OmegaConf.load(ROOT / "conf/weighting" / f"{weighting}.yaml"), _convert_="all")
    made = weighting and weighting(network=net, num_tasks=len(TASKS), seed=seed)
    result = MultiTaskModule(net, TASKS, partial(torch.optim.Adam, lr=1e-2), {}, None, made).double()
    result.log = lambda *args, **options: None  # type: ignore[method-assign]  # there is no trainer
    return result.train()


def backward(own: MultiTaskModule, *batches: Any, step: int = 0) -> dict[str, Tensor]:
    """Differentiate a step on the ``batches``, as a trainer that accumulates does; return the gradients."""
    own.zero_grad()
    for each in batches:
        (own.training_step(each, 0)["loss"] / len(batches)).backward()
    own.weighting.before_step(step)
    return {name: p.grad.clone() for name, p in own.network.named_parameters() if p.grad is not None}


def task_losses(own: MultiTaskModule, data: Batch) -> Tensor:
    """Return the weighted losses of the tasks, in the order of ``TASKS``."""
    terms, _ = own._task_losses(own(data.inputs), data)
    return by_task([terms], len(TASKS))[0]


def jacobian(own: MultiTaskModule, data: Batch) -> tuple[Tensor, list[nn.Parameter]]:
    """Return the gradients of the weighted task losses at the shared parameters, one backward pass for each."""
    shared, _ = shared_parameters(own.network)
    rows = []
    for task in range(len(TASKS)):
        losses = task_losses(own, data)
        gradients = torch.autograd.grad(losses[task], shared, allow_unused=True)
        rows.append(
            torch.cat(
                [
                    torch.zeros_like(p).flatten() if g is None else g.flatten()
                    for p, g in zip(shared, gradients, strict=True)
                ]
            )
        )
    return torch.stack(rows), shared


def auxiliary(own: MultiTaskModule, data: Batch) -> Tensor:
    shared, _ = shared_parameters(own.network)
    gradients = torch.autograd.grad(sum(own(data.inputs).losses.values()), shared, allow_unused=True)
    return torch.cat(
        [torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in zip(shared, gradients, strict=True)]
    )


def close(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


def test_shared_parameters_of_networks() -> None:
    def names(net: nn.Module) -> set[str]:
        shared, own = shared_parameters(net)
        assert {id(p) for p in [*shared, *own]} == {id(p) for p in net.parameters()}
        return {name for name, p in net.named_parameters() if any(p is other for other in shared)}

    bottom, experts, heads = partial(TabularBottom, embedding_dim=3), partial(StackedDense, units=[6]), Heads
    common = {"bottom.embeddings.0.weight", "mixture.experts.layers.0.weight", "mixture.experts.layers.0.bias"}
    assert names(network()) == common
    everyone = MMoE(SPEC, 4, bottom, experts, partial(CometGate, shared=True), heads)
    gates = {f"mixture.gate.{part}_{kind}" for part in ("split", "leaf") for kind in ("weight", "bias")}
    assert names(everyone) == common | gates
    assert names(network(permutation=Permutation)) == common | {"mixture.gate.permutation.logits"}
    assert names(network(permutation=partial(Permutation, per_task=True))) == common
    trunk = {"trunk.layers.0.weight", "trunk.layers.0.bias", "bottom.embeddings.0.weight"}
    assert names(SharedBottom(SPEC, bottom, experts, heads)) == trunk
    assert names(SingleTask(SPEC, bottom, experts, heads)) == set()
    separate: Gate = separate_gates(CometGate, ["a", "b"], 4, 5)
    assert names(separate) == set()


def test_fixed_equals_the_sum_to_the_bit() -> None:
    own, data = module(), batch()
    output = own(data.inputs)
    found = own.training_step(data, 0)["loss"]
    terms, _ = own._task_losses(output, data)
    expected = terms.losses.sum() + sum(output.losses.values())
    assert torch.equal(found, expected)
    assert not list(own.weighting.parameters())
    assert not any(name.startswith("weighting") for name in own.state_dict())


def test_the_gradients_of_a_sum_are_those_of_fixed() -> None:
    """Parameters of single tasks get the gradient of their task, and auxiliary losses count once."""
    expected = backward(module(), batch())
    close(backward(module(partial(GradientWeighting, aggregator=Total())), batch()), expected)
    close(backward(module("sum"), batch()), expected)
    without = backward(module(partial(GradientWeighting, aggregator=Nothing())), batch())
    shared, _ = shared_parameters(own := network())
    names = {name for name, p in own.named_parameters() if any(p is other for other in shared)}
    close({k: v for k, v in without.items() if k not in names}, {k: v for k, v in expected.items() if k not in names})
    found = torch.cat([without[name].flatten() for name in sorted(names)])
    pieces = dict(
        zip(
            (n for n, p in own.named_parameters() if n in names),
            split(auxiliary(module(), batch()), shared),
            strict=True,
        )
    )
    torch.testing.assert_close(found, torch.cat([pieces[name] for name in sorted(names)]))


def split(vector: Tensor, parameters: list[nn.Parameter]) -> tuple[Tensor, ...]:
    return vector.split([p.numel() for p in parameters])


class Total(nn.Module):
    def forward(self, matrix: Tensor) -> Tensor:
        return matrix.sum(0)


class Nothing(nn.Module):
    def forward(self, matrix: Tensor) -> Tensor:
        return torch.zeros_like(matrix[0])


def upgrad(rows: Tensor) -> Tensor:
    """Project each row onto the cone of vectors that oppose no row, by trying all sets of active constraints; add."""
    gram, count = rows @ rows.T, len(rows)
    total = torch.zeros_like(rows[0])
    for task in range(count):
        start = torch.zeros(count, dtype=rows.dtype)
        start[task] = 1.0
        best = (float("inf"), start)
        for size in range(count + 1):
            for free in map(list, itertools.combinations(range(count), size)):  # weights above their bound
                w = start.clone()
                if free:
                    bound = [index for index in range(count) if index not in free]
                    w[free] = torch.linalg.solve(gram[free][:, free], -gram[free][:, bound] @ start[bound])
                value = float(w @ gram @ w)
                if bool((w >= start - 1e-12).all()) and value < best[0]:
                    best = (value, w)
        total += best[1] @ rows
    return total


def pcgrad(rows: Tensor, seed: int, step: int) -> Tensor:
    result = []
    with drawn_at(seed, step, rows):
        for task, row in enumerate(rows):
            changed = row.clone()
            for other in torch.randperm(len(rows)).tolist():
                if other != task and changed @ rows[other] < 0:
                    changed -= (changed @ rows[other]) / (rows[other] @ rows[other]) * rows[other]
            result.append(changed)
    return torch.stack(result).sum(0)


@pytest.mark.parametrize(
    ("weighting", "reference"),
    [
        (partial(GradientWeighting, aggregator=EXACT(), scale="sum"), upgrad),
        (partial(GradientWeighting, aggregator=PCGrad()), partial(pcgrad, seed=3, step=5)),
    ],
    ids=["upgrad", "pcgrad"],
)
def test_gradients_equal_a_reference(weighting: Any, reference: Any) -> None:
    own, data = module(weighting), batch()
    rows, shared = jacobian(own, data)
    conflicts = (rows @ rows.T < 0).sum()
    assert conflicts >= 2
    gradients = backward(own, data, step=5)
    found = torch.cat([p.grad.flatten() for p in shared])
    torch.testing.assert_close(found, reference(rows) + auxiliary(own, data), rtol=1e-6, atol=1e-9)
    assert (found - rows.sum(0)).norm() > 0.01 * found.norm()
    plain = backward(module(), data)
    close(*({n: g for n, g in each.items() if ".gate." in n or "heads" in n} for each in (gradients, plain)))


def test_upgrad_opposes_no_task() -> None:
    own, data = module(partial(GradientWeighting, aggregator=EXACT())), batch()
    rows, shared = jacobian(own, data)
    backward(own, data)
    found = torch.cat([p.grad.flatten() for p in shared]) - auxiliary(own, data)
    assert (rows @ rows.sum(0)).min() < 0 < (rows @ found).max()
    assert (rows @ found).min() > -1e-8


@pytest.mark.parametrize("name", FILES)
def test_training_with_every_file(name: str) -> None:
    """Losses fall, stay finite without the labels of a task, and another seed of the weighting matters if any."""
    own = module(name)
    optimizer = own.configure_optimizers()
    for step in range(12):
        backward(own, batch(seed=step % 4, without="kind" if step % 4 == 2 else ""), step=step)
        assert all(bool(torch.isfinite(p.grad).all()) for p in own.parameters() if p.grad is not None)
        optimizer.step()
        if step % 4 == 3:
            own.weighting.end_epoch()
    losses = [task_losses(each, batch()) for each in (own, module())]
    assert bool(torch.isfinite(losses[0]).all())
    assert losses[0].sum() < losses[1].sum()
    if own.weighting.in_force is not None:
        assert own.weighting.in_force.shape == (len(TASKS),)


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("stch", "geometric_mean")])
def test_accumulated_batches_equal_the_whole(name: str) -> None:
    whole, halves = batch(), [batch(), batch()]
    for index, half in enumerate(halves):
        rows = slice(index * ROWS // 2, (index + 1) * ROWS // 2)
        half.inputs = {key: value[rows] for key, value in half.inputs.items()}
        half.targets = {key: value[rows] for key, value in half.targets.items()}
    close(backward(module(name), *halves, step=2), backward(module(name), whole, step=2))


@pytest.mark.parametrize("name", FILES)
def test_a_resumed_run_goes_on_to_the_bit(name: str) -> None:
    def train(own: MultiTaskModule, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            backward(own, batch(seed=step), step=step)
            optimizer.step()
            if step % 2:
                own.weighting.end_epoch()

    whole, part = module(name), module(name)
    optimizers = [own.configure_optimizers() for own in (whole, part)]
    train(whole, optimizers[0], range(9))
    train(part, optimizers[1], range(6))
    file = io.BytesIO()
    torch.save([part.state_dict(), optimizers[1].state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = module(name)
    optimizer = resumed.configure_optimizers()
    resumed.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    torch.manual_seed(99)
    train(resumed, optimizer, range(6, 9))
    expected = whole.state_dict()
    for key, value in resumed.state_dict().items():
        assert torch.equal(value, expected[key]) if isinstance(value, Tensor) else True, key
    train(whole, optimizers[0], range(9, 11))
    train(resumed, optimizer, range(9, 11))
    for left, right in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(left, right)


def test_methods_differ_from_each_other() -> None:
    """Only those agree that mean the same: a sum, and what starts with equal weights."""
    equal = {"fixed", "sum", "dwa", "imtl_l", "gradnorm"}
    found = {name: torch.cat([g.flatten() for g in backward(module(name), batch()).values()]) for name in FILES}
    for left, right in itertools.combinations(FILES, 2):
        same = bool(torch.allclose(found[left], found[right], rtol=1e-6, atol=1e-9))
        assert same == ({left, right} <= equal or {left, right} == {"upgrad", "cr_mogm"}), (left, right)


def test_batches_of_single_tasks_are_one_step_together() -> None:
    data = batch()
    parts = [Batch(data.inputs, {name: target}) for name, target in data.targets.items()]
    expected, _ = jacobian(own := module("upgrad", network(static_gate=True)), data)
    own.training_step(parts, 0)["loss"].backward()
    assert own.weighting._jacobian is not None
    torch.testing.assert_close(own.weighting._jacobian, expected)


def test_uncertainty_trains_its_variances() -> None:
    own = module("uncertainty")
    groups = own.configure_optimizers().param_groups
    assert any(p is own.weighting.scalarizer.log_var for group in groups for p in group["params"])
    backward(own, batch(without="time"))
    gradient = own.weighting.scalarizer.log_var.grad
    losses = task_losses(own, batch(without="time"))
    torch.testing.assert_close(gradient[:3], (0.5 - 0.5 * losses[:3]).detach())
    assert gradient[3] == 0
    decayed = MultiTaskModule(own.network, TASKS, partial(torch.optim.AdamW, weight_decay=0.1), {}, None, own.weighting)
    [group] = [
        g
        for g in decayed.configure_optimizers().param_groups
        if any(p is own.weighting.scalarizer.log_var for p in g["params"])
    ]
    assert group["weight_decay"] == 0


def test_dwa_weights_follow_the_losses_of_two_epochs() -> None:
    own = module("dwa")
    means = []
    for epoch in range(2):
        means.append(torch.stack([task_losses(own, batch(seed=s)).detach() for s in (0, 1)]).mean(0))
        for seed in (0, 1):
            backward(own, batch(seed=seed))
        assert torch.equal(own.weighting.in_force, torch.ones(4).double())
        own.weighting.end_epoch()
        with torch.no_grad():
            [p.mul_(0.5 + epoch) for p in own.network.heads.parameters()]
    backward(own, batch())
    torch.testing.assert_close(own.weighting.in_force, 4 * (means[1] / means[0] / 2).softmax(0))


def test_gradnorm_moves_towards_equal_rates() -> None:
    """The weights' gradient is that of the paper's loss, computed here by autograd through the norms."""
    own, data = module("gradnorm"), batch()
    backward(own, data)
    own.weighting.first.mul_(torch.tensor([1.0, 2.0, 0.5, 3.0]))  # as if the first losses had been these
    backward(own, data)
    rows, _ = jacobian(own, data)
    losses = task_losses(own, data).detach()
    logits = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    norms = 4 * logits.softmax(0) * rows.norm(dim=1)
    rates = losses / own.weighting.first
    target = (norms.mean() * (rates / rates.mean()) ** 1.5).detach()
    (norms - target).abs().sum().backward()
    torch.testing.assert_close(own.weighting.logits.grad, logits.grad)
    assert own.weighting.in_force.sum() == pytest.approx(4)


def test_what_cannot_be_combined_is_one_message() -> None:
    single = SingleTask(SPEC, TabularBottom, partial(StackedDense, units=[6]), Heads)
    with pytest.raises(InputError, match="SingleTask has none; use weighting=fixed"):
        module("upgrad", single)
    with pytest.raises(InputError, match="only one task"):
        GradientWeighting(network(), 1, PCGrad())
    with pytest.raises(InputError, match=r"TrimmedMean, 4 tasks.*at least 5 rows"):
        GradientWeighting(network(), 4, TrimmedMean(2))
    words = ["data=four_mnists", "network=routed_mnists", "gate=gumbel_matrix", "weighting=pcgrad"]
    with pytest.raises(InputError, match=r"a step of this data has the labels of one task; set data.tasks_per_step"):
        build.check_options(composed(words))
    build.check_options(composed([*words, "data.tasks_per_step=2"]))
    build.check_options(composed([*words, "trainer.accumulate_grad_batches=4"]))
    build.check_options(composed([*words[:-1], "weighting=uncertainty"]))
    with pytest.raises(InputError, match=r"weighting: .*temperature.*strictly positive"):
        build.check_options(composed(["weighting=dwa", "weighting.scalarizer.temperature=-1"]))


def test_a_gradient_that_is_not_finite_stops_the_run() -> None:
    own = module("upgrad")
    data = batch()
    data.targets["time"][:] = float("inf")
    with pytest.raises(InputError, match="step 0: the gradient of a task is NaN or infinite"):
        backward(own, data)


def test_every_gradient_method_is_one() -> None:
    assert isinstance(module("upgrad").weighting, JacobianWeighting)
    assert module("upgrad").weighting.needs_shared
