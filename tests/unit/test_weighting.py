"""Weightings: what they do to the gradients of a real step; every file trains, accumulates and resumes."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor, nn
from torchjd.aggregation import PCGrad, TrimmedMean, UPGrad
from torchjd.linalg import QuadprogProjector
from torchjd.scalarization import Sum

from mtl.checks import InputError
from mtl.config import build
from mtl.experts.dense import StackedDense
from mtl.gates import CometGate
from mtl.gates.permuted import Permutation
from mtl.networks.baselines import SharedBottom, SingleTask
from mtl.networks.bottom import TabularBottom
from mtl.networks.ensemble import Ensemble
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.training.module import MultiTaskModule
from mtl.training.weighting import GradientWeighting, LossWeighting, gradient, shared_parameters
from mtl.training.weighting.base import seeded_rng, sum_by_task
from mtl.types import Batch, DataSpec, Numeric
from tests.conftest import ROOT
from tests.integration.helpers import composed
from tests.weightings import (
    ROWS,
    SPEC,
    TASKS,
    auxiliary,
    backward,
    batch,
    close,
    jacobian,
    module,
    network,
    task_losses,
    terms,
)

EXACT = partial(UPGrad, projector=QuadprogProjector(norm_eps=0.0, reg_eps=1e-10))


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


def test_fixed_equals_the_sum_to_the_bit() -> None:
    own, data = module(), batch()
    output = own(data.inputs)
    found = own.training_step(data, 0)["loss"]
    terms = own.task_losses(output, data)
    expected = terms.local_losses.sum() + sum(output.losses.values())
    assert torch.equal(found, expected)
    assert not list(own.weighting.parameters())
    assert not any(name.startswith("weighting") for name in own.state_dict())


def test_the_gradients_of_a_sum_are_those_of_fixed() -> None:
    """Parameters of single tasks get the gradient of their task, and auxiliary losses count once."""
    expected = backward(module(), batch())
    close(backward(module(partial(GradientWeighting, aggregator=Total())), batch()), expected)
    close(backward(module(partial(LossWeighting, scalarizer=Sum())), batch()), expected)
    without = backward(module(partial(GradientWeighting, aggregator=Nothing())), batch())
    shared, _ = shared_parameters(own := network())
    names = {name for name, p in own.named_parameters() if any(p is other for other in shared)}
    close({k: v for k, v in without.items() if k not in names}, {k: v for k, v in expected.items() if k not in names})
    found = torch.cat([without[name].flatten() for name, _ in own.named_parameters() if name in names])
    torch.testing.assert_close(found, auxiliary(module(), batch()))


@pytest.mark.parametrize("missing_tasks", ["drop", "zero"])
def test_the_sum_of_an_averaging_method_has_all_gradients_of_the_tasks_there(missing_tasks: Any) -> None:
    own = GradientWeighting(network(), 2, Mean, rescale="num_tasks", missing_tasks=missing_tasks)
    jacobian = torch.tensor([[1.0, 0.0, 2.0], [0.0, 4.0, 0.0]])
    assert own.combine(jacobian, [3, 5], 0).tolist() == [1, 4, 2]
    assert own.combine(jacobian * torch.tensor([[1.0], [0.0]]), [3, 0], 0).tolist() == [1, 0, 2]


class Mean(nn.Module):
    def __init__(self, n_tasks: int) -> None:
        super().__init__()

    def forward(self, matrix: Tensor) -> Tensor:
        return matrix.mean(0)


class Total(nn.Module):
    def forward(self, matrix: Tensor) -> Tensor:
        return matrix.sum(0)


class Nothing(nn.Module):
    def forward(self, matrix: Tensor) -> Tensor:
        return torch.zeros_like(matrix[0])


def upgrad(rows: Tensor) -> Tensor:
    """Return four times the mean that TorchJD gives for the rows of the four tasks."""
    return 4 * EXACT()(rows)


def pcgrad(rows: Tensor, seed: int, step: int) -> Tensor:
    result = []
    with seeded_rng(seed, step, rows):
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
        (partial(GradientWeighting, aggregator=EXACT(), rescale="num_tasks"), upgrad),
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
    if reference is upgrad:  # it opposes no task
        assert (rows @ (found - auxiliary(own, data))).min() > -1e-8
    plain = backward(module(), data)
    close(*({n: g for n, g in each.items() if ".gate." in n or "heads" in n} for each in (gradients, plain)))


def at_representation(own: MultiTaskModule, data: Batch) -> Tensor:
    """Return the tasks' gradients at the outputs of the experts, ``[T, B * E * H]``, which are computed one by one."""
    output = own(data.inputs)
    losses = sum_by_task([own.task_losses(output, data)], len(TASKS))[0]
    [routing] = output.routings.values()
    rows = []
    for task in range(len(TASKS)):
        [gradient] = torch.autograd.grad(losses[task], output.representation, retain_graph=True)
        weights = routing.weights.expand(ROWS, -1, -1)[:, task]
        assert gradient[:, [other for other in range(len(TASKS)) if other != task]].abs().sum() == 0
        rows.append((weights[:, :, None] * gradient[:, task, None]).flatten())
    return torch.stack(rows)


