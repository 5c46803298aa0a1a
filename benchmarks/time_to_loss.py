"""Time training on real MovieLens rows until the validation loss reaches a target.

python benchmarks/time_to_loss.py [--target LOSS] [--gates comet,dselect_k] [--epochs N]. Compares our gates, executed
dense and auto, with LibMTL's DSelect_k as the network of the same trainer, if LibMTL is installed. Needs the files of
data=movielens. All see the same batches in the same order and are validated four times per epoch. The clock runs from
the first step to the end of the validation that reaches the target, including everything that a run writes. Experts,
embeddings, dropout, learning rate and task weights are those of data=movielens for all.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from common import ROOT, Row, libmtl, options, write

# isort: split
import pytorch_lightning as pl
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, open_dict
from pytorch_lightning import Callback, LightningModule, Trainer
from step import Case, Peer
from torch import nn

from mtl.config import build
from mtl.networks.bottom import EMBEDDING_RANGE

CHECKS = 4  # validations per epoch


class Reached(Exception):  # noqa: N818  (not an error)
    """Signal that the validation loss has reached the target."""


class Watch(Callback):
    """Record validation losses with their times in ``course``, and stop training when one reaches the target."""

    def __init__(self, target: float) -> None:
        self.target, self.start = target, time.perf_counter()
        self.course: list[tuple[float, float]] = []  # (seconds, loss)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        loss = float(trainer.callback_metrics["val/loss"])
        self.course.append((time.perf_counter() - self.start, loss))
        print(f"    {self.course[-1][0]:7.1f} s  {loss:.4f}", flush=True)
        if loss <= self.target:
            raise Reached


def configuration(gate: str, execution: str, epochs: int, folder: str) -> DictConfig:
    words = [f"gate={gate}", "data=movielens", f"network.execution={execution}", f"trainer.max_epochs={epochs}"]
    words += ["trainer.accelerator=cpu", f"trainer.val_check_interval={1 / CHECKS}", "seed=0"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", words)
    with open_dict(cfg):
        cfg.label, cfg.paths.run_dir, cfg.paths.data_dir = "benchmark", folder, str(ROOT / "data")
    return cfg


def train(
    watch: Watch, data: Any, epochs: int, gate: str, execution: str, network: Callable[[], nn.Module] | None = None
) -> None:
    """Train the network of ``gate``, or ``network``, until the target is reached."""
    pl.seed_everything(0, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        cfg = configuration(gate, execution, epochs, folder)
        module = build.build_module(cfg, network() if network else build.build_network(cfg, data.spec), data.spec)
        trainer = build.build_trainer(cfg)
        trainer.callbacks.append(watch)
        with contextlib.suppress(Reached):
            trainer.fit(module, datamodule=data)


def peer(architecture: Any, data: Any) -> nn.Module:
    """Return LibMTL's DSelect_k behind embeddings that start as ours do."""
    network = Peer(architecture.DSelect_k, Case(data.spec), num_nonzeros=2, kgamma=1.0)
    for table in network.tables.values():
        nn.init.uniform_(table.weight, -EMBEDDING_RANGE, EMBEDDING_RANGE)
    return network


def main() -> None:
    given = options(
        __doc__,
        rounds=1,
        target=(float, 0.39, "validation loss to reach"),
        epochs=(int, 6, "largest number of epochs"),
        gates=(str, "comet", "our gates to train, separated by commas"),
    )
    data: Any = build.build_data(configuration("comet", "auto", 1, "unused"))
    data.prepare_data()
    data.setup()
    runs: dict[str, Callable[[Watch], None]] = {}
    for gate in given.gates.split(","):
        for execution in ("auto", "dense"):
            own = partial(train, data=data, epochs=given.epochs, gate=gate, execution=execution)
            runs[f"ours, {gate}, {execution}"] = own
    if (architecture := libmtl("architecture")) is not None:
        network = partial(peer, architecture, data)
        theirs = partial(train, data=data, epochs=given.epochs, gate="comet", execution="dense", network=network)
        runs["LibMTL DSelect_k"] = theirs
    rows: list[Row] = []
    for name, run in runs.items():
        print(name, flush=True)
        watch = Watch(given.target)
        run(watch)
        seconds, loss = watch.course[-1]
        row: Row = {"network": name, f"seconds to {given.target}": seconds if loss <= given.target else None}
        row |= {"epochs": len(watch.course) / CHECKS, "seconds an epoch": seconds / len(watch.course) * CHECKS}
        rows.append(row | {"last loss": loss})
    notes = [] if architecture else ["LibMTL is not installed: its row is left out."]
    write(given, "time_to_loss", "Time to a validation loss, MovieLens-1M", rows, notes)


if __name__ == "__main__":
    main()
