"""Time a step of each weighting against ``fixed``, and compare the losses of some with LibMTL's.

python benchmarks/weighting.py [--rounds N] [--weightings NAMES] [--steps 200]. Times, in turns in one process: MMoE
with a COMET gate on rows of MovieLens's format with batches of 512, and on images of Multi-MNIST's size with batches of
256. Losses, if LibMTL 1.1.5 is installed (``common.libmtl``): PCGrad, MGDA and CAGrad over Adam steps from the same
weights on the same batches. By design, LibMTL's MGDA keeps the weights of two tasks within 0.001 and 0.999, and its
CAGrad works only for three tasks. Both libraries project in random order in PCGrad, which matters from three tasks on;
here the orders are set to be equal.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

from common import ROOT, Row, libmtl, options, take_turns, undisturbed, write

# isort: split
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from step import GATES, ROWS, SPEC, ours, random_batch
from torch import Tensor
from torchjd.aggregation import MGDA, CAGrad, PCGrad

from mtl.experts.conv import StackedConv
from mtl.experts.dense import StackedDense
from mtl.gates import CometGate, SoftmaxGate
from mtl.networks.bottom import ImageBottom, TabularBottom
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.training.module import MultiTaskModule
from mtl.training.weighting import GradientWeighting, shared_parameters
from mtl.types import Batch, Categorical, DataSpec, Image, Numeric, TaskSpec

NAMES = "fixed,uncertainty,dwa,gradnorm,upgrad,pcgrad,cagrad,mgda,imtl_g,nash_mtl,aligned_mtl,graddrop"
FEATURES, IDS = 16, 50
CASES: list[tuple[str, int, Any, dict[str, Any]]] = [  # LibMTL's name, tasks, our aggregator, LibMTL's arguments
    ("PCGrad", 2, PCGrad, {}),
    ("PCGrad", 3, PCGrad, {}),
    ("MGDA", 2, MGDA, {"mgda_gn": "none"}),
    ("MGDA", 3, partial(MGDA, epsilon=1e-6, max_iters=1000), {"mgda_gn": "none"}),
    ("CAGrad", 3, partial(CAGrad, c=0.5), {"calpha": 0.5, "rescale": 0}),
]
Combine = Callable[[MultiTaskModule, Batch], None]  # computes the gradients of a step


def rows_network() -> tuple[DataSpec, torch.nn.Module, Batch]:
    return SPEC, ours(GATES["comet"]), random_batch(SPEC, ROWS)


def images_network() -> tuple[DataSpec, torch.nn.Module, Batch]:
    tasks = [TaskSpec(name, "multiclass", num_classes=10) for name in ("top_left", "bottom_right")]
    spec = DataSpec({"image": Image(1, 36, 36, 0.1, 0.3)}, tasks)
    layers = [{"channels": 10, "kernel": 5, "pool": 2}, {"channels": 20, "kernel": 5, "pool": 2}]
    experts = partial(StackedConv, convolutions=layers, units=[50, 50])
    gate = partial(CometGate, k=4, entropy_weight=0.05)
    network = MMoE(spec, 16, ImageBottom, experts, gate, partial(Heads, units=[50, 50]), execution="dense")
    batch = Batch({"image": torch.rand(256, 1, 36, 36)}, {task.name: torch.randint(10, (256,)) for task in tasks})
    return spec, network, batch


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


def step(name: str, make: Callable[[], tuple[DataSpec, torch.nn.Module, Batch]]) -> Callable[[], None]:
    """Return a function that trains a network for one step with the weighting ``name``."""
    spec, network, batch = make()
    weighting = instantiate(OmegaConf.load(ROOT / "conf" / "weighting" / f"{name}.yaml"), _convert_="all")
    module = module_of(spec, network, weighting, lr=1e-4, fused=True)
    optimizer = module.configure_optimizers()

    def once() -> None:
        optimizer.zero_grad()
        combine(module, batch)
        optimizer.step()

    return once


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
    given = options(
        __doc__,
        rounds=5,
        weightings=(str, NAMES, "names of conf/weighting, with commas"),
        steps=(int, 200, "steps beside LibMTL"),
    )
    names = given.weightings.split(",")
    table: list[Row] = [{"weighting": name} for name in names]
    for title, make in (("rows", rows_network), ("images", images_network)):
        times = undisturbed(take_turns({name: step(name, make) for name in names}, given.rounds, calls=4))
        for row, name in zip(table, names, strict=True):
            row[f"{title}, of fixed"] = round(times[name] / times["fixed"], 2)
    write(given, "weighting", "Steps with a weighting of tasks, as multiples of fixed", table)
    if methods := libmtl("weighting"):
        rows = against_libmtl(methods, given.steps)
        write(given, "against_libmtl", f"Weightings against LibMTL 1.1.5, {given.steps} steps", rows)


if __name__ == "__main__":
    main()
