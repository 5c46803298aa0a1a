"""``mtl compare``: which of two networks is better on the same rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal
from scipy.stats import norm

import mtl
from mtl.checks import InputError
from mtl.cli.use import compare as command
from mtl.files.run_files import PREDICTIONS
from mtl.report.statistics import Difference, holm
from mtl.runs.predictions_file import write_predictions
from mtl.training.labeled_predictions import LabeledPredictions
from mtl.training.metrics import value_of
from mtl.types import TaskSpec
from mtl.use.compare import KINDS, _compared, _outcome, compare_runs, in_words, of_many_tasks
from tests.unit.test_fit import QUICK, visits

TASKS: dict[str, Any] = {
    "clicked": "binary",
    "minutes": {"kind": "regression", "metrics": ["mae"]},
    "plan": {"kind": "multiclass", "metrics": ["macro_f1"]},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return mtl.fit(visits(600), TASKS, **QUICK | {"max_epochs": 8})


@pytest.fixture(scope="module")
def worse() -> Any:
    """Return a network without the column that matters, with other scales and another metric."""
    tasks = {**TASKS, "minutes": {"kind": "regression", "transform": "log"}}
    return mtl.fit(visits(300, seed=1).drop("age").filter(pl.col("minutes") > 0), tasks, **QUICK)


def test_interval_is_that_of_numpy(model: Any, worse: Any) -> None:
    """The difference of the mean absolute errors in the unit of the labels, and the interval of a bootstrap by hand."""
    rows = visits(400, seed=3).filter(pl.col("minutes").is_null() | (pl.col("minutes") > 0))
    found = mtl.compare(model, worse, rows, seed=1).row(by_predicate=pl.col("task") == "minutes", named=True)
    known = rows["minutes"].is_not_null().to_numpy()
    errors = [
        np.abs(each.predict(rows)["minutes_prediction"].to_numpy() - rows["minutes"].to_numpy())[known]
        for each in (model, worse)
    ]
    assert (found["rows"], found["metric"], found["verdict_on_b"]) == (known.sum(), "mae", "worse")
    assert [found["value_a"], found["value_b"]] == pytest.approx([each.mean() for each in errors])
    assert found["difference"] == pytest.approx(found["value_b"] - found["value_a"])
    draw = np.random.default_rng(7)
    change = errors[1] - errors[0]
    means = [change[draw.integers(0, len(change), len(change))].mean() for _ in range(4000)]
    low, high = np.quantile(means, [0.025, 0.975])
    assert [found["low"], found["high"]] == pytest.approx([low, high], abs=0.1 * (high - low))


def test_equal_networks_do_not_differ(model: Any) -> None:
    for margin in (None, 0.01):
        found = mtl.compare(model, model, visits(100, seed=3), margin=margin, resamples=100)
        assert found["difference"].to_list() == [0.0, 0.0, 0.0]
        assert found["verdict_on_b"].unique().to_list() == ["as good"]
        assert "clicked: there is no difference" in in_words(found, margin)[0]


def test_better_network_is_found_in_either_order(model: Any, worse: Any) -> None:
    rows = visits(400, seed=3).filter(pl.col("minutes").is_null() | (pl.col("minutes") > 0))
    first, second = (mtl.compare(*pair, rows, resamples=200) for pair in ((worse, model), (model, worse)))
    assert first.filter(task="clicked")["verdict_on_b"][0] == "better"
    assert second.filter(task="clicked")["verdict_on_b"][0] == "worse"
    assert [each.filter(task="minutes")["metric"][0] for each in (first, second)] == ["mse", "mae"]
    one, other = (each.filter(pl.col("task") != "minutes")["difference"].to_list() for each in (first, second))
    assert one == pytest.approx([-value for value in other])
    wide = mtl.compare(worse, model, rows, resamples=200, margin=100.0)
    assert wide["verdict_on_b"].unique().to_list() == ["as good"]
    assert mtl.compare(worse, model, rows, resamples=200).equals(first)
    assert isinstance(
        mtl.compare(worse, model, pd.DataFrame(rows.to_dict(as_series=False)), resamples=100), pd.DataFrame
    )


def test_no_difference_is_rarely_taken_for_one() -> None:
    """Of two equally good predictions, about 5 % are called different; the interval has the true value as often."""
    task, draw, inside = TaskSpec("y", "regression"), np.random.default_rng(0), []
    for _ in range(150):
        label, noise = draw.normal(size=120), draw.normal(size=(2, 120))
        pair = [LabeledPredictions(torch.tensor(label + each), torch.tensor(label)) for each in noise]
        row, _ = _compared(task, "mae", pair, 100, draw)
        inside.append(row["low"] <= 0 <= row["high"])
    assert 0.9 <= np.mean(inside) <= 0.99


def test_resamples_of_large_files_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resample of a few rows gives the interval of all rows."""
    task, draw = TaskSpec("y", "regression"), np.random.default_rng(0)
    label, noise = draw.normal(size=5000), draw.normal(size=(2, 5000))
    pair = [LabeledPredictions(torch.tensor(label + each), torch.tensor(label)) for each in noise]
    monkeypatch.setattr("mtl.use.compare.MAX_RESAMPLE_ROWS", 500)
    _, difference = _compared(task, "mae", pair, 1000, draw)
    change = np.abs(noise[1]) - np.abs(noise[0])
    assert difference.sem == pytest.approx(change.std() / np.sqrt(5000), rel=0.1)


