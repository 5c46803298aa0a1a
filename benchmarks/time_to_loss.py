"""Time training on real MovieLens rows until the validation loss reaches a target.

python benchmarks/time_to_loss.py [--target LOSS] [--gates comet,dselect_k] [--epochs N]. Compares our gates, executed
dense and auto, with LibMTL's DSelect_k trained by LibMTL's own trainer. Needs the files of data=movielens. All see the
same batches in the same order and are validated four times per epoch. The clock runs from the first step to the end of
the validation that reaches the target, including everything that a run writes. Experts, embeddings, dropout, learning
rate and task weights are those of data=movielens for all. We add the embeddings to LibMTL's network, and its loss skips
rows without a rating. If LibMTL is not installed, its row is left out.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

from common import ROOT, options, write

# isort: split
import contextlib

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from mtl.data_modules.base import TensorDataModule, TrainingSampler
from omegaconf import DictConfig, open_dict
from pytorch_lightning import Callback, LightningModule, Trainer
from step import dense_layer, peer_module
from torch import Tensor, nn

from mtl.config import build
from mtl.networks.bottom import EMBEDDING_RANGE
from mtl.training.losses import labelled
from mtl.types import Batch, TaskSpec

CHECKS = 4  # validations per epoch


class Reached(Exception):  # noqa: N818  (not an error)
    """Signal that the validation loss has reached the target."""


class Watch:
    """Record validation losses with their times."""

    def __init__(self, target: float) -> None:
        self.target, self.start = target, time.perf_counter()
        self.course: list[tuple[float, float]] = []  # (seconds, loss)

    def note(self, loss: float) -> bool:
        """Record a validation loss; return whether it has reached the target."""
        self.course.append((time.perf_counter() - self.start, loss))
        print(f"    {self.course[-1][0]:7.1f} s  {loss:.4f}", flush=True)
        return loss <= self.target


class StopAtTarget(Callback):
    """Start the clock of a ``Watch``, and stop training when the target is reached."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.watch.start = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and self.watch.note(float(trainer.callback_metrics["val/loss"])):
            raise Reached


def configuration(gate: str, execution: str, epochs: int, folder: str) -> DictConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose(
            "train",
            [
                f"gate={gate}",
                "data=movielens",
                f"network.execution={execution}",
                f"trainer.max_epochs={epochs}",
                "trainer.accelerator=cpu",
                f"+trainer.val_check_interval={1 / CHECKS}",
                "seed=0",
            ],
        )
    with open_dict(cfg):
        cfg.label, cfg.paths.run_dir, cfg.paths.data_dir = "benchmark", folder, str(ROOT / "data")
    return cfg


