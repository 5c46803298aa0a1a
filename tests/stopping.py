"""Stop runs anywhere, let them go on, and compare what they leave behind."""

from __future__ import annotations

import csv
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, open_dict
from pytorch_lightning import Callback

from mtl.checkpoints.files import read
from mtl.files.run_files import read_json
from mtl.pipeline.run import run
from mtl.runs.signals import Stopped
from tests.integration.helpers import compose_small, resume_small


class KilledError(Exception):
    """Stands for a kill."""


class StopAt(Callback):
    """End a run at a batch, counted over the run: by a signal (its number), by a "kill", or because "time" is up."""

    def __init__(self, batch: int, how: int | str = signal.SIGTERM) -> None:
        self.left, self.how = batch, how

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.left -= 1
        if self.left == -1 and self.how == "kill":
            raise KilledError
        if self.left == -1 and isinstance(self.how, int):
            signal.raise_signal(self.how)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if self.left == -1 and self.how == "time":  # as trainer.max_time does
            trainer.should_stop = True


class Copies(Callback):
    """Copy the checkpoints, which a run writes after every step, before the next step."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        copy = self.folder / "steps" / str(trainer.global_step) / "checkpoints"
        if trainer.global_step and not copy.exists():
            shutil.copytree(self.folder / "checkpoints", copy)


def resumed_everywhere(folder: Path, *words: str, local: Sequence[str] = ()) -> dict[int, list[str]]:
    """Run with ``words``, and resume from the checkpoint of each step; return which states differ at the end, by step.

    ``local``: words that a checkpoint does not keep.
    """
    saving = ("callbacks.last.every_n_steps=1", "~logger")
    run(watched(compose_small(folder, *words, *saving, *local), Copies, folder=str(folder)))
    expected, found = at_the_end(folder), {}
    for copy in sorted((folder / "steps").iterdir(), key=lambda path: int(path.name)):
        go_on(copy, *local)
        own = at_the_end(copy)
        found[int(copy.name)] = [key for key in {**expected, **own} if not same(expected.get(key), own.get(key))]
    return found


def at_the_end(folder: Path) -> dict[str, Any]:
    """Return all state that the last checkpoint of a run has, but times, and the results of the test."""
    last = read(folder / "checkpoints" / "last.ckpt")
    callbacks = {key: value for key, value in last["callbacks"].items() if key != "EpochReport"}
    callbacks["progress"] = last["callbacks"]["EpochReport"]["progress"]
    names, record = (
        ("state_dict", "optimizer_states", "loops", "epoch_sums", "epoch", "global_step"),
        read_json(folder / "results.json"),
    )
    return {
        **callbacks,
        **{name: last[name] for name in names},
        "test": record["numbers"]["test"],
    }


def watched(cfg: DictConfig, callback: type[Callback], **options: Any) -> DictConfig:
    """Return ``cfg`` with one more callback."""
    with open_dict(cfg):
        cfg.callbacks.stop = {"_target_": f"{callback.__module__}.{callback.__name__}", **options}
    return cfg


def interrupted(folder: Path, batch: int, *words: str, how: int | str = signal.SIGTERM) -> dict[str, Any]:
    """Run until it is stopped at ``batch``; return the checkpoint."""
    cfg = watched(compose_small(folder, *words), StopAt, batch=batch, how=how if isinstance(how, str) else int(how))
    if how == "time":
        run(cfg)
    elif how == "kill":
        with pytest.raises(KilledError):
            run(cfg)
    else:
        name = signal.Signals(how).name
        with pytest.raises(
            Stopped, match=rf"stopped by {name} after step \d+, saved; resume with: python -m mtl train ck"
        ):
            run(cfg)
    return read(folder / "checkpoints" / "last.ckpt")


def go_on(folder: Path, *words: str) -> None:
    """Resume the run in ``folder``; what the new process draws before it goes on does not count."""
    torch.manual_seed(99)
    run(resume_small(folder / "checkpoints" / "last.ckpt", folder, "+callbacks.stop=null", *words))


def state(folder: Path) -> dict[str, Any]:
    """Return what must be the same: weights, optimiser, best score, early stopping, test."""
    last = read(folder / "checkpoints" / "last.ckpt")
    return {
        "weights": last["state_dict"],
        "optimizer": last["optimizer_states"],
        "callbacks": {k: v for k, v in last["callbacks"].items() if "EarlyStop" in k or "RandomState" in k},
        "best": [v["best_model_score"] for k, v in last["callbacks"].items() if "BestCheckpoint" in k],
        "progress": last["callbacks"]["EpochReport"]["progress"],
        "test": read_json(folder / "results.json")["numbers"]["test"],
    }


def course(folder: Path, name: str = "step_loss") -> dict[int, float]:
    """Return the logged values ``train/<name>`` by step."""
    rows = csv.DictReader((folder / "csv" / "metrics.csv").read_text().splitlines())
    return {int(row["step"]): float(value) for row in rows if (value := row.get(f"train/{name}"))}


def losses(folder: Path) -> dict[tuple[str, int], str]:
    """Return what was logged of the training losses, as written."""
    rows = csv.DictReader((folder / "csv" / "metrics.csv").read_text().splitlines())
    names = ("train/step_loss", "train/loss", "val/loss")
    return {(name, int(row["step"])): row[name] for row in rows for name in names if row.get(name)}


def same(a: Any, b: Any) -> bool:
    """Return whether two states are equal; NaN, as of a task that a batch lacks, is equal to NaN."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def assert_same(folder: Path, whole: Path, logged: bool = True) -> None:
    """Compare the ends of two runs and, if ``logged``, all losses on the way, to the last bit."""
    expected, found = state(whole), state(folder)
    assert [key for key in expected if not same(expected[key], found[key])] == []
    assert not logged or losses(folder) == losses(whole)


def slow(*values: Any) -> Any:
    """Return values that only the slow tests try: they repeat the kind of others."""
    return pytest.param(*values, marks=pytest.mark.slow)
