"""A small network with a weighting, steps of it, and the gradients of its tasks one by one."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor, nn

from mtl.experts.dense import StackedDense
from mtl.gates import CometGate
from mtl.networks.bottom import TabularBottom
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.training.module import MultiTaskModule
from mtl.training.weighting import TaskLosses, shared_parameters
from mtl.training.weighting.base import sum_by_task
from mtl.types import Batch, Categorical, DataSpec, Numeric, TaskSpec
from tests.conftest import ROOT

TASKS = [
    TaskSpec("click", "binary"),
    TaskSpec("stars", "regression", weight=0.3),
    TaskSpec("kind", "multiclass", num_classes=3),
    TaskSpec("time", "regression"),
]
SPEC = DataSpec({"id": Categorical(7), "x": Numeric(5)}, TASKS)
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
    return sum_by_task(terms(own, data), len(TASKS))[0]


def terms(own: MultiTaskModule, data: Batch) -> list[TaskLosses]:
    """Return the terms of the loss of one batch."""
    return [own.task_losses(own(data.inputs), data)]


def jacobian(own: MultiTaskModule, data: Batch) -> tuple[Tensor, list[nn.Parameter]]:
    """Return the gradients of the weighted task losses at the shared parameters, one backward pass for each."""
    shared, _ = shared_parameters(own.network)
    rows = []
    for task in range(len(TASKS)):
        losses = task_losses(own, data)
        gradients = torch.autograd.grad(losses[task], shared, allow_unused=True)
        rows.append(joined(shared, gradients))
    return torch.stack(rows), shared


def joined(parameters: list[nn.Parameter], gradients: Any) -> Tensor:
    """Return the gradients at ``parameters`` as one vector, with 0 where there is none."""
    pairs = zip(parameters, gradients, strict=True)
    return torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in pairs])


def auxiliary(own: MultiTaskModule, data: Batch) -> Tensor:
    shared, _ = shared_parameters(own.network)
    return joined(shared, torch.autograd.grad(sum(own(data.inputs).losses.values()), shared, allow_unused=True))


def close(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")
