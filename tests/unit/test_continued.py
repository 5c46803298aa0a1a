"""A run that goes on with the weights and the encoding of another one: new categories, known scales and classes."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from mtl.data_modules.table import TableDataModule
from mtl.data_modules.tables.labels import TargetOptions
from mtl.data_modules.tables.vocabulary_growth import learn_tasks

import mtl
from mtl.checks import InputError

TASKS = {"click": "binary", "minutes": "regression", "plan": "multiclass"}
GIVEN: dict[str, Any] = {
    **{
        "progress": False,
        "report": False,
        "max_epochs": 1,
        "logger": "none",
        "recipe": "table",
        "columns": {"day": "date", "seen": {"kind": "list", "separator": "|", "target": "item"}},
    },
    "options": {"recipe.expert_units": [8], "recipe.head_units": [8], "threads": 1, "blend": "none"},
}
GIVEN["options"]["callbacks.routing.figures"] = False


def day(number: int, users: int = 30, items: int = 20, rows: int = 300) -> pl.DataFrame:
    """Return the rows of a day, with more users and items each day."""
    draw = np.random.default_rng(number)
    item = draw.integers(0, items, (rows, 4)).astype(str)
    frame = {
        "user": np.char.add("u", draw.integers(0, users, rows).astype(str)),
        "item": item[:, 0],
        "seen": ["|".join(row[1 : 1 + size]) for row, size in zip(item, draw.integers(0, 4, rows), strict=True)],
        "day": [f"2026-03-{number + 1:02} 0{hour}:00" for hour in draw.integers(0, 9, rows)],
        "age": draw.normal(40 + 10 * number, 10, rows),
        "click": draw.integers(0, 2, rows),
        "minutes": draw.normal(100 * (number + 1), 5, rows),
        "plan": draw.choice(["free", "basic", "pro"] if number == 0 else ["free", "pro"], rows),
    }
    return pl.DataFrame(frame)


@pytest.fixture(scope="module")
def first(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the options of a run; by default, the number of ids decides how wide embeddings are."""
    folder = tmp_path_factory.mktemp("first") / "run"
    given = GIVEN | {"options": GIVEN["options"] | {"recipe.embedding_dim": getattr(request, "param", None)}}
    mtl.fit(day(0), TASKS, folder=folder, **given)
    return folder, given


