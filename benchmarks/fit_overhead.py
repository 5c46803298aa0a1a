"""Compare Trainer.fit, with all callbacks and metrics, to a bare loop over the same steps; time start-up and a run.

python benchmarks/fit_overhead.py [--rounds N] [--steps N]. After every 20 steps of the fit, 20 steps of the bare loop
run on a separate network, so that other load on the machine affects both. A step's time is from its start to the start
of the next step; the first three of each 20 steps, and the first 100 steps, are not counted. Each round is a fit of 800
sparse MovieLens steps, including logging. The second table has seconds of whole processes, first deciles.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import ROOT, Row, options, take_turns, undisturbed, write

# isort: split
import torch
from hydra import compose, initialize_config_dir
from mtl.data_modules.base import TensorDataModule
from omegaconf import open_dict
from pytorch_lightning import Callback
from step import ROWS, SPEC, decided, ours, random_batch

from mtl.config import build
from mtl.gates import TopKGate
from mtl.training.module import MultiTaskModule
from mtl.types import Batch, DataSpec

BLOCK, WARM_UP = 20, 100  # steps
PROCESSES = {
    "import torch": ["-c", "import torch"],
    "import mtl": ["-c", "import mtl"],
    "train.py --help": ["train.py", "--help"],
    "default run of one epoch": ["train.py", "trainer.max_epochs=1", "callbacks.progress=null"],
}  # words of Python


class Rows(TensorDataModule):
    """Random rows in the format of MovieLens for ``steps`` steps."""

    def __init__(self, steps: int) -> None:
        super().__init__(batch_size=ROWS)
        self.steps = steps

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        sizes = {"train": self.steps * ROWS, "val": ROWS, "test": ROWS}
        return SPEC, {name: random_batch(SPEC, size) for name, size in sizes.items()}


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
        if index > WARM_UP:
            self.times[way] += steps[3:]
        self.starts = []


def fit(module: MultiTaskModule, data: Rows, folder: Path, clock: Clock) -> None:
    """Train for one epoch, as mtl train does."""
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
    optimizer = module.train().configure_optimizers()
    while True:
        for batch in data.train_dataloader():
            loss = module.training_step(batch, 0)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield


def main() -> None:
    given = options(__doc__, rounds=3, steps=(int, 800, "steps of a fit, more than 140"))
    data, rows = Rows(given.steps), list[Row]()
    data.setup()
    networks = {"topk, sparse": partial(ours, TopKGate, "sparse"), "comet decided, sparse": partial(decided, "sparse")}
    for name, network in networks.items():
        times: dict[str, list[float]] = {"bare": [], "fit": []}  # the median of each round
        for _ in range(given.rounds):
            adam = partial(torch.optim.Adam, lr=1e-4, fused=True)
            modules = [MultiTaskModule(network(), SPEC.tasks, adam) for _ in range(2)]
            with tempfile.TemporaryDirectory() as folder:
                clock = Clock(bare(modules[0], data))
                fit(modules[1], data, Path(folder), clock)
            for way, values in clock.times.items():
                times[way].append(statistics.median(values))
        ratios = [with_fit / without for without, with_fit in zip(times["bare"], times["fit"], strict=True)]
        row: Row = {f"{way}, ms": statistics.median(values) for way, values in times.items()}
        rows.append({"step": name} | row | {"overhead": f"{statistics.median(ratios) - 1:.1%}"})
    write(given, "fit_overhead", "Trainer.fit against the bare loop", rows)

    with tempfile.TemporaryDirectory() as folder:
        calls = {}
        for name, words in PROCESSES.items():
            own = [f"hydra.run.dir={folder}/${{now:%H%M%S%f}}"] if "run" in name else []
            command = [sys.executable, *words, *own]
            calls[name] = partial(subprocess.run, command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        times = undisturbed(take_turns(calls, given.rounds, calls=3))
    rows = [{"process": name, "seconds": value / 1000} for name, value in times.items()]
    write(given, "start_up", "Start-up and the default run", rows)


if __name__ == "__main__":
    main()
