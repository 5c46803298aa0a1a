"""The plain path under torch's transforms: second derivatives, torch.func, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from mtl.experts.base import Experts
from mtl.experts.conv import StackedConv
from mtl.experts.dense import StackedDense
from mtl.gates import CometGate, DSelectKGate, Gate, SoftmaxGate, SoftmaxSelectorGate, TaskTop1Gate, TopKGate
from mtl.networks.bottom import TabularBottom
from mtl.networks.heads import Heads
from mtl.networks.mixture import MixtureOfExperts
from mtl.networks.mmoe import MMoE
from mtl.training.losses import task_loss_sums
from mtl.types import Categorical, DataSpec, Numeric, TaskSpec
from tests.experts import GatedExperts

SMOOTH_GATES = {"comet": partial(CometGate, entropy_weight=0.1), "dselect_k": partial(DSelectKGate, entropy_weight=0.1)}
smooth_gates = pytest.mark.parametrize("gate", SMOOTH_GATES.values(), ids=list(SMOOTH_GATES))


def inside(*size: int) -> Tensor:
    """Return logits at which the smooth step of width 1 is neither at a kink nor near one: within +-0.4."""
    return (0.8 * torch.rand(*size, dtype=torch.float64) - 0.4).requires_grad_()


# Second derivatives


def dense_experts() -> StackedDense:
    """Return experts none of whose units is at relu's kink, as those are with a bias of 0 if all before them are 0."""
    experts = StackedDense(3, 4, [5, 2]).double()
    with torch.no_grad():
        for layer in experts.layers:
            layer.bias.normal_()
    return experts


@pytest.mark.parametrize("execution", ["dense", "sparse"])
@pytest.mark.parametrize("experts", [dense_experts, lambda: GatedExperts(3, 4, 2).double()], ids=["dense", "gated"])
@smooth_gates
def test_second_derivative_of_a_mixture(
    gate: Callable[..., Gate], experts: Callable[[], Experts], execution: str
) -> None:
    """The gradient of the gradient's length, against differences."""
    mixture = MixtureOfExperts(4, 2, 3, gate, experts(), execution=execution).double()
    x, step = inside(5, 4), 1e-6
    direction = torch.randn_like(x)

    def length(x: Tensor, graph: bool) -> Tensor:
        [first] = torch.autograd.grad(mixture(x)[0].sum(), x, create_graph=graph)
        return first.square().sum()

    ends = [length((x + sign * step * direction).detach().requires_grad_(), graph=False) for sign in (1, -1)]
    [second] = torch.autograd.grad(length(x, graph=True), x)
    assert torch.allclose((second * direction).sum(), (ends[0] - ends[1]) / (2 * step), rtol=1e-5)


# torch.func

TASKS = [TaskSpec("a", "binary"), TaskSpec("b", "regression"), TaskSpec("c", "multiclass", num_classes=3)]
FEATURES = DataSpec({"x": Numeric(4)}, TASKS)
TARGETS = {
    "a": torch.tensor([1.0, 0.0, float("nan"), 1.0]).double(),
    "b": torch.tensor([0.3, -1.0, 2.0, float("nan")]).double(),
    "c": torch.tensor([0, 2, 1, 1]),
}


def features_network(gate: Callable[..., Gate]) -> MMoE:
    experts, heads = partial(StackedDense, units=[6, 5]), partial(Heads, units=[3])
    return MMoE(FEATURES, 4, partial(TabularBottom, embedding_dim=1), experts, gate, heads, execution="dense").double()


def task_losses(network: MMoE, x: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """Return the summed loss of each task, ``[T]``, from features ``x [B, D]``."""
    predictions = network({"x": x}).predictions
    _, losses, _ = task_loss_sums({task.name: task for task in TASKS}, predictions, targets)
    return losses


@smooth_gates
def test_jacobian_of_task_losses_by_the_features(gate: Callable[..., Gate]) -> None:
    network, x = features_network(gate), inside(4, 4).detach()
    losses = partial(task_losses, network, targets=TARGETS)
    jacobian = torch.func.jacrev(losses)(x)  # [T, B, D]
    step, expected = 1e-6, torch.empty_like(jacobian)
    for row in range(len(x)):
        for column in range(x.shape[1]):
            moved = torch.zeros_like(x)
            moved[row, column] = step
            expected[:, row, column] = ((losses(x + moved) - losses(x - moved)) / (2 * step)).detach()
    torch.testing.assert_close(jacobian, expected, rtol=1e-6, atol=1e-7)

    def of_row(row: Tensor, targets: dict[str, Tensor]) -> Tensor:
        return task_losses(network, row[None], {name: value[None] for name, value in targets.items()})

    by_row = torch.func.vmap(torch.func.jacrev(of_row))(x, TARGETS)  # [B, T, D]
    torch.testing.assert_close(by_row.transpose(0, 1), jacobian)


# torch.compile

GATES = [SoftmaxGate, TopKGate, SoftmaxSelectorGate, TaskTop1Gate, DSelectKGate, CometGate]
IDS = DataSpec({"user": Categorical(20), "item": Categorical(30)}, TASKS[:2])
QUICK = (TopKGate, CometGate)
MARKED = [pytest.param(gate, id=gate.__name__, marks=[] if gate in QUICK else pytest.mark.slow) for gate in GATES]
in_the_compiler = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def check_compiled(make: Callable[[], nn.Module], call: Callable[[nn.Module], list[Tensor]]) -> None:
    """Compare a module with its compiled twin: results and gradients; a graph break is an error."""
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = make()
        if compiled:
            names = module.state_dict().keys()
            module.compile(backend="aot_eager", fullgraph=True)
            assert module.state_dict().keys() == names
        torch.manual_seed(1)
        values = call(module)
        torch.stack([value.cos().sum() for value in values]).sum().backward()
        results.append([*values, *(parameter.grad for parameter in module.parameters())])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@in_the_compiler
def test_compiled_convolutional_experts() -> None:
    x = torch.rand(5, 1, 12, 12)
    layers = [{"channels": 3, "kernel": 3, "pool": 2}]
    check_compiled(lambda: StackedConv(3, (1, 12, 12), layers, [4], dropout=0.5), lambda module: [module(x)])


@in_the_compiler
@pytest.mark.parametrize("gate", MARKED)
def test_compiled_network(gate: type[Gate]) -> None:
    def make() -> MMoE:
        experts, heads = partial(StackedDense, units=[6, 5], dropout=0.5), partial(Heads, units=[3], dropout=0.5)
        return MMoE(IDS, 4, partial(TabularBottom, embedding_dim=4), experts, gate, heads, execution="dense")

    def call(module: nn.Module) -> list[Tensor]:
        output = module({"user": torch.arange(20), "item": torch.arange(20)})
        return [*output.predictions.values(), *output.losses.values()]

    check_compiled(make, call)