def test_groups_are_resampled_whole() -> None:
    """A ranking metric has the error of its groups' values; of a group drawn twice, each is a group."""
    task, draw, groups = TaskSpec("y", "binary", metrics=("ndcg@3",)), np.random.default_rng(0), np.repeat(range(60), 5)
    label = draw.integers(0, 2, 300)
    label[::5] = 1  # each group has a positive
    scores = [label + draw.normal(0, spread, 300) for spread in (0.3, 2.0)]
    own = (torch.tensor(label), torch.tensor(groups))
    pair = [LabeledPredictions(torch.tensor(each), own[0], groups=own[1]) for each in scores]
    row, difference = _compared(task, "ndcg@3", pair, 1000, draw)
    parts = [own[1] == group for group in range(60)]
    each = [
        [
            value_of("binary", "ndcg@3", LabeledPredictions(one.prediction[part], own[0][part], groups=own[1][part]))
            for part in parts
        ]
        for one in pair
    ]
    change = np.subtract(each[1], each[0])
    assert row["difference"] == pytest.approx(change.mean())
    assert difference.sem == pytest.approx(change.std() / np.sqrt(60), rel=0.1)


def test_slices_are_corrected_together(model: Any, worse: Any) -> None:
    """Values with fewer than 50 labelled rows are left out; a slice of one class has no AUROC."""
    rows = visits(600, seed=3).filter(pl.col("minutes").is_null() | (pl.col("minutes") > 0))
    rows = rows.with_columns(clicked=pl.when(pl.col("city") == "Oslo").then(1).otherwise("clicked"))
    found = mtl.compare(model, worse, rows, by="city", resamples=200)
    slices = found.filter(pl.col("by").is_not_null())
    assert slices["by"].unique().sort().to_list() == ["Lyon", "Oslo", "Rome"]
    oslo = slices.row(by_predicate=(pl.col("by") == "Oslo") & (pl.col("task") == "clicked"), named=True)
    assert [oslo[name] for name in ("value_a", "difference", "low", "p", "verdict_on_b")] == [None] * 5
    assert oslo["rows"] > 50
    known = slices.filter(pl.col("p").is_not_null())
    errors = (known["high"] - known["low"]) / 2 / norm.isf(0.025)
    alone = 2 * norm.sf(np.abs(known["difference"] / errors))
    large = np.array(holm(alone.tolist())) > 1e-4  # where the normal distribution is near Student's
    assert known["p"].to_numpy()[large] == pytest.approx(np.array(holm(alone.tolist()))[large], rel=0.3)
    assert "minutes: of 3 values, B is worse for Lyon, Oslo" in "\n".join(in_words(found, None))
    alone = mtl.compare(model, worse, rows, resamples=200)
    assert found.filter(pl.col("by").is_null()).equals(alone)  # which the slices do not change
    with pytest.raises(InputError, match="no value of column 'age' has 50 rows with a label"):
        mtl.compare(model, worse, rows[:60], by="age", resamples=100)


def test_task_without_labels_is_undefined(model: Any, worse: Any) -> None:
    rows = visits(100, seed=3).with_columns(clicked=pl.lit(None, dtype=pl.Int64), minutes=pl.lit(30.0))
    found = mtl.compare(model, worse, rows, resamples=100).row(0, named=True)
    assert (found["task"], found["rows"], found["verdict_on_b"]) == ("clicked", 0, None)
    assert [found[name] for name in ("value_a", "value_b", "difference", "low", "high", "p")] == [None] * 6