@pytest.mark.parametrize("first", [64, None], ids=["one width", "width by ids"], indirect=True)
def test_known_ids_stay_and_new_ones_start_at_the_mean(
    first: tuple[Path, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """Without a step, known rows are predicted as before; the scale, the classes and the mean of ages are as before."""
    folder, given = first
    old, still = mtl.load(folder, device="cpu"), given["options"] | {"optimizer.lr": 1e-12}
    with caplog.at_level(logging.INFO):
        new = mtl.fit(day(1, 40, 25), TASKS, start_from=str(folder), **given | {"options": still})
    assert "new categories: user 10, item 5" in caplog.text
    for column, values in old.predict(day(0)).select(pl.selectors.float()).to_dict().items():
        assert np.allclose(new.predict(day(0))[column], values, atol=1e-5)
    assert [task.classes for task in new.spec.tasks] == [task.classes for task in old.spec.tasks]
    before, after = old.encoder, new.encoder
    assert after.scales == before.scales
    assert after.vocabularies["user"].values[:30] == before.vocabularies["user"].values
    assert sorted(after.vocabularies["user"].values[30:]) == sorted(f"u{number}" for number in range(30, 40))
    assert after.vocabularies["seen"].values == after.vocabularies["item"].values
    tables = [
        [each for each in model.network.modules() if isinstance(each, torch.nn.Embedding)] for model in (old, new)
    ]
    grown = [(a.weight, b.weight) for a, b in zip(*tables, strict=True) if len(b.weight) > len(a.weight)]
    assert len(grown) >= 2
    for one, other in grown:
        assert torch.allclose(other[: len(one)], one, atol=1e-9)
        assert torch.allclose(other[len(one) :], one[1:].mean(0), atol=1e-7)


def test_each_day_goes_on_from_the_last_one(first: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Ids never move over three days, also of a user who is away for a day; a run that is resumed has the same."""
    folder, given = first
    ids: dict[str, int] = {}
    for number in range(1, 4):
        run = tmp_path / str(number)
        model = mtl.fit(day(number, 30 + 5 * number), TASKS, start_from=str(folder), folder=run, **given)
        own = dict(zip(model.encoder.vocabularies["user"].values, range(1, 1000), strict=False))
        assert {user: own[user] for user in ids} == ids
        ids, folder = own, run
    assert 40 <= len(ids) <= 45
    assert mtl.load(folder).spec.inputs["user"].size == len(ids) + 1
    resumed = mtl.fit(day(3, 45), TASKS, resume=folder, progress=False, max_epochs=2)
    assert resumed.encoder.vocabularies["user"].values == list(ids)


def test_a_column_in_another_unit_is_warned_of(
    first: tuple[Path, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """The scale stays that of the first day, so most ages are far from those that the network has learnt from."""
    folder, options = first
    months = day(1).with_columns(pl.col("age") * 12)
    mtl.fit(months, TASKS, start_from=str(folder), **options)
    assert caplog.text.count("column 'age': ") == 1
    assert "cells are numbers far outside the training rows" in caplog.text
    caplog.clear()
    mtl.fit(day(1), TASKS, start_from=str(folder), **options)
    assert "far outside" not in caplog.text


def test_rare_new_categories_stay_unknown(first: tuple[Path, dict[str, Any]]) -> None:
    folder, given = first
    rows = day(1).with_columns(user=pl.when(pl.int_range(pl.len()) < 1).then(pl.lit("once")).otherwise("user"))
    model = mtl.fit(rows, TASKS, start_from=str(folder), vocabulary={"min_count": 2}, **given)
    assert "once" not in model.encoder.vocabularies["user"].values


def test_a_new_task_is_learnt_and_other_tasks_keep_their_scales(first: tuple[Path, dict[str, Any]]) -> None:
    folder, given = first
    rows = day(1).with_columns(stars=pl.col("age") / 10)
    tasks = {"minutes": {"kind": "regression", "weight": 2.0}, "stars": "regression"}
    model = mtl.fit(rows.drop("click", "plan"), tasks, start_from=str(folder), **given)
    minutes, stars = model.spec.tasks
    assert (minutes.mean, minutes.weight) == (mtl.load(folder).spec.tasks[1].mean, 2.0)
    assert stars.mean == pytest.approx(5, abs=0.2)


def test_what_does_not_fit_is_one_message(first: tuple[Path, dict[str, Any]]) -> None:
    folder, given = first
    with pytest.raises(InputError, match="has no column 'age', which the network reads"):
        mtl.fit(day(1).drop("age"), TASKS, start_from=str(folder), **given)
    huber = TASKS | {"minutes": {"kind": "regression", "loss": "huber"}}
    with pytest.raises(InputError, match=r"data.tasks.minutes: loss=huber is not as in the run of start_from"):
        mtl.fit(day(1), huber, start_from=str(folder), **given)


def test_the_encoding_can_be_learnt_anew(first: tuple[Path, dict[str, Any]]) -> None:
    folder, given = first
    model = mtl.fit(day(1, 40), TASKS, start_from=str(folder), keep_encoding=False, **given)
    assert model.encoder.vocabularies["user"].added == 0
    assert model.encoder.scales["age"].mean == pytest.approx(50, abs=2)


def test_tasks_are_those_of_the_run_unless_they_are_given(first: tuple[Path, dict[str, Any]]) -> None:
    folder, given = first
    named, same = (mtl.fit(day(1), tasks, start_from=str(folder), **given) for tasks in (TASKS, {}))
    assert same.spec.tasks == named.spec.tasks
    assert same.metrics == named.metrics
    fewer = mtl.fit(day(1), {"click": "binary"}, start_from=str(folder), **given)
    assert [task.name for task in fewer.spec.tasks] == ["click"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ignore": ["age"]}, "data: age is ignored, .*, but is an input of the run of start_from"),
        ({"columns": {"age": "category"}}, "data: columns.age.kind=category is not"),
        ({"columns": {"user": "text"}}, "data: columns.user.kind=text is not"),
        ({"columns": {"day": {"format": "dd/mm/yyyy"}}}, "data: columns.day.format=dd/mm/yyyy is not"),
    ],
)
def test_options_that_the_encoding_contradicts_are_one_message(
    options: dict[str, Any], message: str, first: tuple[Path, dict[str, Any]]
) -> None:
    folder, given = first
    with pytest.raises(InputError, match=message):
        mtl.fit(day(1), TASKS, start_from=str(folder), **given | options)


# of each option of a task: the task at first, what changes, and the fields of the TaskSpec that it then has, or None
# if the option is refused since outputs would mean something else
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "kind": ({"kind": "multiclass"}, {"kind": "binary"}, None),
    "weight": ({"kind": "binary"}, {"weight": 3.0}, {"weight": 3.0}),
    "positive": ({"kind": "binary"}, {"positive": "a"}, None),
    "metrics": ({"kind": "binary"}, {"metrics": ["f1"]}, {"metrics": ("f1",)}),
    "standardize": ({"kind": "regression"}, {"standardize": False}, None),
    "pos_weight": ({"kind": "binary", "pos_weight": "balanced"}, {}, {"pos_weight": 9.0}),
    "class_weights": ({"kind": "multiclass"}, {"class_weights": "balanced"}, {"class_weights": (10 / 18, 5.0)}),
    "sampling_rate": ({"kind": "binary"}, {"sampling_rate": 0.5}, {"sampling_rate": 0.5}),
    "loss": ({"kind": "regression"}, {"loss": "mae"}, None),
    "delta": ({"kind": "regression", "loss": "huber"}, {"delta": 3.0}, {"delta": 3.0}),
    "gamma": ({"kind": "binary", "loss": "focal"}, {"gamma": 1.0}, {"gamma": 1.0}),
    "quantiles": ({"kind": "regression", "loss": "quantile"}, {"quantiles": [0.2, 0.8]}, None),
    "transform": ({"kind": "regression"}, {"transform": "log"}, None),
    "smoothing": ({"kind": "binary"}, {"smoothing": 0.1}, {"smoothing": 0.1}),
    "after": ({"kind": "binary"}, {"after": "other"}, None),
    "column": ({"kind": "regression"}, {"column": "x"}, {"mean": 1.5}),
    "normalize_loss": (
        {"kind": "binary", "normalize_loss": True},
        {},
        {"weight": 1 / -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))},
    ),
}
OF_ROWS = {"name", "format", "weight_column", "where", "pattern"}  # read with the rows of the run, so nothing is kept


@pytest.mark.parametrize("option", sorted(TargetOptions.model_fields.keys() - OF_ROWS))
def test_an_option_of_an_earlier_task_has_an_effect_or_is_refused(option: str) -> None:
    """The day has one b in ten rows, where the first day had six; a field that is added needs a line above."""
    before, change, fields = CHANGES[option]

    def task(**options: Any) -> TargetOptions:
        return TargetOptions(
            **{"name": "t", "column": "n" if options["kind"] == "regression" else "t", "metrics": [], **options}
        )

    first = pl.DataFrame({"t": ["a"] * 4 + ["b"] * 6, "n": [1.0, 2.0] * 5, "x": [5.0] * 10})
    second = pl.DataFrame({"t": ["a"] * 9 + ["b"], "n": [3.0, 4.0] * 5, "x": [6.0, 7.0] * 5})
    earlier, label = task(**before).learn(first, "first.csv"), task(**before | change)

    def blocks(columns: Any) -> Any:
        return [(second.select(columns), "second.csv")]

    if fields is None:
        with pytest.raises(
            InputError, match=rf"data.tasks.t: (kind=\w+ and )?{option}=.* is not as in the run of start_from"
        ):
            learn_tasks([label], [earlier], blocks, "second.csv")
        return
    [spec] = learn_tasks([label], [earlier], blocks, "second.csv")
    for name, value in fields.items():
        assert getattr(spec, name) == (value if option == "metrics" else pytest.approx(value))
    assert (spec.classes, spec.mean, spec.std) == (earlier.classes, earlier.mean, earlier.std)
    assert spec.constant == ()


def test_the_constant_is_that_of_the_new_rows(first: tuple[Path, dict[str, Any]]) -> None:
    folder, given = first
    rows = day(1).with_columns(click=(pl.int_range(pl.len()) % 10 == 0).cast(pl.Int64))
    rows = rows.with_columns(
        split=pl.when(pl.int_range(pl.len()) < 200).then(pl.lit("train")).otherwise(pl.lit("test"))
    )
    rows = rows.with_columns(split=pl.when(pl.int_range(pl.len()) < 30).then(pl.lit("val")).otherwise("split"))
    model = mtl.fit(rows, TASKS, start_from=str(folder), split={"by": "column", "column": "split"}, **given)
    train = rows.filter(split="train")
    click, minutes, plan = (task.constant for task in model.spec.tasks)
    share = float(np.mean(train["click"].to_numpy()))
    assert click == pytest.approx((math.log(share / (1 - share)),))
    before = mtl.load(folder).spec.tasks[1]
    assert minutes == pytest.approx(((np.mean(train["minutes"].to_numpy()) - before.mean) / before.std,))
    counts = np.array([0.5, *(train["plan"].to_list().count(name) for name in ("free", "pro"))])  # no row has basic
    assert plan == pytest.approx(tuple(np.log(counts / counts.sum())))


def continued(
    tmp_path: Path, earlier: Any, first: pl.DataFrame, second: pl.DataFrame, **options: Any
) -> TableDataModule:
    """Return the data of a run on ``second`` with ``options`` that starts from a run on ``first``."""

    path = tmp_path / "rows.csv"

    def data(rows: pl.DataFrame, **given: Any) -> TableDataModule:
        rows.write_csv(path)
        return TableDataModule(path, batch_size=8, val_path=path, test_path=path, **given)

    before = data(first, tasks=earlier, columns={"seen": {"kind": "list", "separator": "|"}})
    before.setup()
    after = data(second, **{"tasks": earlier, "columns": {"seen": {"kind": "list", "separator": "|"}}} | options)
    after.continue_from(before.state_dict())
    after.setup()
    return after


def lists_day(seen: list[str], **columns: Any) -> pl.DataFrame:
    return pl.DataFrame({"seen": seen, "click": [0, 1] * (len(seen) // 2)} | columns)


FIRST = lists_day(["a|b", "b", "a", ""] * 5)


def test_an_element_of_a_list_counts_once_in_a_row(tmp_path: Path) -> None:
    second = lists_day(["c|c|c", "d", "d|a", ""] * 2)
    encoder = continued(tmp_path, {"click": "binary"}, FIRST, second, vocabulary={"min_count": 3}).row_encoder
    assert encoder is not None
    assert encoder.vocabularies["seen"].values == ["a", "b", "d"]


def test_a_day_fills_up_the_categories_and_lengthens_lists_up_to_the_options(tmp_path: Path) -> None:
    second = lists_day(["c|d|a|e", "d", "d|b", ""] * 2)
    for options, values, length in (
        ({}, ["a", "b", "c", "d", "e"], 2),
        (
            {"columns": {"seen": {"kind": "list", "separator": "|", "max_length": 3}}, "vocabulary": {"max_size": 3}},
            ["a", "b", "d"],
            3,
        ),
        (
            {"columns": {"seen": {"kind": "list", "separator": "|", "max_length": 1}}, "vocabulary": {"max_size": 1}},
            ["a", "b"],
            1,
        ),
    ):
        encoder = continued(tmp_path, {"click": "binary"}, FIRST, second, **options).row_encoder
        assert encoder is not None
        lists = encoder.columns_by_name["seen"]
        assert (lists.vocabulary.values, lists.length) == (values, length)


def test_lists_are_read_as_before_and_labels_in_the_format_of_the_day(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data: columns.seen.separator=; is not as in the run of start_from"):
        continued(tmp_path, {"click": "binary"}, FIRST, FIRST, columns={"seen": {"kind": "list", "separator": ";"}})
    rows = FIRST.with_columns(price=pl.Series(["1,5", "2,5"] * 10))
    tasks = {"click": "binary", "price": "regression"}
    data = continued(
        tmp_path, tasks, rows.with_columns(price=pl.lit(2.0)), rows, columns={"price": {"format": "1.234,5"}}
    )
    assert data.splits["train"].targets["price"].tolist() == [1.5, 2.5] * 10


def test_empty_cells_of_a_new_task_after_another_mean_no(tmp_path: Path) -> None:
    rows = FIRST.with_columns(buy=pl.when(pl.col("click") == 1).then((pl.int_range(pl.len()) % 4 == 1).cast(pl.Int64)))
    tasks = {"click": {"kind": "binary"}, "buy": {"kind": "binary", "after": "click"}}
    data = continued(tmp_path, {"click": "binary"}, FIRST, rows, tasks=tasks)
    assert data.splits["train"].targets["buy"].tolist() == [0.0, 1.0, 0.0, 0.0] * 5


@pytest.mark.parametrize("options", [{"tasks": {"n": "regression"}}, {"weight_column": "n"}])
def test_an_input_of_the_earlier_run_holds_no_labels_and_no_weights(options: Any, tmp_path: Path) -> None:
    """The network would read the label that it predicts."""
    rows = FIRST.with_columns(n=pl.Series([1.5, 2.5, 4.0, 8.0] * 5))
    with pytest.raises(InputError, match="data: n is ignored, or holds labels, weights or splits, but is an input of"):
        continued(tmp_path, {"click": "binary"}, rows, rows, **options)


@pytest.mark.parametrize("window_rows", [None, 32])
def test_a_folded_encoding_stays_folded_and_grows_by_folded_categories(window_rows: int | None, tmp_path: Path) -> None:
    def data(cells: list[str], fold: bool) -> TableDataModule:
        path = tmp_path / "rows.parquet"
        pl.DataFrame({"c": cells, "y": [0, 1] * (len(cells) // 2)}).write_parquet(path)
        options: dict[str, Any] = {"window_rows": window_rows, "vocabulary": {"min_count": 2, "fold": fold}}
        return TableDataModule(path, {"y": "binary"}, batch_size=8, val_path=path, test_path=path, **options)

    first, plain, later = ["A", "a ", "b", "B"] * 10, data(["a", "b"] * 20, False), ["b", "Green", "green ", "A"] * 10
    before = data(first, True)
    before.setup()
    after = data(later, False)
    after.continue_from(before.state_dict())
    after.setup()
    assert after.row_encoder is not None
    assert after.row_encoder.vocabularies["c"].values == ["a", "b", "green"]
    rows = pl.DataFrame({"c": [" GREEN", "B", "C"]})
    assert after.row_encoder.encode(rows, "rows")["c"].tolist() == [3, 2, 0]
    data(["a", "b"] * 20, False)
    plain.setup()
    new = data(later, True)
    new.continue_from(plain.state_dict())
    with pytest.raises(InputError, match=r"vocabulary\.fold=true is not as in the run of start_from"):
        new.setup()
