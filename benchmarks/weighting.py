"""Compare the losses of PCGrad, MGDA and CAGrad with those of LibMTL 1.1.5 (see ``common.libmtl``).

python benchmarks/weighting.py [--steps 200]: Adam steps from the same weights on the same batches. By design, LibMTL's
MGDA keeps the weights of two tasks within 0.001 and 0.999, and its CAGrad works only for three tasks. Both libraries
project in random order in PCGrad, which matters from three tasks on; here the orders are set to be equal.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

from common import Row, libmtl, options, write

# isort: split
import torch
from torch import Tensor
from torchjd.aggregation import MGDA, CAGrad, PCGrad

from mtl.experts.dense import StackedDense
from mtl.gates import SoftmaxGate
from mtl.networks.bottom import TabularBottom
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.training.module import MultiTaskModule
from mtl.training.weighting import GradientWeighting, shared_parameters
from mtl.types import Batch, Categorical, DataSpec, Numeric, TaskSpec

FEATURES, IDS = 16, 50
CASES: list[tuple[str, int, Any, dict[str, Any]]] = [  # LibMTL's name, tasks, our aggregator, LibMTL's arguments
    ("PCGrad", 2, PCGrad, {}),
    ("PCGrad", 3, PCGrad, {}),
    ("MGDA", 2, MGDA, {"mgda_gn": "none"}),
    ("MGDA", 3, partial(MGDA, epsilon=1e-6, max_iters=1000), {"mgda_gn": "none"}),
    ("CAGrad", 3, partial(CAGrad, c=0.5), {"calpha": 0.5, "rescale": 0}),
]
Combine = Callable[[MultiTaskModule, Batch], None]  # computes the gradients of a step


def module_of(spec: DataSpec, network: torch.nn.Module, weighting: Any, **options: Any) -> MultiTaskModule:
    own = weighting and weighting(network=network, num_tasks=len(spec.tasks))
    module = MultiTaskModule(network, spec.tasks, partial(torch.optim.Adam, **options), {}, None, own).train()
    module.log = lambda *args, **kwargs: None
    return module


def combine(module: MultiTaskModule, batch: Batch) -> None:
    """Compute the gradients as our runs do."""
    module.training_step(batch, 0)["loss"].backward()
    if module.weighting is not None:
        module.weighting.before_step(0)


def conflicting(tasks: int, steps: int) -> list[Batch]:
    """Return random rows whose tasks conflict: targets are linear in opposite directions, and squares."""
    draw, made = torch.Generator().manual_seed(1), []
    direction = torch.randn(FEATURES, generator=draw)
    for _ in range(steps):
        x, ids = torch.randn(256, FEATURES, generator=draw), torch.randint(IDS, (256,), generator=draw)
        line = x @ direction / 4
        values = [line, -line + x[:, 0].square(), ids / IDS - line.abs()]
        made.append(Batch({"id": ids, "x": x}, {f"task{t}": values[t] for t in range(tasks)}))
    return made


def losses(spec: DataSpec, data: list[Batch], how: Combine, weighting: Any = None) -> Tensor:
    """Return the losses of the tasks at each step, ``[steps, T]``."""
    torch.manual_seed(0)
    experts, heads = partial(StackedDense, units=[32]), partial(Heads, units=[16])
    network = MMoE(spec, 4, partial(TabularBottom, embedding_dim=8), experts, SoftmaxGate, heads)
    module, found = module_of(spec, network, weighting, lr=3e-3), []
    optimizer = module.configure_optimizers()
    for batch in data:
        with torch.no_grad():
            found.append(module.task_losses(module(batch.inputs), batch).losses)
        optimizer.zero_grad()
        how(module, batch)
        optimizer.step()
    return torch.stack(found)


def theirs(method: Any, arguments: dict[str, Any]) -> Combine:
    """Return a function that computes the gradients by a method of LibMTL."""
    made = method()

    def combine(module: MultiTaskModule, batch: Batch) -> None:
        shared, _ = shared_parameters(module.network)
        made.task_num, made.rep_grad, made.device = len(module.tasks), False, torch.device("cpu")
        made.get_share_params = lambda: shared
        made.zero_grad_share_params = lambda: [p.grad.zero_() for p in shared if p.grad is not None]
        values = module.task_losses(module(batch.inputs), batch).losses
        made.backward(list(values.unbind()), **arguments)

    return combine


def against_libmtl(methods: Any, steps: int) -> list[Row]:
    rows = []
    for name, count, aggregator, arguments in CASES:
        tasks = [TaskSpec(f"task{task}", "regression") for task in range(count)]
        spec, data = DataSpec({"id": Categorical(IDS), "x": Numeric(FEATURES)}, tasks), conflicting(count, steps)
        in_order = patch.object(torch, "randperm", torch.arange), patch.object(random, "shuffle", lambda values: None)
        with in_order[0], in_order[1]:
            left = losses(spec, data, combine, partial(GradientWeighting, aggregator=aggregator()))
            right = losses(spec, data, theirs(getattr(methods, name), arguments))
        plain = losses(spec, data, combine)
        row: Row = {"method": name, "tasks": count, "first losses": left[0].sum().item()}
        row |= {"last losses": left[-1].sum().item(), "of LibMTL": right[-1].sum().item()}
        row |= {"largest difference": f"{(left - right).abs().max().item():.1e}"}
        rows.append(row | {"of the sum of losses": f"{(left - plain).abs().max().item():.1e}"})
    return rows


def main() -> None:
    given = options(__doc__, rounds=1, steps=(int, 200, "steps beside LibMTL"))
    if not (methods := libmtl("weighting")):
        sys.exit("error: LibMTL is not installed")
    rows = against_libmtl(methods, given.steps)
    write(given, "against_libmtl", f"Weightings against LibMTL 1.1.5, {given.steps} steps", rows)


if __name__ == "__main__":
    main()
