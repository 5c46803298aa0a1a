"""Runs on a table that is streamed: killed and resumed, in two processes, and used without its files."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import mtl
from mtl.checkpoints.files import CheckpointIO, read
from mtl.checks import InputError
from mtl.pipeline.run import run
from tests.conftest import ROOT
from tests.integration.helpers import NARROW, resume_small
from tests.integration.test_processes import BASE, course, ended, fork, one_equals_two, result, same
from tests.programs import LIMIT, Forked

STEPS = 12  # of an epoch: 760 training rows in batches of 64
WORDS = [
    *("data=table", "data.window_rows=256", "data.eval_batch_size=70", "trainer.max_epochs=3"),
    *(
        "data.tasks={click: {kind: binary}, stars: {kind: regression}}",
        "data.split.by=column",
        "data.split.column=part",
    ),
    *NARROW,
    *("logger.csv.flush_logs_every_n_steps=1", "callbacks.last.every_n_steps=5"),
]

LINEAR = "blend=[linear]"  # trees take longer than these runs


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of files, the first one a table of them all."""
    draw, count, folder = np.random.default_rng(0), 1000, tmp_path_factory.mktemp("table") / "rows"
    folder.mkdir()
    frame = pl.DataFrame(
        {
            "user": draw.integers(0, 30, count),
            "age": draw.normal(40, 10, count),
            "click": draw.integers(0, 2, count),
            "stars": draw.normal(3, 1, count),
            "part": ["train"] * 760 + ["val", "test"] * 120,
        }
    ).sample(fraction=1, shuffle=True, seed=0)
    for number in range(4):
        frame[number * 250 : (number + 1) * 250].write_parquet(folder / f"{number}.parquet", row_group_size=40)
    frame.write_parquet(folder.parent / "whole.parquet")
    return folder


@pytest.fixture(scope="module")
def whole(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    ended(fork(folder, *BASE[1:], *WORDS, "recipe.dropout=0.3", f"data.path={rows}", "data.batch_size=64", LINEAR))
    assert len(course(folder)) == 3 * STEPS
    return folder


def test_two_processes_equal_one(rows: Path, tmp_path: Path) -> None:
    words = [*BASE, *WORDS, "recipe.dropout=0", f"data.path={rows}", "trainer.max_epochs=2"]
    one_equals_two(tmp_path, words, 64, 2 * STEPS)


def test_killed_within_an_epoch_resumes_exactly(whole: Path, rows: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [*BASE[1:], *WORDS, "recipe.dropout=0.3", f"data.path={rows}/*.parquet", "data.batch_size=64", LINEAR]
    running, log = fork(folder, *words), folder / "csv" / "metrics.csv"
    deadline = time.monotonic() + LIMIT
    while not log.exists() or len(course(folder)) < STEPS + 6:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.signal(signal.SIGKILL)
    assert running.wait().status == -signal.SIGKILL
    last = folder / "checkpoints" / "last.ckpt"
    saved = read(last)["global_step"]
    assert STEPS < saved < 3 * STEPS
    assert saved % STEPS
    ended(Forked([f"ckpt={last}", "callbacks.progress=null"], tmp_path / "output", cwd=ROOT))
    found, expected = course(folder), course(whole)
    found.setdefault(saved - 1, expected[saved - 1])  # lost by a kill between the checkpoint and the row of its step
    assert found == expected
    same(folder, whole)


def test_checkpoint_alone_predicts_the_rows_of_the_test(whole: Path, rows: Path) -> None:
    """The metric of the predictions is the one that the run reports."""
    test = pl.read_parquet(rows / "*.parquet").filter(pl.col("part") == "test")
    found = mtl.load(whole / "checkpoints" / "best.ckpt", model="network").predict(test)
    error = float(((found["stars_prediction"] - test["stars"]) ** 2).mean())
    assert error == pytest.approx(result(whole)["test/stars/mse"], rel=1e-5)


def test_checkpoint_knows_what_the_rows_of_the_training_taught(whole: Path, rows: Path, tmp_path: Path) -> None:
    """The categories of a test are those of the training, whatever the files hold by now, or if they are gone."""
    copy = tmp_path / "rows"
    shutil.copytree(rows, copy)
    last = whole / "checkpoints" / "last.ckpt"
    words = [f"data.path={copy}", "run_name=test"]
    run(resume_small(last, tmp_path / "before", *words, evaluate=True))
    for file in copy.iterdir():  # a further category, which moves the ids of all others
        frame = pl.read_parquet(file)
        new = pl.when(pl.col("part") == "train", pl.col("user") < 3).then(-1).otherwise("user")
        frame.with_columns(user=new).write_parquet(file)
    run(resume_small(last, tmp_path / "after", *words, evaluate=True))
    assert result(tmp_path / "after") == result(tmp_path / "before")
    with pytest.raises(InputError, match=r"data.path=.*rows has changed"):
        run(resume_small(last, whole, *words, "trainer.max_epochs=4"))
    shutil.rmtree(copy)
    model = mtl.load(last)
    assert model.columns == ["user", "age"]


def test_checkpoint_without_the_state_of_its_data_is_refused(whole: Path, tmp_path: Path) -> None:
    last = whole / "checkpoints" / "last.ckpt"
    content = read(last)
    content.pop("data")
    CheckpointIO().save_checkpoint(content, tmp_path / "without.ckpt")
    with pytest.raises(InputError, match="does not describe its data"):
        mtl.load(tmp_path / "without.ckpt")
