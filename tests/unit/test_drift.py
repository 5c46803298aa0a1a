"""``mtl drift``: what has changed since the training is found, and ordinary rows give no alarm."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from mtl.data_modules.tables.encoder import TableEncoder
from scipy.stats import chi2_contingency

import mtl
from mtl.checks import InputError
from mtl.cli.use import DRIFTED
from mtl.cli.use import drift as command
from mtl.cli.use import predict as predict_command
from mtl.types import RowEncoder
from mtl.use.drift import MIN_FRACTION, p_value, psi
from mtl.use.predict import _warn_of_drift
from tests.unit.test_fit import QUICK

DAYS = 50
TASKS = {"clicked": "binary", "plan": "multiclass", "spent": "regression"}


def day(rows: int, seed: int) -> pl.DataFrame:
    """Return rows of one distribution: numbers, common and rare categories, dates, lists; some cells are empty."""
    draw = np.random.default_rng(seed)
    minutes, shop = draw.gamma(2.0, 30.0, rows), draw.zipf(1.3, rows).clip(max=3000)
    table = pl.DataFrame(
        {
            "minutes": minutes,
            "children": draw.poisson(1.5, rows),
            "member": draw.integers(0, 2, rows),
            "share": np.where(draw.random(rows) < 0.6, 0.0, draw.random(rows)),
            "city": draw.choice(["Lyon", "Oslo", "Rome"], rows, p=[0.6, 0.3, 0.1]),
            "shop": [f"s{number}" for number in shop],  # most shops of the training have few rows, a day has new ones
            "tags": [list(tags) for tags in draw.choice(["a", "b", "c", "d", "e"], (rows, 3))],
            "day": pl.datetime_range(pl.datetime(2025, 1, 1), pl.datetime(2026, 1, 1), eager=True).sample(
                rows, with_replacement=True, seed=seed
            ),
            "clicked": (minutes + draw.normal(0, 30, rows) > 60).astype(int),
            "plan": draw.choice(["basic", "gold", "none"], rows),
            "spent": 0.1 * minutes + draw.normal(0, 1, rows),
        }
    )
    empty = pl.Series(draw.random(rows) < 0.05)
    return table.with_columns(pl.when(~empty).then(pl.col(name)).alias(name) for name in ("minutes", "city", "spent"))


@pytest.fixture(scope="module")
def model() -> Any:
    return mtl.fit(day(3000, 0), TASKS, **QUICK | {"max_epochs": 1})


def drifted(table: pl.DataFrame, kind: str = "column") -> list[str]:
    return table.filter("drifted", kind=kind)["column"].to_list()


def test_histograms_are_those_of_the_training_rows(model: Any) -> None:
    """Against numpy: the bins of numbers and categories, of the rows of which the network was trained."""
    then, now = model.encoder.histograms_of(day(3000, 0), "")["minutes"]
    rows, values = day(3000, 0), day(3000, 0)["minutes"].drop_nulls().to_numpy()
    edges = np.array([-np.inf, *model.encoder.scales["minutes"].edges[1:], np.inf])
    assert now.counts[:-1] == [int(((values >= low) & (values < high)).sum()) for low, high in pairwise(edges)]
    assert now.counts[-1] == rows["minutes"].null_count()
    assert sum(then.counts) == then.rows == model.stored["data"]["rows"]["train"]
    assert then.mean == pytest.approx(values.mean(), rel=0.05)
    _, city = model.encoder.histograms_of(rows, "")["city"]
    counts = [rows["city"].eq(name).sum() for name in model.encoder.vocabularies["city"].values]
    assert city.counts == [*filter(None, counts), 0, 0, rows["city"].null_count()]  # no rare and no unknown ones
    _, tags = model.encoder.histograms_of(rows, "")["tags"]
    assert sum(tags.counts) == sum(len(set(cell)) for cell in rows["tags"])


def test_expected_share_of_unknown_categories(model: Any) -> None:
    """Of a column with many rare categories, new rows have about the share of unknown ones that is expected."""
    shop = model.drift(day(3000, 1)).filter(column="shop")
    assert 0.05 < shop["unknown_reference"][0] < 0.4
    assert shop["unknown"][0] == pytest.approx(shop["unknown_reference"][0], abs=0.03)


def test_population_stability_index_and_chance() -> None:
    """The index is that of numpy, and on large counts the p-value agrees with a chi-squared test on what is chance."""
    then, now = [40, 60, 0], [10, 10, 20]
    p, q = np.array([0.4, 0.6, MIN_FRACTION]), np.array([0.25, 0.25, 0.5])
    assert psi(then, now) == pytest.approx(np.sum((p - q) * np.log(p / q)))
    draw, shares, alarms = np.random.default_rng(0), np.full(10, 0.1), []
    for rows in (5, 20, 500, 50_000):
        pairs = [(draw.multinomial(2000, shares), draw.multinomial(rows, shares)) for _ in range(400)]
        alarms.append(np.mean([p_value(*pair) < 0.05 for pair in pairs]))
        other = draw.multinomial(rows, [0.4, *[0.6 / 9] * 9])
        if rows >= 500:
            assert p_value(pairs[0][0], other) < 1e-10
            assert chi2_contingency([pairs[0][0], other]).pvalue < 1e-10
    assert max(alarms) <= 0.06
    assert p_value([1000, 0], [0, 20]) < 1e-20
    assert p_value([1000, 0], [999, 1]) > 0.2


def test_changed_columns_are_found(model: Any) -> None:
    """Another unit, new categories, more empty cells; the others have not changed."""
    rows = day(500, 1)
    hours = model.drift(rows.with_columns(pl.col("minutes") / 60))
    assert (hours["column"][0], drifted(hours)) == ("minutes", ["minutes"])
    row = hours.row(0, named=True)
    assert row["mean_reference"] / row["mean"] == pytest.approx(60, rel=0.2)
    new = rows.with_columns(pl.when(pl.col("city") == "Lyon").then(pl.lit("Nice")).otherwise("city").alias("city"))
    city = model.drift(new).row(0, named=True)
    assert (city["column"], city["unknown_reference"], city["drifted"]) == ("city", 0.0, True)
    assert city["unknown"] == pytest.approx(rows["city"].drop_nulls().eq("Lyon").mean())
    assert "shop" in drifted(model.drift(rows.filter(pl.col("shop") != "s1")))  # one of many, which has a quarter
    for name in ("minutes", "tags", "day", "member"):
        half = pl.when(pl.int_range(pl.len()) % 2 == 0).then(pl.col(name)).alias(name)
        empty = model.drift(rows.with_columns(half))
        assert drifted(empty) == [name]
        assert empty["missing"][0] > 0.45


def test_changed_predictions_are_found(model: Any) -> None:
    """Only the predictions whose distribution has changed, as for rows with large numbers."""
    rows = day(2000, 1).filter(pl.col("minutes") > 70)
    found = model.drift(rows)
    assert {"clicked", "spent"} <= {*drifted(found, "prediction")}
    spent = found.filter(column="spent", kind="prediction").row(0, named=True)
    assert spent["mean"] > spent["mean_reference"]
    assert spent["mean"] == pytest.approx(
        model.predict(day(2000, 1).filter(pl.col("minutes") > 70))["spent_prediction"].mean()
    )


def test_ordinary_days_give_few_alarms(model: Any) -> None:
    alarms = [model.drift(day(500, seed))["drifted"].sum() for seed in range(1, DAYS + 1)]
    assert sum(alarms) <= 1, sum(alarms)


@pytest.mark.parametrize("rows", [1, 3, 10, 30])
def test_small_files(model: Any, rows: int) -> None:
    """A few rows have a large index by chance, and only a change of all of them tells anything."""
    found = [model.drift(day(rows, seed)) for seed in range(10)]
    assert max(table["psi"][0] for table in found) > 0.2
    assert sum(table["drifted"].sum() for table in found) == 0
    if rows >= 10:
        assert drifted(model.drift(day(rows, 1).with_columns(city=pl.lit("Nice")))) == ["city"]


def test_bad_input_is_one_message(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"has no column 'city'.*which the network reads"):
        model.drift(day(20, 0).drop("city"))
    with pytest.raises(InputError, match="has no rows to compare"):
        model.drift(day(20, 0)[:0])
    with pytest.raises(InputError, match="threshold=0: must be greater than 0"):
        model.drift(day(20, 0), threshold=0)
    unlabelled = replace(model, stored={**model.stored, "predicted": {}}).drift(day(20, 0))
    assert unlabelled.filter(kind="prediction")["psi"].is_null().all()
    assert model.drift(pd.DataFrame(day(20, 0).to_dict(as_series=False)))["column"].tolist() == (
        model.drift(day(20, 0))["column"].to_list()
    )
    monkeypatch.setattr(TableEncoder, "histograms_of", RowEncoder.histograms_of)  # as of rows of user and movie
    with pytest.raises(InputError, match="this checkpoint does not describe its training rows"):
        model.drift(day(20, 0))


def test_command_shows_writes_and_exits(model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model.save(tmp_path / "model.ckpt")
    day(500, 1).write_parquet(tmp_path / "same.parquet")
    day(500, 1).with_columns(pl.col("minutes") / 60).write_parquet(tmp_path / "hours.parquet")
    words = ["--device", "cpu"]
    command([str(tmp_path / "model.ckpt"), str(tmp_path / "same.parquet"), *words])
    assert "of these 500 rows has changed by more than" in capsys.readouterr().out
    changed = [str(tmp_path / "model.ckpt"), str(tmp_path / "hours.parquet"), *words]
    with pytest.raises(SystemExit) as ended:
        command(changed)
    out = capsys.readouterr().out
    assert ended.value.code == DRIFTED
    assert "Changed since the training: minutes, the predictions of " in out
    with pytest.raises(SystemExit) as ended:
        command([*changed, "-o", str(tmp_path / "drift.csv")])
    assert ended.value.code == DRIFTED
    assert pl.read_csv(tmp_path / "drift.csv").height == len(model.columns) + len(TASKS)
    command([*changed, "--threshold", "100"])


def test_predict_warns_of_changed_columns(model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model.save(tmp_path / "model.ckpt")
    rows = day(500, 1).with_columns(pl.col("minutes") / 60)
    for name, frame in (("many", rows), ("few", rows[:150]), ("same", day(500, 1))):
        frame.write_parquet(tmp_path / f"{name}.parquet")
        predict_command([str(tmp_path / "model.ckpt"), str(tmp_path / f"{name}.parquet"), "--device", "cpu"])
    [line] = [message for message in caplog.messages if "changed since" in message]
    assert f"{tmp_path / 'many.parquet'}, changed since the training: minutes; mtl drift" in line
    assert "intervals" not in line
    _warn_of_drift(model, rows, tmp_path, 0.9)
    assert caplog.messages[-1].endswith("; the intervals may not hold 0.9 of the labels")


def crowd(rows: int, seed: int, prefix: str = "u") -> pl.DataFrame:
    """Return rows of 400 users, most of whom have few rows, and a label that has two probabilities only."""
    draw = np.random.default_rng(seed)
    member = draw.integers(0, 2, rows)
    users = [f"{prefix}{number}" for number in draw.integers(0, 400, rows)]
    amount = draw.normal(3.0, 1.0, rows)
    clicked = (draw.random(rows) < 0.2 + 0.5 * member).astype(int)
    return pl.DataFrame({"user": users, "member": member, "amount": amount, "clicked": clicked})


def alarms_of(model: Any, days: int = 10, rows: int = 1000) -> list[list[str]]:
    tables = [model.drift(crowd(rows, seed)) for seed in range(100, 100 + days)]
    return [names for table in tables if (names := drifted(table) + drifted(table, "prediction"))]


def test_many_categories_give_no_alarm() -> None:
    """Bins that are the frequent categories of the training rows would have too high counts there."""
    model = mtl.fit(crowd(1000, 0), {"clicked": "binary"}, **QUICK)
    assert alarms_of(model) == []
    assert drifted(model.drift(crowd(1000, 1).filter(pl.col("member") == 1))) == ["member"]


def test_a_lost_frequent_category_among_many_is_found() -> None:
    """One of 400 users has 5 % of the training rows, and none later."""
    user = pl.when(pl.int_range(pl.len()) % 20 == 0).then(pl.lit("u0")).otherwise("user").alias("user")
    rows = [crowd(4000, 0).with_columns(user), crowd(2000, 1).with_columns(user)]
    model = mtl.fit(rows[0], {"clicked": "binary"}, **QUICK)
    assert drifted(model.drift(rows[1])) == []
    assert drifted(model.drift(rows[1].filter(pl.col("user") != "u0"))) == ["user"]


@pytest.mark.parametrize("inputs", [["user", "member", "amount"], ["member"]], ids=["many values", "two values"])
def test_predictions_are_compared_as_they_are_made(inputs: list[str]) -> None:
    """Calibrated and corrected for sampling, against ``predict`` on the validation rows."""
    valid, options = crowd(600, 1).select(*inputs, "clicked"), QUICK["options"] | {"calibrate": True}
    tasks = {"clicked": {"kind": "binary", "sampling_rate": 0.2, "pos_weight": 8.0}}  # which needs calibration
    frame = crowd(1000, 0).select(*inputs, "clicked")
    model = mtl.fit(frame, tasks, valid=valid, **QUICK | {"options": options})
    assert model.spec.tasks[0].calibration is not None
    probability = model.predict(valid)["clicked_probability"].to_numpy()
    stored = model.stored["predicted"]["clicked"]
    assert stored["mean"] == pytest.approx(probability.mean(), rel=1e-6)
    edges = [-np.inf, *stored["edges"], np.inf]
    assert stored["counts"] == [int(((probability >= a) & (probability < b)).sum()) for a, b in pairwise(edges)]
    row = model.drift(valid, batch_size=7).row(by_predicate=pl.col("kind") == "prediction", named=True)
    assert row["psi"] == pytest.approx(0.0, abs=1e-9)  # also in other batches
    assert row["mean"] == pytest.approx(row["mean_reference"])


def test_a_continued_run_describes_its_own_rows(tmp_path: Path) -> None:
    """Not those of the run that it starts from: other users, another mean."""
    before = crowd(1000, 50, prefix="v").with_columns(pl.col("amount") - 9)
    mtl.fit(before, {"clicked": "binary"}, folder=tmp_path / "first", **QUICK)
    model = mtl.fit(crowd(1000, 0), {"clicked": "binary"}, start_from=tmp_path / "first", **QUICK)
    amount = model.drift(crowd(500, 1)).row(by_predicate=pl.col("column") == "amount", named=True)
    assert amount["mean_reference"] == pytest.approx(amount["mean"], abs=0.15)
    assert alarms_of(model) == []
