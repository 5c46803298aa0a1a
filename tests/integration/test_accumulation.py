"""Runs that accumulate gradients, validate or end within epochs: schedules, saving, resuming, learning rates."""

from __future__ import annotations

import csv
import signal
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pytorch_lightning import Callback

from mtl.checkpoints.files import read
from mtl.pipeline.run import run
from mtl.training.schedules import lr_factor_at
from tests.integration.helpers import compose_small, resume_small
from tests.stopping import assert_same, course, go_on, interrupted, slow, watched

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
TIMES = {"train/seconds_per_epoch"}


def rows(folder: Path) -> list[dict[str, str]]:
    lines = (folder / "csv" / "metrics.csv").read_text().splitlines()
    return [{k: v for k, v in row.items() if v and k not in TIMES} for row in csv.DictReader(lines)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run(compose_small(folder, *WORDS))
    return folder


def assert_equal(folder: Path, whole: Path, ended: bool = False) -> None:
    """Compare two runs; one that ``ended`` within an epoch also has the rows of its end: two of the validation."""
    assert_same(folder, whole, logged=False)
    own, logged = rows(whole), rows(folder)
    assert [row for row in logged if row in own] == own
    assert len(logged) <= len(own) + (4 if ended else 0)


def test_schedules_and_hardening_count_optimiser_steps(whole: Path) -> None:
    found = rows(whole)
    course = {int(r["step"]): float(r["train/schedule/gate.entropy_weight"]) for r in found if "train/step_loss" in r}
    assert sorted(course) == list(range(12))
    assert [round(course[step] / course[11], 6) for step in range(8)] == [round(min(1, s / 6), 6) for s in range(8)]
    assert next(int(row["step"]) for row in found if "train/permutation_soft_to_hard" in row) == 6


@pytest.mark.parametrize(
    ("how", "batch", "step", "words"),
    [
        *(slow(signal.SIGTERM, batch, step, []) for batch, step in ((0, 1), (9, 4))),
        (signal.SIGTERM, 14, 6, []),
        slow("kill", 8, 2, ["callbacks.last.every_n_steps=2"]),
        ("kill", 14, 4, ["callbacks.last.every_n_steps=2"]),
        ("time", 13, 6, []),
    ],
)
def test_run_that_ends_within_an_accumulated_step_resumes_exactly(
    how: Any, batch: int, step: int, words: list[str], whole: Path, tmp_path: Path
) -> None:
    """A killed run goes on from its last save, after every second step."""
    assert interrupted(tmp_path, batch, *WORDS, *words, how=how)["global_step"] == step
    go_on(tmp_path)
    assert_equal(tmp_path, whole, ended=how == "time")


def test_run_that_max_steps_ends_within_an_epoch_goes_on(whole: Path, tmp_path: Path) -> None:
    assert interrupted(tmp_path, 9, *WORDS, "trainer.max_steps=6")["global_step"] == 4  # at the end of an epoch
    go_on(tmp_path)
    assert read(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 6
    go_on(tmp_path, "trainer.max_steps=-1")
    assert_equal(tmp_path, whole, ended=True)


OPTIONS = [
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


class Seen(Callback):
    rows: ClassVar[list[torch.Tensor]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        Seen.rows.append(next(iter(batch.inputs.values())).clone())


def test_overfitting_repeats_the_same_batches(tmp_path: Path) -> None:
    run(watched(compose_small(tmp_path, "trainer.overfit_batches=2", "trainer.max_epochs=3"), Seen))
    assert len(Seen.rows) == 6
    assert all(torch.equal(Seen.rows[batch], Seen.rows[batch % 2]) for batch in range(6))
    assert not torch.equal(Seen.rows[0], Seen.rows[1])


LINEAR = ["lr_schedule=linear", "callbacks.lr_schedule.warmup=0.25", "callbacks.lr_schedule.end_factor=0.1"]


def scheduled(folder: Path) -> list[int]:
    """Return the steps at which the entropy weight was scheduled."""
    return list(course(folder, "schedule/gate.entropy_weight"))


def groups_of(folder: Path) -> Any:
    return read(folder / "checkpoints" / "last.ckpt")["optimizer_states"][0]["param_groups"]


SHORT = ["logger=csv", "trainer.log_every_n_steps=1", "trainer.max_epochs=1"]  # of 5 steps, with a rate of 0.01


def test_resuming_with_another_length_and_then_other_schedules(tmp_path: Path) -> None:
    run(compose_small(tmp_path, *LINEAR, *SHORT))
    last = tmp_path / "checkpoints" / "last.ckpt"
    longer = resume_small(last, tmp_path, "trainer.max_epochs=2")
    kept = longer.callbacks.lr_schedule
    assert (kept.shape, kept.warmup, kept.end_factor) == ("linear", 0.25, 0.1)
    run(longer)
    rates = course(tmp_path, "lr")
    before, after = (lr_factor_at(4, 1.25, 5, "linear", 0.1), lr_factor_at(5, 2.5, 10, "linear", 0.1))
    assert [rates[4], rates[5]] == pytest.approx([0.01 * before, 0.01 * after])
    assert groups_of(tmp_path)[0]["lr"] < 0.005
    assert scheduled(tmp_path) == list(range(10))
    plateau = resume_small(last, tmp_path, "lr_schedule=plateau", "schedule=none", "trainer.max_epochs=3")
    assert plateau.callbacks.lr_schedule._target_ == "mtl.callbacks.lr_schedule.PlateauRate"
    run(plateau)
    assert groups_of(tmp_path)[0]["lr"] == groups_of(tmp_path)[0]["initial_lr"] == 0.01
    assert scheduled(tmp_path) == list(range(10))  # no longer
    one_cycle = resume_small(last, tmp_path, "lr_schedule=one_cycle", "schedule=entropy_weight", "trainer.max_epochs=4")
    run(one_cycle)
    assert course(tmp_path, "lr")[15] == pytest.approx(0.01 * lr_factor_at(15, 6, 20, "cosine", 1e-4, "cosine", 0.04))
    assert scheduled(tmp_path) == [*range(10), *range(15, 20)]
