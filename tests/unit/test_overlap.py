"""Rows that a network was trained on, and cells that training says little about, are noticed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from mtl.data_modules.overlap import MOST, hashes, sample_of, shared_share

import mtl
from mtl.checkpoints.files import read
from mtl.cli.run import run
from mtl.cli.use import predict
from mtl.types import Batch
from mtl.use.export import preprocessing
from mtl.use.serve import Predictor
from tests.integration.helpers import compose_small, resume_small, train_table
from tests.unit.test_fit import visits

CLICKED = ("data.tasks.clicked={kind: binary}", "data.ignore=[plan,minutes]", "data.seed=1")


def batch(numbers: np.ndarray) -> Batch:
    values = torch.tensor(numbers)
    return Batch({"x": values.float()[:, None], "id": values.long() % 7}, {"y": (values % 2).double()})


@pytest.mark.parametrize("rows", [1_000, 50_000])
def test_share_of_rows_that_were_trained_on(rows: int) -> None:
    train, test, new = np.split(np.random.default_rng(0).permutation(3 * rows), 3)
    sample = sample_of(batch(train), batch(test))
    assert len(sample) == min(rows, MOST)
    assert [shared_share(batch(each), sample) for each in (train, test, new)] == [1.0, 0.0, 0.0]
    half = np.concatenate([train[: rows // 2], new[: rows // 2]])
    assert shared_share(batch(half), sample) == pytest.approx(0.5, abs=0.05)
    assert shared_share(batch(train), []) == 0.0


def test_rows_of_several_splits_tell_nothing() -> None:
    few = batch(np.arange(1_000) % 5)
    assert sample_of(few, few) == []


def test_hashes_stay_as_they_are_in_checkpoints() -> None:
    """Also of missing labels and of the two zeros."""
    rows = Batch({"x": torch.tensor([[0.0], [-0.0], [1.5]])}, {"y": torch.tensor([1.0, 1.0, torch.nan])})
    first, second, third = hashes(rows).tolist()
    assert first == second
    assert (first, third) == (17092247697268894003, 2858251730783864642)


def test_a_test_on_training_rows_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = visits(300)
    folder = train_table(tmp_path, rows, *CLICKED)
    best = folder / "checkpoints" / "best.ckpt"
    run(resume_small(best, tmp_path / "own", evaluate=True))
    visits(100, seed=1).write_csv(tmp_path / "new.csv")
    run(resume_small(best, tmp_path / "new", f"data.test_path={tmp_path}/new.csv", evaluate=True))
    assert "was trained on" not in caplog.text
    rows.reverse().write_parquet(tmp_path / "copy.parquet")
    run(resume_small(best, tmp_path / "copy", f"data.test_path={tmp_path}/copy.parquet", evaluate=True))
    assert "copy.parquet: the network was trained on about 80 % of these rows" in caplog.text
    caplog.clear()
    mtl.load(best).evaluate(rows)
    assert "the table: the network was trained on about 80 % of these rows" in caplog.text


def test_a_stream_is_known_by_its_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    visits(300).drop_nulls("clicked").write_parquet(tmp_path / "rows.parquet")
    words = ("data=table_stream", f"data.path={tmp_path}/rows.parquet", *CLICKED, "recipe.num_experts=3", "~logger")
    run(compose_small(tmp_path / "run", *words, "recipe.expert_units=[8]"))
    best = tmp_path / "run" / "checkpoints" / "best.ckpt"
    run(resume_small(best, tmp_path / "own", evaluate=True))
    assert "was trained on" not in caplog.text
    run(resume_small(best, tmp_path / "again", f"data.test_path={tmp_path}/rows.parquet", evaluate=True))
    assert "data.test_path: the network was trained on rows of this file" in caplog.text


def test_exported_preprocessing_has_no_trace_of_rows(tmp_path: Path) -> None:
    folder = train_table(tmp_path, visits(), *CLICKED)
    assert read(folder / "checkpoints" / "best.ckpt")["data"]["trained_on"]
    model = mtl.load(folder)
    assert "trained_on" not in preprocessing(model, model.encode(visits(3)))["data"]


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