AT_REPRESENTATION = [
    name
    for name in sorted(path.stem for path in (ROOT / "conf/weighting").glob("*.yaml"))
    if "grad_wrt: parameters" in (ROOT / f"conf/weighting/{name}.yaml").read_text()
]


def with_option(name: str, **options: Any) -> Any:
    config = OmegaConf.load(ROOT / f"conf/weighting/{name}.yaml")
    return instantiate(OmegaConf.merge(config, options), _convert_="all")


@pytest.mark.parametrize("name", AT_REPRESENTATION)
@pytest.mark.parametrize("static", [False, True])
def test_weights_at_the_representation_are_those_of_the_gradients_at_the_experts(name: str, static: bool) -> None:
    """Everything below the heads gets the tasks' gradients times these weights, and each head its own gradient."""
    own, data = module(with_option(name, grad_wrt="representation"), network(static_gate=static)), batch()
    expected = module(name, network(static_gate=static)).weighting
    expected.combine(at_representation(own, data), [12.0] * 4, 0)
    assert expected.current_weights is not None
    own.training_step(data, 0)["loss"].backward()
    found = {n: p.grad.clone() for n, p in own.network.named_parameters() if p.grad is not None}
    torch.testing.assert_close(own.weighting.current_weights, expected.current_weights, rtol=1e-5, atol=1e-7)
    plain = module(None, network(static_gate=static))
    output = plain(data.inputs)
    losses = sum_by_task([plain.task_losses(output, data)], len(TASKS))[0]
    ((own.weighting.current_weights * losses).sum() + sum(output.losses.values())).backward()
    weighted = {n: p.grad.clone() for n, p in plain.network.named_parameters() if p.grad is not None}
    below, above = ({n for n in found if ("heads" in n) == there} for there in (False, True))
    close({n: found[n] for n in below}, {n: weighted[n] for n in below})
    unweighted = backward(module(None, network(static_gate=static)), data)
    close({n: found[n] for n in above}, {n: unweighted[n] for n in above})


@pytest.mark.parametrize("name", ["mgda", "upgrad", "cagrad", "pcgrad", "aligned_mtl"])
def test_at_the_representation_equals_at_parameters_of_a_linear_shared_part(name: str) -> None:
    """With orthonormal rows, the gradients of a linear layer have the inner products of those at its outputs."""

    class Linear(nn.Linear):
        output_dim = 6

        def __init__(self, num_experts: int, input_dim: int) -> None:
            super().__init__(input_dim, 6, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, None]

    spec = DataSpec({"x": Numeric(ROWS)}, TASKS)
    rows = Batch({"x": torch.linalg.qr(torch.randn(ROWS, ROWS).double())[0]}, batch().targets)
    found = []
    for at in ("parameters", "representation"):
        torch.manual_seed(0)
        net = SharedBottom(spec, TabularBottom, Linear, partial(Heads, units=[4])).double()
        found.append(backward(module(with_option(name, grad_wrt=at), net), rows))
    plain = backward(module(None, net), rows)
    for one, other in zip(*(each.values() for each in found), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)
    assert (found[0]["trunk.weight"] - plain["trunk.weight"]).norm() > 0.01 * plain["trunk.weight"].norm()