def test_networks_that_do_not_fit_are_one_message(model: Any) -> None:
    rows = visits(300)
    fewer = mtl.fit(rows.filter(pl.col("plan") != "gold"), {"plan": "multiclass"}, **QUICK | {"max_epochs": 1})
    with pytest.raises(InputError, match=r"network B: .*column 'plan'.*gold.*does not occur in the training rows"):
        mtl.compare(model, fewer, rows)
    other = mtl.fit(rows, {"clicked": {"kind": "binary", "positive": 0}}, **QUICK | {"max_epochs": 1})
    with pytest.raises(InputError, match=r"task 'clicked': the networks read other labels.*the same positive class"):
        mtl.compare(model, other, rows)
    with pytest.raises(InputError, match="no task of the same name"):
        mtl.compare(fewer, other, rows)
    with pytest.raises(InputError, match=r"has no column 'town'"):
        mtl.compare(model, model, rows, by="town")
    with pytest.raises(InputError, match="margin=0: must be greater than 0"):
        mtl.compare(model, model, rows, margin=0)


def test_later_task_of_a_chain_is_compared_alone(model: Any) -> None:
    """Network A has the task before it, B has not."""
    rows = visits(300).with_columns(bought=pl.col("clicked") * (pl.col("city") == "Oslo").cast(int))
    rows = rows.drop_nulls()
    tasks = {"clicked": "binary", "bought": {"kind": "binary", "after": "clicked"}}
    chain = mtl.fit(rows, tasks, **QUICK | {"max_epochs": 1})
    alone = mtl.fit(rows.drop("clicked"), {"bought": "binary"}, **QUICK | {"max_epochs": 1})
    found = mtl.compare(chain, alone, rows, resamples=100)
    assert found["task"].to_list() == ["bought"]
    metric = found["metric"][0]
    assert [found["value_a"][0], found["value_b"][0]] == [
        each.evaluate(rows)[f"bought/{metric}"] for each in (chain, alone)
    ]


def test_command_shows_and_writes(model: Any, worse: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = visits(200, seed=3).filter(pl.col("minutes").is_null() | (pl.col("minutes") > 0))
    rows.write_parquet(tmp_path / "rows.parquet")
    model.save(tmp_path / "a.ckpt")
    worse.save(tmp_path / "b.ckpt")
    given = [str(tmp_path / name) for name in ("a.ckpt", "b.ckpt", "rows.parquet")]
    given += ["--device", "cpu", "--resamples", "100"]
    command([*given, "-o", str(tmp_path / "found.parquet")])
    assert "clicked: B is worse (auroc -" in capsys.readouterr().out
    assert pl.read_parquet(tmp_path / "found.parquet").equals(mtl.compare(model, worse, rows, resamples=100))
    command(given)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if " auroc " in line] == ["clicked"]


