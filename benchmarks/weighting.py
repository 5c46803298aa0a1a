"""Time a step of each weighting against ``fixed``, in turns in one process: the ratio is what matters.

python benchmarks/weighting.py [--rounds N] [--weightings NAMES]. The networks are MMoE with a COMET gate: on rows of
MovieLens's format with batches of 512, and on images of Multi-MNIST's size with batches of 256.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from common import ROOT, options, take_turns, undisturbed, write

# isort: split
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from step import SPEC, ids, ours

from mtl.experts.conv import StackedConv
from mtl.gates import CometGate
from mtl.networks.bottom import ImageBottom
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.training.module import MultiTaskModule
from mtl.types import Batch, DataSpec, Image, TaskSpec

NAMES = "fixed,uncertainty,dwa,gradnorm,upgrad,pcgrad,cagrad,mgda,imtl_g,nash_mtl,aligned_mtl,graddrop"


def rows_network() -> tuple[DataSpec, torch.nn.Module, Batch]:
    batch = Batch(ids(512), {"watch": torch.randint(2, (512,)).float(), "rating": torch.rand(512)})
    return SPEC, ours(partial(CometGate, entropy_weight=0.01), "dense"), batch


def images_network() -> tuple[DataSpec, torch.nn.Module, Batch]:
    tasks = [TaskSpec(name, "multiclass", num_classes=10) for name in ("top_left", "bottom_right")]
    spec = DataSpec({"image": Image(1, 36, 36, 0.1, 0.3)}, tasks)
    layers = [{"channels": 10, "kernel": 5, "pool": 2}, {"channels": 20, "kernel": 5, "pool": 2}]
    experts = partial(StackedConv, convolutions=layers, units=[50, 50])
    gate = partial(CometGate, k=4, entropy_weight=0.05)
    network = MMoE(spec, 16, ImageBottom, experts, gate, partial(Heads, units=[50, 50]), execution="dense")
    batch = Batch({"image": torch.rand(256, 1, 36, 36)}, {task.name: torch.randint(10, (256,)) for task in tasks})
    return spec, network, batch


def step(name: str, make: Callable[[], tuple[DataSpec, torch.nn.Module, Batch]]) -> Callable[[], None]:
    """Return what trains a network for one step with the weighting ``name``."""
    spec, network, batch = make()
    weighting = instantiate(OmegaConf.load(ROOT / "conf" / "weighting" / f"{name}.yaml"), _convert_="all")
    weighting = weighting(network=network, num_tasks=len(spec.tasks))
    module = MultiTaskModule(network, spec.tasks, partial(torch.optim.Adam, lr=1e-4, fused=True), {}, None, weighting)
    module.log = lambda *args, **kwargs: None
    optimizer = module.train().configure_optimizers()

    def once() -> None:
        optimizer.zero_grad()
        module.training_step(batch, 0)["loss"].backward()
        module.weighting.before_step(0)
        optimizer.step()

    return once


def main() -> None:
    given = options(__doc__, rounds=5, weightings=(str, NAMES, "names of conf/weighting, with commas"))
    names = given.weightings.split(",")
    table = [{"weighting": name} for name in names]
    for title, make in (("rows", rows_network), ("images", images_network)):
        times = undisturbed(take_turns({name: step(name, make) for name in names}, given.rounds, calls=4))
        for row, name in zip(table, names, strict=True):
            row[f"{title}, of fixed"] = round(times[name] / times["fixed"], 2)
    write(given, "weighting", "Steps with a weighting of tasks, as multiples of fixed", table)


if __name__ == "__main__":
    main()
