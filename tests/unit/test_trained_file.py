"""A file that a network was trained on, and cells that training says little about, are noticed."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

import mtl
from mtl.cli.use import predict
from mtl.pipeline.run import run
from mtl.use.serve import Predictor
from tests.integration.helpers import compose_small, resume_small, train_table
from tests.unit.test_fit import visits

CLICKED = ("data.tasks.clicked={kind: binary}", "data.ignore=[plan,minutes]", "data.seed=1")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_test_on_the_file_of_the_training_says_so(
    suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In memory and streamed, under another name too."""
    path, rows = tmp_path / f"rows.{suffix}", visits(300).drop_nulls("clicked")
    rows.write_csv(path) if suffix == "csv" else rows.write_parquet(path)
    words = (
        "data=table",
        f"data.path={path}",
        f"data.window_rows={'null' if suffix == 'csv' else 4096}",
        *CLICKED,
        "recipe.num_experts=3",
        "~logger",
    )
    run(compose_small(tmp_path / "run", *words, "recipe.expert_units=[8]"))
    best = tmp_path / "run" / "checkpoints" / "best.ckpt"
    run(resume_small(best, tmp_path / "own", evaluate=True))
    other = tmp_path / f"other.{suffix}"
    rows[:100].write_csv(other) if suffix == "csv" else rows[:100].write_parquet(other)
    run(resume_small(best, tmp_path / "other", f"data.test_path={other}", evaluate=True))
    assert "was trained on" not in caplog.text
    copy = path.rename(tmp_path / f"copy.{suffix}")
    run(resume_small(best, tmp_path / "again", f"data.test_path={copy}", evaluate=True))
    assert f"copy.{suffix}: the network was trained on rows of this file" in caplog.text


def test_unknown_categories_and_far_numbers_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = train_table(tmp_path, visits(), *CLICKED)
    caplog.clear()
    rows = visits(50, seed=1)
    rows.write_csv(tmp_path / "usual.csv")
    predict([str(folder), str(tmp_path / "usual.csv"), "-o", str(tmp_path / "usual.parquet")])
    assert not caplog.messages
    odd = pl.int_range(50) % 10 == 0
    rows = rows.with_columns(city=pl.when(odd).then(pl.lit("Ulm")).otherwise("city"))
    rows = rows.with_columns(age=pl.when(pl.int_range(50) == 3).then(1e4).otherwise("age"))
    rows.write_csv(tmp_path / "odd.csv")
    predict([str(folder), str(tmp_path / "odd.csv"), "-o", str(tmp_path / "odd.parquet")])
    counted = "unknown or rare categories: 5 (city 5); numbers far outside the training rows: 1 (age 1)"
    assert caplog.messages == [f"{tmp_path}/odd.csv, {counted}"]
    with Predictor(mtl.load(folder)) as predictor:
        predictor.submit([{"age": 40, "city": "Ulm", "visits": 3}] * 2).result()
        assert predictor.unusual_cells == "unknown or rare categories: 2 (city 2)"
    assert caplog.messages[-1] == "all requests, unknown or rare categories: 2 (city 2)"
