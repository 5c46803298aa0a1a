"""Runs that accumulate gradients, validate within epochs or end within one: schedules, saving and resuming."""

from __future__ import annotations

import csv
import signal
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from omegaconf import open_dict
from pytorch_lightning import Callback

from mtl.checkpoints.files import read
from mtl.cli.run import run
from mtl.cli.signals import Stopped
from tests.integration.helpers import compose_small
from tests.integration.test_resume import go_on, same, slow, state

# Epochs of 10 batches and 4 steps (3 + 3 + 3 + 1 batches); hardening and the end of the schedule come after 1.5 epochs
WORDS = [
    "data.batch_size=64",
    "trainer.accumulate_grad_batches=3",
    "trainer.max_epochs=3",
    "recipe.dropout=0.3",
    "permutation=sinkhorn",
    "recipe.permutation.epochs=1.5",
    "permutation.noise=0.1",
    "schedule=entropy_weight",
    "callbacks.entropy_schedule.epochs=1.5",
    "logger=csv",
    "trainer.log_every_n_steps=1",
]
TIMES = {"while_training/seconds_per_epoch"}


def rows(folder: Path) -> list[dict[str, str]]:
    lines = (folder / "csv" / "metrics.csv").read_text().splitlines()
    return [{k: v for k, v in row.items() if v and k not in TIMES} for row in csv.DictReader(lines)]


class SignalAt(Callback):
    """Send a signal before the backward pass of a batch, counted over the run."""

    def __init__(self, batch: int, number: int = signal.SIGTERM) -> None:
        self.left, self.number = batch, number

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.left -= 1
        if self.left == -1:
            signal.raise_signal(self.number)


def interrupted(folder: Path, batch: int, *words: str, number: int = signal.SIGTERM) -> dict[str, Any]:
    """Run until a signal comes at ``batch``; return the checkpoint."""
    cfg = compose_small(folder, *words)
    with open_dict(cfg):
        cfg.callbacks.stop = {"_target_": f"{__name__}.SignalAt", "batch": batch, "number": int(number)}
    with pytest.raises(Stopped, match=f"stopped by {signal.Signals(number).name} after step"):
        run(cfg)
    return read(folder / "checkpoints" / "last.ckpt")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run(compose_small(folder, *WORDS))
    return folder


def assert_equal(folder: Path, whole: Path, ended: bool = False) -> None:
    """Compare two runs; one that ``ended`` within an epoch also has the rows of its end: two of the validation."""
    expected, found = state(whole), state(folder)
    for key, value in expected.items():
        assert same(value, found[key]), key
    own, logged = rows(whole), rows(folder)
    assert [row for row in logged if row in own] == own
    assert len(logged) <= len(own) + (4 if ended else 0)


def test_schedules_and_hardening_count_optimiser_steps(whole: Path) -> None:
    found = rows(whole)
    course = {
        int(r["step"]): float(r["while_training/schedule/gate.entropy_weight"]) for r in found if "train/step_loss" in r
    }
    assert sorted(course) == list(range(12))
    assert [round(course[step] / course[11], 6) for step in range(8)] == [round(min(1, s / 6), 6) for s in range(8)]
    assert next(int(row["step"]) for row in found if "while_training/permutation_soft_to_hard" in row) == 6


@pytest.mark.parametrize(("batch", "step"), [(0, 1), (9, 4), (14, 6)])
def test_run_stopped_within_an_accumulated_step_resumes_exactly(
    batch: int, step: int, whole: Path, tmp_path: Path
) -> None:
    assert interrupted(tmp_path, batch, *WORDS)["global_step"] == step
    torch.manual_seed(99)
    go_on(tmp_path)
    assert_equal(tmp_path, whole)


class KilledError(Exception):
    """Stands for a kill."""


class KillAt(Callback):
    def __init__(self, batch: int) -> None:
        self.left = batch

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.left -= 1
        if self.left == -1:
            raise KilledError