def test_inner_products_of_chunks_of_rows_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = terms(module(), batch())
    gradients = [torch.randn(ROWS, len(TASKS), 6, generator=torch.Generator().manual_seed(0)).double()]
    whole = gradient.inner_products(parts, gradients, len(TASKS))
    monkeypatch.setattr(gradient, "MAX_PRODUCTS", 5 * len(TASKS) ** 2)
    torch.testing.assert_close(gradient.inner_products(parts, gradients, len(TASKS)), whole, rtol=1e-12, atol=0)


def test_what_has_no_representation_is_one_message() -> None:
    with pytest.raises(InputError, match="TrimmedMean does not weight the tasks; use grad_wrt=parameters"):
        GradientWeighting(network(), 4, TrimmedMean(1), grad_wrt="representation")
    ensemble = Ensemble([network(), network()])
    with pytest.raises(InputError, match="and no ensemble; use grad_wrt=parameters"):
        backward(module(with_option("mgda", grad_wrt="representation"), ensemble), batch())


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
    groups = decayed.configure_optimizers().param_groups
    [group] = [g for g in groups if any(p is own.weighting.scalarizer.log_var for p in g["params"])]
    assert group["weight_decay"] == 0


def test_dwa_weights_follow_the_losses_of_two_epochs() -> None:
    own = module("dwa")
    means = []
    for epoch in range(2):
        means.append(torch.stack([task_losses(own, batch(seed=s)).detach() for s in (0, 1)]).mean(0))
        for seed in (0, 1):
            backward(own, batch(seed=seed))
        assert torch.equal(own.weighting.current_weights, torch.ones(4).double())
        own.weighting.end_epoch()
        with torch.no_grad():
            [p.mul_(0.5 + epoch) for p in own.network.heads.parameters()]
    backward(own, batch())
    torch.testing.assert_close(own.weighting.current_weights, 4 * (means[1] / means[0] / 2).softmax(0))


def test_famo_follows_the_paper() -> None:
    """Three steps of algorithm 1 with Adam, in numpy; a task without labels changes nothing."""
    own = module("famo")
    optimizer = own.configure_optimizers()
    logits, first, second = np.zeros(4), np.zeros(4), np.zeros(4)
    for step in range(3):
        data = batch(seed=step, without="kind" if step == 1 else "")
        there = np.array([True, True, step != 1, True])
        before = task_losses(own, data).detach().numpy()
        z = np.exp(logits) / np.exp(logits).sum()
        weights = np.where(there, z / np.where(there, before, 1), 0)
        backward(own, data, step=step)
        np.testing.assert_allclose(own.weighting.current_weights, weights / weights.sum(), rtol=1e-6)
        optimizer.step()
        with torch.no_grad():
            own.weighting.after_step(terms(own, data))
            after = task_losses(own, data).numpy()
        fall = np.where(there, np.log(np.where(there, before, 1)) - np.log(np.where(there, after, 1)), 0)
        gradient = (np.diag(z) - np.outer(z, z)) @ fall + 1e-3 * logits
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        mean, square = first / (1 - 0.9 ** (step + 1)), second / (1 - 0.999 ** (step + 1))
        logits = logits - 0.025 * mean / (np.sqrt(square) + 1e-8)
        np.testing.assert_allclose(own.weighting.logits, logits, rtol=1e-4, atol=1e-7)


def test_uw_so_follows_the_paper() -> None:
    own = module("uw_so")
    losses = task_losses(own, batch()).detach().numpy()
    backward(own, batch())
    shares = np.exp(1 / losses / 20)
    np.testing.assert_allclose(own.weighting.current_weights, shares / shares.sum(), rtol=1e-9)


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
    assert own.weighting.current_weights.sum() == pytest.approx(4)


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


def test_scaled_losses_are_for_methods_on_losses() -> None:
    for precision in ("16-mixed", "16"):
        with pytest.raises(InputError, match=rf"trainer.precision={precision}: it scales .* use .*bf16-mixed"):
            build.check_options(composed(["weighting=upgrad", f"trainer.precision={precision}"]))
    build.check_options(composed(["weighting=upgrad", "trainer.precision=bf16-mixed"]))
    build.check_options(composed(["weighting=uncertainty", "trainer.precision=16-mixed"]))


