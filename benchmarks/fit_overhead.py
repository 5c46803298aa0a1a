"""Time Trainer.fit against the bare loop on the same steps: the sparse MovieLens step, with all callbacks and metrics.

python benchmarks/fit_overhead.py [--rounds N]. In each round either trains on as many batches, in turn first; the first
quarter warms up. A step's time is from the start of one to the start of the next. The overhead is that of a round, its
median over the rounds: the machine's own speed drifts from round to round.
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

STEPS, BATCH = 300, 512


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


def bare(module: MultiTaskModule, data: Rows, folder: Path) -> list[float]:
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
    given = options(__doc__, rounds=8)
    data = Rows(batch_size=BATCH)
    data.setup()
    rows = []
    for name in ("topk, sparse", "comet decided, sparse"):
        middle: dict[str, list[float]] = {"bare": [], "fit": []}  # of each round, in milliseconds
        mean: dict[str, list[float]] = {"bare": [], "fit": []}
        for number in range(given.rounds + 1):
            ways = [("bare", bare), ("fit", fit)]
            for way, train in ways if number % 2 else ways[::-1]:
                module = MultiTaskModule(network(name), SPEC.tasks, lambda p: torch.optim.Adam(p, 1e-4, fused=True))
                with tempfile.TemporaryDirectory() as folder:
                    moments = train(module, data, Path(folder))
                steps = [1000 * (after - before) for before, after in pairwise(moments)][STEPS // 4 :]
                if number:
                    middle[way].append(statistics.median(steps))
                    mean[way].append(statistics.fmean(steps))
        ratios = [fit_ms / bare_ms for bare_ms, fit_ms in zip(middle["bare"], middle["fit"], strict=True)]
        means = [fit_ms / bare_ms for bare_ms, fit_ms in zip(mean["bare"], mean["fit"], strict=True)]
        rows.append(
            {
                "step": name,
                "bare, ms": statistics.median(middle["bare"]),
                "fit, ms": statistics.median(middle["fit"]),
                "overhead": f"{statistics.median(ratios) - 1:.1%}",
                "lowest, highest round": f"{min(ratios) - 1:.1%}, {max(ratios) - 1:.1%}",
                "overhead of the mean": f"{statistics.median(means) - 1:.1%}",
            }
        )
    write(given, "fit_overhead", "Trainer.fit against the bare loop", rows)


if __name__ == "__main__":
    main()
