"""Compare Trainer.fit, with all callbacks and metrics, to a bare loop over the same sparse MovieLens steps.

python benchmarks/fit_overhead.py [--rounds N]. After every 20 steps of the fit, 20 steps of the bare loop run on a
separate network, so that other load on the machine affects both. A step's time is from its start to the start of the
next step. The first three of each 20 steps, and the first 100 steps, are not counted. Each round is a fit of 800 steps,
including logging.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import ROOT, options, write

# isort: split
import torch
from hydra import compose, initialize_config_dir
from mtl.data_modules.base import TensorDataModule
from omegaconf import open_dict
from pytorch_lightning import Callback
from step import SPEC, decided, ids, ours

from mtl.config import build
from mtl.gates import TopKGate
from mtl.training.module import MultiTaskModule
from mtl.types import Batch, DataSpec

STEPS, BATCH, BLOCK = 800, 512, 20


class Rows(TensorDataModule):
    """Random rows in the format of MovieLens."""

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        def rows(count: int) -> Batch:
            return Batch(ids(count), {"watch": torch.randint(2, (count,)).float(), "rating": torch.rand(count)})

        return SPEC, {"train": rows(STEPS * BATCH), "val": rows(BATCH), "test": rows(BATCH)}


class Clock(Callback):
    """Time the steps of the fit, and the steps of a bare loop that it runs in between."""

    def __init__(self, bare: Iterator[None]) -> None:
        self.bare, self.times, self.starts = bare, {"bare": [], "fit": []}, list[float]()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        self.starts.append(time.perf_counter())
        if index % BLOCK or index == 0:
            return
        self._keep("fit", index)
        for _ in range(BLOCK + 1):
            next(self.bare)
            self.starts.append(time.perf_counter())
        self._keep("bare", index)
        self.starts.append(time.perf_counter())

    def _keep(self, way: str, index: int) -> None:
        steps = [1000 * (after - before) for before, after in pairwise(self.starts)]
        if index > 100:
            self.times[way] += steps[3:]
        self.starts = []


def network(name: str) -> torch.nn.Module:
    return decided("sparse") if name == "comet decided, sparse" else ours(TopKGate, "sparse")


def fit(module: MultiTaskModule, data: Rows, folder: Path, clock: Clock) -> None:
    """Train for one epoch, as train.py does."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", ["gate=topk", "trainer.max_epochs=1", "trainer.accelerator=cpu"])
    with open_dict(cfg):
        cfg.label, cfg.paths.run_dir = "benchmark", str(folder)
    trainer = build.build_trainer(cfg)
    trainer.callbacks.append(clock)
    trainer.fit(module, datamodule=data)


def bare(module: MultiTaskModule, data: Rows) -> Iterator[None]:
    """Train in a plain loop, one step for each ``next``."""
    module.log = lambda *args, **kwargs: None
    module.train()
    optimizer = module.configure_optimizers()
    while True:
        for batch in data.train_dataloader():
            loss = module.training_step(batch, 0)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield


def main() -> None:
    given = options(__doc__, rounds=3)
    data = Rows(batch_size=BATCH)
    data.setup()
    rows = []
    for name in ("topk, sparse", "comet decided, sparse"):
        times: dict[str, list[list[float]]] = {"bare": [], "fit": []}
        for _ in range(given.rounds):
            modules = [
                MultiTaskModule(network(name), SPEC.tasks, lambda p: torch.optim.Adam(p, 1e-4, fused=True))
                for _ in range(2)
            ]
            with tempfile.TemporaryDirectory() as folder:
                clock = Clock(bare(modules[0], data))
                fit(modules[1], data, Path(folder), clock)
            for way, values in clock.times.items():
                times[way].append(values)
        middle = {way: [statistics.median(values) for values in runs] for way, runs in times.items()}
        mean = {way: [statistics.fmean(values) for values in runs] for way, runs in times.items()}
        ratios = [fit_ms / bare_ms - 1 for bare_ms, fit_ms in zip(middle["bare"], middle["fit"], strict=True)]
        means = [fit_ms / bare_ms - 1 for bare_ms, fit_ms in zip(mean["bare"], mean["fit"], strict=True)]
        rows.append(
            {
                "step": name,
                "bare, ms": statistics.median(middle["bare"]),
                "fit, ms": statistics.median(middle["fit"]),
                "overhead": f"{statistics.median(ratios):.1%}",
                "of the mean": f"{statistics.median(means):.1%}",
            }
        )
    write(given, "fit_overhead", "Trainer.fit against the bare loop", rows)


if __name__ == "__main__":
    main()
