"""Runs with a learning-rate schedule: stopped, resumed, lengthened, with another schedule."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from mtl.checkpoints.files import read
from mtl.cli.run import run
from mtl.training.schedules import rate_factor
from tests.integration.helpers import compose_small, resume_small
from tests.stopping import assert_same, go_on, interrupted

# Two parameter groups, in epochs of 5 batches and 3 steps
WORDS = ["data=synthetic_pairs", "network=routed_dense", "gate=gumbel_matrix", "logger=csv", "data.batch_size=128"]
WORDS += ["trainer.log_every_n_steps=1", "trainer.accumulate_grad_batches=2", "data.tasks_per_step=2"]
LINEAR = ["lr_schedule=linear", "callbacks.lr_schedule.warmup=0.25", "callbacks.lr_schedule.end_factor=0.1"]
PLATEAU = [  # the loss falls, so it never improves in this mode
    *("lr_schedule=plateau", "callbacks.lr_schedule.mode=max", "callbacks.lr_schedule.patience=1"),
    *("callbacks.lr_schedule.warmup_steps=2", "trainer.max_epochs=4"),
]


def course(folder: Path, name: str = "lr") -> dict[int, float]:
    """Return the logged learning rates, or another value, by step."""
    rows = csv.DictReader((folder / "csv" / "metrics.csv").read_text().splitlines())
    return {int(row["step"]): float(value) for row in rows if (value := row.get(f"train/{name}"))}


def scheduled(folder: Path) -> list[int]:
    """Return the steps at which the entropy weight was scheduled."""
    return list(course(folder, "schedule/gate.entropy_weight"))


def groups(folder: Path) -> Any:
    return read(folder / "checkpoints" / "last.ckpt")["optimizer_states"][0]["param_groups"]


def test_stopped_run_resumes_exactly_and_keeps_its_schedule(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(compose_small(whole, *WORDS, *PLATEAU))
    interrupted(parts, 12, *WORDS, *PLATEAU)
    go_on(parts)  # no option is repeated
    assert_same(parts, whole)
    assert course(parts) == course(whole)
    rates, factors = list(course(whole).values()), groups(whole)
    assert rates[0] == 0
    assert rates[-1] == pytest.approx(max(rates) * 0.25)  # the third and fourth epoch began lower
    assert len(factors) == 2
    assert {group["lr"] / group["initial_lr"] for group in factors} == {factors[0]["lr"] / factors[0]["initial_lr"]}
    assert factors[0]["initial_lr"] != factors[1]["initial_lr"]


SHORT = ["logger=csv", "trainer.log_every_n_steps=1", "trainer.max_epochs=1"]  # of 5 steps, with a rate of 0.01


def test_resuming_with_another_length_and_then_other_schedules(tmp_path: Path) -> None:
    run(compose_small(tmp_path, *LINEAR, *SHORT))
    last = tmp_path / "checkpoints" / "last.ckpt"
    longer = resume_small(last, tmp_path, "trainer.max_epochs=2")
    kept = longer.callbacks.lr_schedule
    assert (kept.shape, kept.warmup, kept.end_factor) == ("linear", 0.25, 0.1)
    run(longer)
    rates = course(tmp_path)
    before, after = (rate_factor(4, 1.25, 5, "linear", 0.1), rate_factor(5, 2.5, 10, "linear", 0.1))
    assert [rates[4], rates[5]] == pytest.approx([0.01 * before, 0.01 * after])
    assert groups(tmp_path)[0]["lr"] < 0.005
    assert scheduled(tmp_path) == list(range(10))
    plateau = resume_small(last, tmp_path, "lr_schedule=plateau", "schedule=none", "trainer.max_epochs=3")
    assert plateau.callbacks.lr_schedule._target_ == "mtl.callbacks.lr_schedule.PlateauRate"
    run(plateau)
    assert groups(tmp_path)[0]["lr"] == groups(tmp_path)[0]["initial_lr"] == 0.01
    assert scheduled(tmp_path) == list(range(10))  # no longer
    one_cycle = resume_small(last, tmp_path, "lr_schedule=one_cycle", "schedule=entropy_weight", "trainer.max_epochs=4")
    run(one_cycle)
    assert course(tmp_path)[15] == pytest.approx(0.01 * rate_factor(15, 6, 20, "cosine", 1e-4, "cosine", 0.04))
    assert scheduled(tmp_path) == [*range(10), *range(15, 20)]
