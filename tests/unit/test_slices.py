"""Metrics by the value of a column, and the even split of rare labels."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch
from mtl.data_modules.table import TableDataModule
from omegaconf import OmegaConf
from sklearn.metrics import roc_auc_score

import mtl
from mtl.checks import InputError
from mtl.config import build
from mtl.training.labeled_predictions import LabeledPredictions
from mtl.use import slices
from mtl.use.trained import load

OPTIONS = {
    "recipe.expert_units": [8],
    "recipe.head_units": [8],
    "recipe.embedding_dim": 4,
    "threads": 1,
    "blend": "none",
}


def rows(count: int) -> pl.DataFrame:
    """Return rows whose label follows from ``x``, but not in the north."""
    draw = np.random.default_rng(0)
    x, place = draw.normal(size=count), draw.choice(["north", "south", "east"], count)
    label = np.where(place == "north", draw.random(count) < 0.5, x + 0.3 * draw.normal(size=count) > 0)
    minutes = 2 * x + draw.normal(size=count)
    there = draw.random(count) < 0.8
    return pl.DataFrame(
        {"x": x, "place": place, "buys": label.astype(int), "minutes": np.where(there, minutes, np.nan)}
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slices")
    rows(4000).write_csv(folder / "rows.csv")
    given = {"slices": ["place", "x"], "split": {"fractions": [0.6, 0.1, 0.3]}, "report": True, "options": OPTIONS}
    tasks = {"buys": "binary", "minutes": "regression"}
    mtl.fit(folder / "rows.csv", tasks, folder=folder / "run", max_epochs=3, progress=False, **given)
    return folder / "run"


def test_each_slice_has_the_metrics_of_its_rows(run: Path) -> None:
    """The slice where nothing can be predicted is named; scores equal those of scikit-learn and numpy."""
    record = json.loads((run / "results.json").read_text())
    found = {(one["column"], one["value"], one["task"], one["metric"]): one for one in record["slices"]}
    data = build.build_data(OmegaConf.load(run / "config.yaml"))
    [(test, _)] = data.split_rows()["test"].frames(["x", "place", "buys", "minutes"])
    test = test.cast({"x": pl.Float64, "buys": pl.Int64, "minutes": pl.Float64}, strict=False)
    predicted = load(run, device="cpu").predict(test.drop("buys", "minutes"))
    north = (test["place"] == "north").to_numpy()
    for inside, side in ((north, "score"), (~north, "rest")):
        expected = roc_auc_score(test["buys"].to_numpy()[inside], predicted["buys_probability"].to_numpy()[inside])
        assert found["place", "north", "buys", "auroc"][side] == pytest.approx(
            expected, abs=2e-4
        )  # which breaks ties of float32
    errors = (predicted["minutes_prediction"] - test["minutes"]).fill_null(np.nan).to_numpy()
    known = north & ~np.isnan(errors)
    one = found["place", "north", "minutes", "mse"]
    assert one["rows"] == known.sum()
    assert one["score"] == pytest.approx(np.mean(errors[known] ** 2), abs=1e-5)
    assert one["sem"] == pytest.approx(np.std(errors[known] ** 2) / np.sqrt(known.sum()), rel=0.3)
    assert found["place", "north", "buys", "auroc"]["p"] < 0.001
    assert [text for text in record["advice"] if "buys auroc 0." in text and "place is north" in text]
    quartiles = set(slices.values_of(test["x"], load(run).encoder))
    assert {value for column, value, *_ in found if column == "x"} == quartiles
    assert len(quartiles) == 4
    assert "For whom it is worse" in (run / "report.html").read_text()


@pytest.mark.parametrize("start", [0.0, 1.7e9, 2.0**53 - 100])
def test_quartiles_of_large_numbers_have_names_of_their_own(start: float) -> None:
    encoder = SimpleNamespace(columns_by_name={}, empty=())
    at = pl.Series("at", start + np.arange(100.0))
    counts = slices.values_of(at, encoder).value_counts()["count"]
    assert counts.sort().to_list() == [24, 25, 25, 26]


TASK = mtl.types.TaskSpec("a", "binary")


def test_slices_without_a_difference_give_no_find() -> None:
    """Of 60 pairs of slices that do not differ, about 3 have a p-value below 0.05."""
    generator, finds = torch.Generator().manual_seed(0), 0
    for _ in range(60):
        label = torch.randint(2, (300,), generator=generator)
        prediction = (torch.rand(300, generator=generator) + 0.3 * label) / 1.3
        inside = pl.int_range(300, eager=True) < 100
        [found] = slices.compared(TASK, ["auroc"], LabeledPredictions(prediction, label), inside, "c", "v")
        assert found.p is not None
        finds += found.p < 0.05
    assert finds <= 8


def test_small_and_one_sided_slices_are_undefined() -> None:
    label = torch.tensor([1] * 40 + [0, 1] * 40)
    rows, number = LabeledPredictions(torch.rand(120), label), pl.int_range(120, eager=True)
    [found] = slices.compared(TASK, ["auroc"], rows, number < 40, "c", "v")
    assert (found.rows, found.score, found.sem, found.p) == (40, None, None, None)
    [few] = slices.compared(TASK, ["auroc"], rows, number > 110, "c", "v")
    assert few.score is not None
    assert (few.sem, few.p) == (None, None)


def test_a_metric_without_a_direction_is_neither_worse_nor_better() -> None:
    found = slices.Slice("c", "v", "a", "calibration_ratio", 100, 0.5, 0.01, 1.0, 1e-9)
    assert slices.sentences([found]) == []


def test_the_slices_that_matter_come_first_and_the_others_are_folded() -> None:
    """Those with the largest lag in standard errors; small and unknown ones are last, and never above the fold."""
    many = [slices.Slice("c", f"v{n}", "a", "auroc", 100, 0.7, 0.01 * (1 + n), 0.8) for n in range(13)]
    odd = [
        slices.Slice("c", "small", "a", "auroc", 19, 0.1, 0.01, 0.8),
        slices.Slice("c", "undefined", "a", "auroc", 50, None, None, 0.8),
        slices.Slice("c", "other metric", "a", "ece", 50, 0.1, 0.01, 0.2),
    ]
    shown, folded = slices.tables_of([*odd, *reversed(many)], {"a": "auroc"})
    assert [row[1] for row in shown.rows] == [f"c: v{n}" for n in range(10)]
    assert [row[1] for row in folded.rows] == ["c: v10", "c: v11", "c: v12", "c: undefined", "c: small"]
    assert (folded.folded, folded.title) == (True, "5 other slices")
    [alone] = slices.tables_of(odd[:1], {"a": "auroc"})
    assert (len(alone.rows), alone.folded) == (1, False)


@pytest.mark.parametrize("values", [[3, 3, 4, None], [3.0, 3.0, 4.0, None], ["3", "3", "4", ""]])
def test_names_of_slices_do_not_depend_on_the_type_of_the_column(values: list[object], run: Path) -> None:
    names = slices.values_of(pl.Series("other", values), load(run).encoder)
    assert names.to_list() == ["3", "3", "4", "missing"]


def test_texts_that_count_as_empty_are_in_one_slice() -> None:
    """Those of a file, such as NA; the numbers beside them are cut at their quartiles."""
    encoder = SimpleNamespace(columns_by_name={}, empty=("NA", "n/a"))
    names = slices.values_of(pl.Series("age", ["NA", "n/a", "", *map(str, range(100))]), encoder)
    assert names[:3].to_list() == ["missing"] * 3
    assert names.n_unique() == 5


def test_a_column_of_lists_is_one_message() -> None:
    frame = rows(200).with_columns(tags=pl.lit([["a"]]))
    with pytest.raises(InputError, match=r"data.slices: .* has lists in tags"):
        mtl.fit(frame, {"buys": "binary"}, slices=["tags"], ignore=["tags"], max_epochs=1, progress=False)


def test_unknown_slice_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no column 'plcae' \\(did you mean 'place'"):
        mtl.fit(rows(200), {"buys": "binary"}, slices=["plcae"], max_epochs=1, progress=False)


@pytest.mark.parametrize("seed", range(5))
def test_a_rare_label_is_spread_evenly_over_random_splits(seed: int, tmp_path: Path) -> None:
    """Each split has its share of the positive rows of both tasks, to the row; a frequent label is drawn as before."""
    draw = np.random.default_rng(1)
    frame = pl.DataFrame({"x": draw.normal(size=2000), "fraud": (np.arange(2000) % 100 == 0).astype(int)})
    frame = frame.with_columns(refund=(pl.col("fraud") == 1) & (pl.int_range(2000) % 200 == 0), often=pl.col("x") > 0)
    frame.write_parquet(tmp_path / "rows.parquet")
    tasks = dict.fromkeys(["fraud", "refund", "often"], "binary")
    data = TableDataModule(tmp_path / "rows.parquet", tasks, seed=seed, batch_size=100)
    for name, part in data.split_rows().items():
        found = pl.concat([each for each, _ in part.frames(["fraud", "refund"])])
        share = {"train": 0.8, "val": 0.1, "test": 0.1}[name]
        assert (found["fraud"].sum(), found["refund"].sum()) == (20 * share, 10 * share)
        assert len(found) == 2000 * share
