"""Compare PCGrad, MGDA and CAGrad with LibMTL 1.1.5: losses over 200 steps from the same weights on the same batches.

LibMTL stays outside of the project's environment: pip install --no-deps --target FOLDER LibMTL==1.1.5, then
PYTHONPATH=FOLDER python benchmarks/against_libmtl.py [--steps 200]. Its methods differentiate the same MMoE. By design
LibMTL's MGDA keeps weights of two tasks within 0.001 and 0.999, its CAGrad works for three tasks only, and the orders
in which PCGrad projects are random in both, which matters from three tasks on: they are set to be equal here.
"""

from __future__ import annotations

import importlib
import random
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

from common import options, write

# isort: split
import torch
from torch import Tensor, nn
from torchjd.aggregation import MGDA, CAGrad, PCGrad

from mtl.experts.dense import StackedDense
from mtl.gates import SoftmaxGate
from mtl.networks.bottom import TabularBottom
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.training.module import MultiTaskModule
from mtl.training.weighting import GradientWeighting, shared_parameters
from mtl.types import Batch, Categorical, DataSpec, Numeric, TaskSpec

ROWS, FEATURES, IDS = 256, 16, 50
CASES: list[tuple[str, int, Any, dict[str, Any]]] = [
    ("PCGrad", 2, PCGrad, {}),
    ("PCGrad", 3, PCGrad, {}),
    ("MGDA", 2, MGDA, {"mgda_gn": "none"}),
    ("MGDA", 3, partial(MGDA, epsilon=1e-6, max_iters=1000), {"mgda_gn": "none"}),
    ("CAGrad", 3, partial(CAGrad, c=0.5), {"calpha": 0.5, "rescale": 0}),
]


def libmtl() -> Any:
    """Import LibMTL's weightings; its ResNet, which nothing here calls, asks for what torchvision no longer has."""
    sys.modules["torchvision.models.utils"] = missing = types.ModuleType("utils")
    missing.load_state_dict_from_url = torch.hub.load_state_dict_from_url
    return importlib.import_module("LibMTL.weighting")


def network(spec: DataSpec) -> nn.Module:
    torch.manual_seed(0)
    experts, heads = partial(StackedDense, units=[32]), partial(Heads, units=[16])
    return MMoE(spec, 4, partial(TabularBottom, embedding_dim=8), experts, SoftmaxGate, heads)


def batches(tasks: int, steps: int) -> list[Batch]:
    """Return random rows whose tasks conflict: targets are linear in opposite directions, and squares."""
    draw = torch.Generator().manual_seed(1)
    direction = torch.randn(FEATURES, generator=draw)
    made = []
    for _ in range(steps):
        x, ids = torch.randn(ROWS, FEATURES, generator=draw), torch.randint(IDS, (ROWS,), generator=draw)
        line = x @ direction / 4
        values = [line, -line + x[:, 0].square(), ids / IDS - line.abs()]
        made.append(Batch({"id": ids, "x": x}, {f"task{t}": values[t] for t in range(tasks)}))
    return made


def train(spec: DataSpec, data: list[Batch], combine: Callable[[Any, Batch, int], None], weighting: Any) -> Tensor:
    """Return the losses of the tasks at each step, ``[steps, T]``."""
    net = network(spec)
    own = weighting and weighting(network=net, num_tasks=len(spec.tasks))
    module = MultiTaskModule(net, spec.tasks, partial(torch.optim.Adam, lr=3e-3), {}, None, own).train()
    module.log = lambda *args, **kwargs: None
    optimizer, losses = module.configure_optimizers(), []
    for step, batch in enumerate(data):
        with torch.no_grad():
            losses.append(module._task_losses(module(batch.inputs), batch)[0].losses)
        optimizer.zero_grad()
        combine(module, batch, step)
        optimizer.step()
    return torch.stack(losses)


def ours(module: Any, batch: Batch, step: int) -> None:
    module.training_step(batch, step)["loss"].backward()
    module.weighting.before_step(step)


def summed(module: Any, batch: Batch, step: int) -> None:
    module.training_step(batch, step)["loss"].backward()


def theirs(method: Any, arguments: dict[str, Any]) -> Callable[[Any, Batch, int], None]:
    state: dict[str, Any] = {}

    def combine(module: Any, batch: Batch, step: int) -> None:
        if not state:
            shared, _ = shared_parameters(module.network)
            made = state["made"] = method()
            made.task_num, made.rep_grad, made.device = len(module.tasks), False, torch.device("cpu")
            made.get_share_params = lambda: shared
            made.zero_grad_share_params = lambda: [p.grad.zero_() for p in shared if p.grad is not None]
        losses = module._task_losses(module(batch.inputs), batch)[0].losses
        state["made"].backward(list(losses.unbind()), **arguments)

    return combine


def in_order() -> tuple[Any, Any]:
    """Make both libraries' PCGrad project in the order of the tasks; return what undoes it."""
    saved = torch.randperm, random.shuffle
    torch.randperm, random.shuffle = (lambda count: torch.arange(count)), (lambda values: None)
    return saved


def main() -> None:
    given = options(__doc__, rounds=1, steps=(int, 200, "optimiser steps"))
    rows, methods = [], libmtl()
    for name, count, aggregator, arguments in CASES:
        tasks = [TaskSpec(f"task{task}", "regression") for task in range(count)]
        spec = DataSpec({"id": Categorical(IDS), "x": Numeric(FEATURES)}, tasks)
        data = batches(count, given.steps)
        saved = in_order()
        try:
            left = train(spec, data, ours, partial(GradientWeighting, aggregator=aggregator()))
            right = train(spec, data, theirs(getattr(methods, name), arguments), None)
        finally:
            torch.randperm, random.shuffle = saved
        plain = train(
            spec, data, lambda module, batch, step: module.training_step(batch, step)["loss"].backward(), None
        )
        rows.append(
            {
                "method": name,
                "tasks": count,
                "first losses": left[0].sum().item(),
                "last losses": left[-1].sum().item(),
                "of LibMTL": right[-1].sum().item(),
                "largest difference": f"{(left - right).abs().max().item():.1e}",
                "of the sum of losses": f"{(left - plain).abs().max().item():.1e}",
            }
        )
    write(given, "against_libmtl", f"Weightings against LibMTL 1.1.5, {given.steps} steps", rows)


if __name__ == "__main__":
    main()