def test_stored_predictions_give_the_comparison_of_the_networks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs are compared on the rows of their tests; those of another split are refused."""
    rows, test, (a, b, c) = visits(300), visits(100, seed=3), (str(tmp_path / name) for name in "abc")
    quick = QUICK | {"max_epochs": 1, "blend": "none"}
    first = mtl.fit(rows, TASKS, test=test, folder=a, **quick)
    second = mtl.fit(rows, TASKS, test=test, folder=b, network="shared_bottom", seed=1, **quick)
    expected = mtl.compare(first, second, test, resamples=100)
    assert expected["difference"].ne(0).all()
    file = tmp_path / "found.csv"
    command([a, f"{b}/checkpoints/best.ckpt", "--resamples=100", "-o", str(file)])
    assert_frame_equal(pl.read_csv(file, schema_overrides=expected.schema), expected)
    assert "3 comparisons\nclicked: " in capsys.readouterr().out
    shuffled = quick | {"options": {**quick["options"], "data.seed": 1}}
    for folder, options in ((c, quick), (str(tmp_path / "d"), shuffled)):
        mtl.fit(rows, TASKS, folder=folder, **options)
    for words, message in (
        ([c, str(tmp_path / "d")], "were tested on different rows: their files, split options or data.seed differ"),
        ([a, b, "--by", "city"], "--by city: give the table with this column"),
        ([a, str(tmp_path)], f"{tmp_path} has no predictions.parquet: give a FILE"),
        ([a, b, "-o", f"{a}/{PREDICTIONS}"], "this is the file of the rows"),
    ):
        with pytest.raises(SystemExit, match=re.escape(message)):
            command(words)


def stored(folder: Path, task: TaskSpec, rows: LabeledPredictions) -> Path:
    """Return a run folder with what a network has predicted for the labelled rows of its test."""
    folder.mkdir()
    write_predictions(folder / PREDICTIONS, {("test", "network"): {task.name: rows}}, [task], {}, {"test": "digest"})
    return folder


def test_stored_rows_and_classes_are_those_of_both(tmp_path: Path) -> None:
    """Only rows with a label in both count, and classes are compared by name, however they are numbered."""
    label, right = torch.tensor([0, 1, 2, 1]), torch.tensor([True, True, False, True])
    a = TaskSpec("plan", "multiclass", 3, classes=("x", "y", "z"), metrics=("accuracy",))
    b = TaskSpec("plan", "multiclass", 3, classes=("z", "x", "y"), metrics=("logloss",))
    of_a = LabeledPredictions(torch.where(right, label, (label + 1) % 3), label, row_id=torch.tensor([0, 2, 3, 7]))
    others = torch.tensor([2, 1, 0])  # rows 7, 5, 2 in B's numbers of y, x, z
    of_b = LabeledPredictions(torch.tensor([2, 1, 1]), others, row_id=torch.tensor([7, 5, 2]))
    folders = [stored(tmp_path / name, *run) for name, run in {"a": (a, of_a), "b": (b, of_b)}.items()]
    with pytest.raises(InputError, match="task 'plan': the networks read other labels from the same rows"):
        compare_runs(*folders)
    agreed = LabeledPredictions(of_b.prediction, torch.tensor([2, 1, 2]), row_id=of_b.row_id)
    found = compare_runs(folders[0], stored(tmp_path / "agreed", b, agreed)).row(0, named=True)
    assert [found[name] for name in ("rows", "metric", "value_a", "value_b")] == [2, "accuracy", 1.0, 0.5]


def test_a_metric_needs_what_both_runs_have_stored(tmp_path: Path) -> None:
    label = torch.tensor([0, 1, 2])
    task = TaskSpec("plan", "multiclass", 3, metrics=("auroc",))
    a = stored(tmp_path / "a", task, LabeledPredictions(label, label, scores=torch.eye(3), row_id=label))
    b = stored(tmp_path / "b", task, LabeledPredictions(label, label, row_id=label))
    assert compare_runs(a, a)["value_a"].to_list() == [1.0]
    with pytest.raises(InputError, match=r"task 'plan': .*/b has no scores to compute auroc; give a FILE"):
        compare_runs(a, b)


def test_stored_quantiles_that_differ_are_compared_by_the_middle_one(tmp_path: Path) -> None:
    value, folders = torch.tensor([1.0, 2.0, 4.0]), []
    for name, quantiles in (("a", (0.1, 0.5)), ("b", (0.2, 0.5))):
        task = TaskSpec("minutes", "regression", loss="quantile", quantiles=quantiles)
        rows = LabeledPredictions(value, value - 1, pinball=value, covered=value > 0, row_id=torch.arange(3))
        folders.append(stored(tmp_path / name, task, rows))
    assert compare_runs(*folders).select("metric", "value_a").row(0) == ("mae", 1.0)
    assert compare_runs(folders[0], folders[0]).select("metric", "value_a").row(0) == ("pinball", pytest.approx(7 / 3))


def test_many_tasks_are_the_units_of_the_comparison() -> None:
    rows = [
        {"task": f"t{n}", "rows": 40 + n, "metric": "mse", "difference": -0.1 - n / 1e4, "verdict_on_b": "better"}
        for n in range(70)
    ]
    table = pl.DataFrame([*rows, {"task": "u", "rows": 3, "metric": "mse"}], KINDS)
    assert of_many_tasks(table[:60]) == []
    [shown] = of_many_tasks(table)
    assert shown.title == "mse: how much better B is, by labels"
    assert [row[:2] for row in shown.rows] == [["all", "70 of 71"], ["below 50", "10 of 11"], ["50 to 199", "60 of 60"]]
    assert shown.rows[0][2].startswith("+0.1035 [")
    assert shown.rows[0][-1] == "100%"


@pytest.mark.parametrize(
    ("metric", "value", "change", "same"),
    [
        ("auroc", 0.8, -0.015, True),
        ("auroc", 0.8, -0.025, False),
        ("mse", 900.0, 15.0, True),
        ("mse", 900.0, 20.0, False),
    ],
)
def test_a_margin_is_relative_to_the_scale_of_the_metric(metric: str, value: float, change: float, same: bool) -> None:
    row = {"metric": metric, "value_a": value, "difference": change, "task": "t", "by": None, "rows": 9}
    verdict = _outcome(row, Difference(-abs(change), abs(change) / 1000, 100, 100, 99), 0.0, 0.02)
    assert verdict == ("as good" if same else "worse")
    [line] = in_words(pl.DataFrame([row | {"low": None, "high": None, "verdict_on_b": "as good"}]), 0.02)
    assert f"no difference that would matter, {'0.02' if metric == 'auroc' else '18'} (" in line