def train_ours(gate: str, execution: str, watch: Watch, epochs: int, data: TensorDataModule) -> None:
    pl.seed_everything(0, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        cfg = configuration(gate, execution, epochs, folder)
        module = build.build_module(cfg, build.build_network(cfg, data.spec), data.spec)
        trainer = build.build_trainer(cfg)
        trainer.callbacks.append(StopAtTarget(watch))
        with contextlib.suppress(Reached):
            trainer.fit(module, datamodule=data)


def train_peer(watch: Watch, epochs: int, data: TensorDataModule, learning_rate: float) -> None:
    from LibMTL.architecture import DSelect_k
    from LibMTL.loss import AbsLoss
    from LibMTL.metrics import AbsMetric
    from LibMTL.trainer import Trainer as TheirTrainer
    from LibMTL.weighting import EW

    class Loss(AbsLoss):
        """The weighted mean over labelled rows; batches are averaged by their number of labelled rows."""

        def __init__(self, task: TaskSpec) -> None:
            super().__init__()
            self.task, self.average = task, 0.0

        def _update_loss(self, prediction: Tensor, target: Tensor) -> Tensor:
            known = labelled(self.task, target)
            loss = F.binary_cross_entropy_with_logits if self.task.kind == "binary" else F.mse_loss
            value = self.task.weight * loss(prediction[known], target[known].to(prediction.dtype))
            self.record.append(value.item())
            self.bs.append(int(known.sum()))
            return value

        def _average_loss(self) -> float:
            self.average = float(super()._average_loss())
            return self.average

    class NoMetric(AbsMetric):
        def update_fun(self, prediction: Tensor, target: Tensor) -> None:
            pass

        def score_fun(self) -> list[float]:
            return [0.0]

    class Batches:
        """Batches of the training set in our order, a quarter of an epoch per pass, or of a complete split."""

        def __init__(self, split: str, parts: int) -> None:
            self.rows, self.parts, self.epoch = data.splits[split], parts, 0
            self.count = -(-len(self.rows) // (data.batch_size if parts > 1 else data.eval_batch_size))
            self._order = self._all()

        def _all(self) -> Iterator[Tensor]:
            while self.parts > 1:
                yield from TrainingSampler(len(self.rows), data.batch_size, data.shuffle_seed, lambda: (self.epoch, 0))
                self.epoch += 1

        def __len__(self) -> int:
            return self.count // self.parts

        def __iter__(self) -> Batches:
            if self.parts == 1:
                self._order = iter(torch.arange(len(self.rows)).split(data.eval_batch_size))
            return self

        def __next__(self) -> tuple[Tensor, Mapping[str, Tensor]]:
            return self.next()

        def next(self) -> tuple[Tensor, Mapping[str, Tensor]]:  # LibMTL's trainer calls this
            batch: Batch = self.rows.select(next(self._order))
            return torch.stack([batch.inputs["user"], batch.inputs["item"]], 1), batch.targets

    class Network(DSelect_k):
        """LibMTL's network behind our embeddings."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            sizes = [data.spec.inputs[name].size for name in ("user", "item")]
            self.tables = nn.ModuleList(nn.Embedding(size, 128) for size in sizes)
            for table in self.tables:
                nn.init.uniform_(table.weight, -EMBEDDING_RANGE, EMBEDDING_RANGE)  # as in our network

        def init_param(self) -> None:  # called by EW, which has no parameters
            pass

        def forward(self, ids: Tensor, task_name: str | None = None) -> dict[str, Tensor]:
            x = torch.cat([table(ids[:, index]) for index, table in enumerate(self.tables)], -1)
            return {name: value.squeeze(-1) for name, value in super().forward(x, task_name).items()}

    class OnCpu(TheirTrainer):
        device = property(lambda self: torch.device("cpu"), lambda self, value: None)  # LibMTL's is always cuda:0

        def test(self, *args: Any, **kwargs: Any) -> None:
            super().test(*args, **kwargs)
            if watch.note(sum(loss.average for loss in losses.values())):
                raise Reached

    pl.seed_everything(0, verbose=False)
    losses = {task.name: Loss(task) for task in data.spec.tasks}
    tasks = {
        name: {"metrics": ["none"], "metrics_fn": NoMetric(), "loss_fn": loss, "weight": [0]}
        for name, loss in losses.items()
    }
    heads = nn.ModuleDict({name: nn.Sequential(dense_layer(), nn.Linear(256, 1)) for name in losses})
    sizes = {"img_size": [256], "num_experts": [16], "num_nonzeros": 2, "kgamma": 1.0}
    trainer = OnCpu(
        tasks,
        EW,
        Network,
        dense_layer,
        heads,
        rep_grad=False,
        multi_input=False,
        optim_param={"optim": "adam", "lr": learning_rate},
        scheduler_param=None,
        weight_args={},
        arch_args=sizes,
    )
    watch.start = time.perf_counter()
    with contextlib.suppress(Reached):
        trainer.train(Batches("train", CHECKS), Batches("val", 1), epochs * CHECKS)


def main() -> None:
    given = options(
        __doc__,
        rounds=1,
        target=(float, 0.39, "validation loss to reach"),
        epochs=(int, 6, "largest number of epochs"),
        gates=(str, "comet", "our gates to train, separated by commas"),
    )
    cfg = configuration("comet", "auto", 1, "unused")
    data = build.build_data(cfg)
    assert isinstance(data, TensorDataModule)
    data.prepare_data()
    data.setup()
    runs: dict[str, Any] = {}
    for gate in given.gates.split(","):
        for execution in ("auto", "dense"):
            runs[f"ours, {gate}, {execution}"] = lambda watch, g=gate, e=execution: train_ours(
                g, e, watch, given.epochs, data
            )
    if peer_module() is not None:
        runs["LibMTL DSelect_k, LibMTL's trainer"] = lambda watch: train_peer(
            watch, given.epochs, data, cfg.recipe.learning_rate
        )
    rows = []
    for name, run in runs.items():
        print(name, flush=True)
        watch = Watch(given.target)
        run(watch)
        reached = watch.course[-1][1] <= given.target
        rows.append(
            {
                "network": name,
                f"seconds to {given.target}": watch.course[-1][0] if reached else None,
                "epochs": len(watch.course) / CHECKS,
                "seconds an epoch": watch.course[-1][0] / len(watch.course) * CHECKS,
                "last loss": watch.course[-1][1],
                "of the first": watch.course[-1][0] / float(rows[0][f"seconds to {given.target}"] or "nan")
                if rows
                else 1.0,
            }
        )
    notes = [] if peer_module() is not None else ["LibMTL is not installed: its row is left out."]
    write(given, "time_to_loss", "Time to a validation loss, MovieLens-1M", rows, notes)


if __name__ == "__main__":
    main()
