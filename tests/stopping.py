"""Stop runs anywhere, let them go on, and compare what they leave behind."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, open_dict
from pytorch_lightning import Callback

from mtl.checkpoints.files import read
from mtl.cli.run import run
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
        with pytest.raises(Stopped, match=rf"stopped by {name} after step \d+, saved; resume with: python train.py ck"):
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
        "test": json.loads((folder / "results.json").read_text())["test"],
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
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
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