@pytest.mark.parametrize(("batch", "step"), [slow(8, 2), (14, 4), (19, 6)])
def test_run_saved_every_few_steps_resumes_exactly(batch: int, step: int, whole: Path, tmp_path: Path) -> None:
    cfg = compose_small(tmp_path, *WORDS, "callbacks.last.every_steps=2")
    with open_dict(cfg):
        cfg.callbacks.stop = {"_target_": f"{__name__}.KillAt", "batch": batch}
    with pytest.raises(KilledError):
        run(cfg)
    assert read(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == step
    go_on(tmp_path)
    assert_equal(tmp_path, whole)


WITHIN = [*WORDS, "trainer.accumulate_grad_batches=1", "trainer.val_check_interval=3", "trainer.max_epochs=2"]


@pytest.fixture(scope="module")
def validated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("validated")
    run(compose_small(folder, *WITHIN))
    return folder


@pytest.mark.parametrize("batch", [slow(1), 2, 5, 9])
def test_run_that_validates_within_epochs_resumes_exactly(batch: int, validated: Path, tmp_path: Path) -> None:
    assert len([row for row in rows(validated) if "val/loss" in row]) == 6
    interrupted(tmp_path, batch, *WITHIN, number=signal.SIGHUP)
    go_on(tmp_path)
    assert_equal(tmp_path, validated)


def test_run_that_max_steps_ends_within_an_epoch_goes_on(whole: Path, tmp_path: Path) -> None:
    assert interrupted(tmp_path, 9, *WORDS, "trainer.max_steps=6")["global_step"] == 4  # at the end of an epoch
    go_on(tmp_path)
    assert read(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 6
    go_on(tmp_path, "trainer.max_steps=-1")
    assert_equal(tmp_path, whole, ended=True)


class TimeIsUp(Callback):
    """Ask the trainer to stop at a batch, as ``trainer.max_time`` does."""

    def __init__(self, batch: int) -> None:
        self.left = batch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.left -= 1
        if self.left == -1:
            trainer.should_stop = True


@pytest.mark.parametrize("batch", [slow(3), 13])
def test_run_that_time_ends_within_an_epoch_goes_on(batch: int, whole: Path, tmp_path: Path) -> None:
    cfg = compose_small(tmp_path, *WORDS)
    with open_dict(cfg):
        cfg.callbacks.stop = {"_target_": f"{__name__}.TimeIsUp", "batch": batch}
    run(cfg)
    assert read(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == {3: 2, 13: 6}[batch]
    go_on(tmp_path)
    assert_equal(tmp_path, whole, ended=True)


OPTIONS = [
    ["trainer.overfit_batches=2", "data=synthetic_pairs"],
    ["trainer.val_check_interval=3", "trainer.check_val_every_n_epoch=null", "trainer.num_sanity_val_steps=1"],
    [
        *("trainer.val_check_interval=0.5", "trainer.limit_train_batches=0.9"),
        *("trainer.gradient_clip_val=1", "trainer.gradient_clip_algorithm=value"),
    ],
    [
        *("trainer.check_val_every_n_epoch=2", "trainer.limit_train_batches=2"),
        *("trainer.limit_val_batches=1", "trainer.limit_test_batches=1"),
    ],
    ["trainer.fast_dev_run=true"],
    [
        *("trainer.deterministic=true", "trainer.detect_anomaly=true", "trainer.profiler=simple"),
        *("trainer.gradient_clip_val=1", "trainer.max_time=00:00:00:05"),
    ],
]


@pytest.mark.parametrize("words", OPTIONS, ids=" ".join)
def test_options_of_the_trainer(words: list[str], tmp_path: Path) -> None:
    try:
        value = run(compose_small(tmp_path, *words))
    finally:
        torch.use_deterministic_algorithms(False)
    assert value > 0
    assert (tmp_path / "results.json").is_file()


def test_overfitting_repeats_the_same_batches(tmp_path: Path) -> None:
    class Seen(Callback):
        rows: ClassVar[list[torch.Tensor]] = []

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            Seen.rows.append(next(iter(batch.inputs.values())).clone())

    globals()["Seen"] = Seen
    cfg = compose_small(tmp_path, "trainer.overfit_batches=2", "trainer.max_epochs=3")
    with open_dict(cfg):
        cfg.callbacks.seen = {"_target_": f"{__name__}.Seen"}
    run(cfg)
    assert len(Seen.rows) == 6
    assert all(torch.equal(Seen.rows[batch], Seen.rows[batch % 2]) for batch in range(6))
    assert not torch.equal(Seen.rows[0], Seen.rows[1])