def test_gradients_at_the_representation_go_with_sparse_tables_and_scaled_losses_but_not_with_compiled_code() -> None:
    words = ["weighting=upgrad", "weighting.grad_wrt=representation"]
    for other in (["embedding_optimizer=rowwise_adagrad", "data=movielens"], ["trainer.precision=16-mixed"]):
        build.check_options(composed([*words, *other]))
    with pytest.raises(InputError, match=r"compile=true with weighting.grad_wrt=representation: .* use compile=false"):
        build.check_options(composed([*words, "compile=true", "network.execution=dense"]))
    with pytest.raises(
        InputError, match=r"each task of this data has rows of its own.* use weighting.grad_wrt=parameters"
    ):
        build.check_options(composed([*words, "data=omniglot", "gate=fixed", "data.tasks_per_step=2"]))


def test_a_gradient_that_is_not_finite_stops_the_run() -> None:
    own = module("upgrad")
    data = batch()
    data.targets["time"][:] = float("inf")
    with pytest.raises(InputError, match="step 0: the gradient of a task is NaN or infinite"):
        backward(own, data)


NOT_LINEAR = ("stch", "geometric_mean", "uw_so", "famo")  # in the losses: each batch is weighted by its own
FILES = sorted(path.stem for path in (ROOT / "conf/weighting").glob("*.yaml"))


@pytest.mark.parametrize("name", [name for name in FILES if name not in NOT_LINEAR])
def test_accumulated_batches_equal_the_whole(name: str) -> None:
    whole, halves = batch(), [batch(), batch()]
    for index, half in enumerate(halves):
        rows = slice(index * ROWS // 2, (index + 1) * ROWS // 2)
        half.inputs = {key: value[rows] for key, value in half.inputs.items()}
        half.targets = {key: value[rows] for key, value in half.targets.items()}
    close(backward(module(name), *halves, step=2), backward(module(name), whole, step=2))


def test_loss_reduction_labels_weights_all_labels_alike() -> None:
    """Also those of a task without any label in the batch, which changes neither the others nor the mean."""
    own, data = module(), batch(without="kind")
    sums = own._loss_sums(own(data.inputs).predictions, data.targets)
    means = task_losses(own, data)
    own.loss_reduction = "labels"
    weights = torch.tensor([task.weight for task in TASKS], dtype=torch.float64)
    totals = dict(zip(sums[0], sums[1], strict=True))
    expected = weights * torch.stack([totals[task.name] for task in TASKS]) / ((24 + 12 + 24) / 3)
    torch.testing.assert_close(task_losses(own, data), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(means, expected * 20 / torch.tensor([24, 12, 20, 24]), rtol=1e-12, atol=0)


def train(own: MultiTaskModule, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        backward(own, batch(seed=step % 4, without="kind" if step % 4 == 2 else ""), step=step)
        assert all(bool(torch.isfinite(p.grad).all()) for p in own.parameters() if p.grad is not None)
        optimizer.step()
        if own.weighting.needs_losses_after_step:
            own.weighting.after_step(terms(own, batch(seed=step % 4, without="kind" if step % 4 == 2 else "")))
        if step % 4 == 3:
            own.weighting.end_epoch()


@pytest.mark.parametrize("name", [*FILES, *(f"{name} at the representation" for name in AT_REPRESENTATION)])
def test_losses_fall_and_a_resumed_run_goes_on_to_the_bit(name: str) -> None:
    """Also without the labels of a task in some steps."""
    name, _, at = name.partition(" at the ")
    whole, part, resumed = (module(with_option(name, grad_wrt=at) if at else name) for _ in range(3))
    optimizers = [own.configure_optimizers() for own in (whole, part, resumed)]
    train(whole, optimizers[0], range(8))
    train(part, optimizers[1], range(5))
    file = io.BytesIO()
    torch.save([part.state_dict(), optimizers[1].state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed.load_state_dict(saved[0])
    optimizers[2].load_state_dict(saved[1])
    torch.manual_seed(99)
    train(resumed, optimizers[2], range(5, 8))
    expected = whole.state_dict()
    for key, value in resumed.state_dict().items():
        assert torch.equal(value, expected[key]) if isinstance(value, Tensor) else True, key
    assert task_losses(whole, batch()).sum() < task_losses(module(), batch()).sum()
    if whole.weighting.current_weights is not None:
        assert whole.weighting.current_weights.shape == (len(TASKS),)
