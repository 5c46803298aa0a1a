"""Time Trainer.fit against the bare loop on the same steps: the sparse MovieLens step, with all callbacks and metrics.

python benchmarks/fit_overhead.py [--rounds N]. In each round either trains on as many batches; the first quarter warms
up. A step's time is from the start of one to the start of the next.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import ROOT, options, write

# isort: split
import torch
from hydra import compose, initialize_config_dir
from omegaconf import open_dict
from pytorch_lightning import Callback
from step import SPEC, decided, ids, ours

from data_modules.base import TensorDataModule
from mtl import build
from mtl.gates import TopKGate
from mtl.module import MultiTaskModule
from mtl.types import Batch, DataSpec

STEPS, BATCH = 400, 512


class Rows(TensorDataModule):
    """Random rows of MovieLens's form."""

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        def rows(count: int) -> Batch:
            return Batch(ids(count), {"watch": torch.randint(2, (count,)).float(), "rating": torch.rand(count)})

        return SPEC, {"train": rows(STEPS * BATCH), "val": rows(BATCH), "test": rows(BATCH)}


class Clock(Callback):
    """Note when each batch starts."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.starts.append(time.perf_counter())


def network(name: str) -> torch.nn.Module:
    return decided("sparse") if name == "comet decided, sparse" else ours(TopKGate, "sparse")


def fit(module: MultiTaskModule, data: Rows, folder: Path) -> list[float]:
    """Train an epoch as train.py does; return the starts of its steps."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", ["gate=topk", "trainer.max_epochs=1", "trainer.accelerator=cpu"])
    with open_dict(cfg):
        cfg.label, cfg.paths.run_dir = "benchmark", str(folder)
    trainer, clock = build.build_trainer(cfg), Clock()
    trainer.callbacks.append(clock)
    trainer.fit(module, datamodule=data)
    return clock.starts


def bare(module: MultiTaskModule, data: Rows) -> list[float]:
    """Train an epoch with nothing but the step; return the starts of its steps."""
    module.log = lambda *args, **kwargs: None
    module.train()
    optimizer, starts = module.configure_optimizers(), []
    for batch in data.train_dataloader():
        starts.append(time.perf_counter())
        loss = module.training_step(batch, 0)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return starts


def main() -> None:
    given = options(__doc__, rounds=3)
    data = Rows(batch_size=BATCH)
    data.setup()
    rows = []
    for name in ("topk, sparse", "comet decided, sparse"):
        times: dict[str, list[float]] = {"bare": [], "fit": []}
        for _ in range(given.rounds):
            modules = [
                MultiTaskModule(network(name), SPEC.tasks, lambda p: torch.optim.Adam(p, 1e-4, fused=True))
                for _ in "ab"
            ]
            with tempfile.TemporaryDirectory() as folder:
                starts = {"bare": bare(modules[0], data), "fit": fit(modules[1], data, Path(folder))}
            for way, moments in starts.items():
                steps = [after - before for before, after in pairwise(moments)]
                times[way] += steps[STEPS // 4 :]
        median = {way: 1000 * statistics.median(values) for way, values in times.items()}
        mean = {way: 1000 * statistics.fmean(values) for way, values in times.items()}
        rows.append(
            {
                "step": name,
                "bare, ms": median["bare"],
                "fit, ms": median["fit"],
                "overhead": f"{median['fit'] / median['bare'] - 1:.1%}",
                "overhead of the mean": f"{mean['fit'] / mean['bare'] - 1:.1%}",
            }
        )
    write(given, "fit_overhead", "Trainer.fit against the bare loop", rows)


if __name__ == "__main__":
    main()
