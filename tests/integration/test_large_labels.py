"""Regressions whose labels need more digits than float32 has: loss, metrics and predictions are right."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import mtl
from tests.integration.helpers import NARROW, train_table

SIZES = [*NARROW, "recipe.batch_size=64", "recipe.dropout=0"]


def rows(mean: float, std: float, count: int = 600) -> pl.DataFrame:
    """Return rows whose label, ``mean`` +- ``std``, depends on x for the most part."""
    draw = np.random.default_rng(0)
    x, noise = draw.normal(size=(2, count))
    part = ["train"] * (count - 200) + ["val"] * 100 + ["test"] * 100
    return pl.DataFrame({"x": x, "y": mean + std * (0.9 * x + 0.44 * noise), "part": part})


@pytest.mark.parametrize(
    ("mean", "std", "streamed"),
    [(-1e12, 1e3, False), (1e7, 0.5, True)],
)
def test_metrics_and_predictions_have_the_digits_of_the_labels(
    mean: float, std: float, streamed: bool, tmp_path: Path
) -> None:
    table = rows(mean, std)
    words = [
        *SIZES,
        "data.tasks={y: {kind: regression, metrics: [mse, mae, r2, spearman]}}",
        "data.split.by=column",
        "data.split.column=part",
    ]
    if streamed:
        table.write_parquet(tmp_path / "rows.parquet")
        words += ["data.window_rows=1048576", f"data.path={tmp_path}/rows.parquet"]
    folder = train_table(tmp_path, table, *words, "trainer.max_epochs=8", "recipe.learning_rate=0.02")
    reported = json.loads((folder / "results.json").read_text())["numbers"]["test"]["network"]
    test = table.filter(pl.col("part") == "test")
    found = mtl.load(folder / "checkpoints" / "best.ckpt").predict(test)["y_prediction"]
    assert found.dtype == pl.Float64
    assert found.n_unique() > 90  # float32 has 3 numbers at most within these labels; extreme x may have one prediction
    errors = (found - test["y"]).to_numpy()
    assert reported["y/mse"] == pytest.approx(np.mean(errors**2), rel=1e-6)
    assert reported["y/mae"] == pytest.approx(np.mean(np.abs(errors)), rel=1e-6)
    assert reported["y/r2"] == pytest.approx(1 - np.mean(errors**2) / test["y"].var(ddof=0), abs=1e-6)
    assert reported["y/r2"] > 0.6  # of 0.81 that x explains
    assert reported["y/loss"] == pytest.approx(np.mean(errors**2) / table[:400]["y"].var(ddof=0), rel=1e-4)
