"""A user's table, in memory and streamed: what is learnt from the training rows, and the tensors that follow."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from datetime import date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from mtl.data_modules.stream import concat_batches
from mtl.data_modules.table import TableDataModule
from mtl.data_modules.tables.columns.list import words_and_groups
from mtl.data_modules.tables.encoder import NUMERIC
from mtl.data_modules.tables.statistics import Moments

from mtl.checks import InputError
from mtl.types import Bag, Batch, Categorical, Numeric
from tests.loaded import loaded
from tests.tables import (
    SAME,
    WAYS,
    assert_same_rows,
    load_table,
    restore_encoder,
    rows_of,
    serve_rows,
    write_table,
)

DAYS = [datetime(2026, 1, 1, 6) + timedelta(hours=43 * i) for i in range(40)]  # of three months
AT = {
    "at weekday": Categorical(8),
    "at hour": Categorical(25),
    NUMERIC: Numeric(3),  # month and day, of which there are not all, and age
}
DATES = {
    "datetime": pl.Series(DAYS),
    "zone": pl.Series(DAYS).dt.replace_time_zone("Asia/Tokyo"),
    "iso": pl.Series([day.isoformat() for day in DAYS]),
    "space": pl.Series([day.isoformat(" ", "minutes") for day in DAYS]),
    "offset": pl.Series([f"{day.isoformat()}.250+05:30" for day in DAYS]),
    "utc": pl.Series([f"{day.isoformat()}Z" for day in DAYS]),
}
GENRES = [["Action", "Drama"], [], ["Drama"], ["War", "Action", "Comedy"]] * 10
LISTS = {
    "text": pl.Series(["|".join(genres) for genres in GENRES]),
    "lists": pl.Series(GENRES),
    "categories": pl.Series(GENRES, dtype=pl.List(pl.Categorical)),
    "array": pl.Series([[*genres, None, None, None][:3] for genres in GENRES], dtype=pl.Array(pl.String, 3)),
}
TAGS = pl.Series([[i % 3, 7, i] for i in range(40)])
COMMENTS = [f"I came {i} times and liked it {'a lot' if i % 2 else 'less'}" for i in range(40)]
HALVES = [i + 0.5 for i in range(40)]
NUMBER, CODES = {NUMERIC: Numeric(1)}, {"c": Categorical(4)}
# Column c (at for dates), options, and the inputs that follow; None: there is nothing but x, which is numeric
COLUMNS: dict[str, tuple[Any, dict[str, Any], dict[str, Any] | None]] = {
    "whole numbers that repeat": ([i % 3 for i in range(40)], {}, CODES | NUMBER),
    "two whole numbers": ([i % 2 for i in range(40)], {}, {"c": Categorical(3)}),
    "one half among them": ([i % 3 + 0.5 * (i == 39) for i in range(40)], {}, NUMBER),
    "days as numbers": ([f"2026{1 + i % 9:02}01" for i in range(40)], {}, NUMBER),
    "texts": ([" Bern", "Ulm ", "Rom", "Ulm"] * 10, {}, CODES),
    "constant": ([7] * 40, {}, None),
    "empty": ([None] * 40, {}, None),
    "empty texts": (["", "NA"] * 20, {"csv": {"null_values": ["", "NA"]}}, {"c": Categorical(3)}),
    "gaps in numbers": ([1.5, None, 3.5, 4.25] * 10, {}, {NUMERIC: Numeric(2)}),
    "gaps in texts": (["Bern", None] * 20, {}, {"c": Categorical(3)}),
    "rare texts": (["Bern"] * 20 + ["Ulm"] * 19 + ["Rom"], {"vocabulary": {"min_count": 2}}, {"c": Categorical(3)}),
    "frequent texts": (["Ulm"] * 20 + ["Rom", "Bern"] * 10, {"vocabulary": {"max_size": 2}}, {"c": Categorical(3)}),
    "given as categories": (HALVES, {"columns": {"c": "category"}}, {"c": Categorical(41)}),
    "given as numbers": ([i % 3 for i in range(40)], {"columns": {"c": "number"}}, NUMBER),
    "dates given as categories": (DATES["iso"], {"columns": {"at": "category"}}, {"at": Categorical(41)}),
    "days": ([day.date() for day in DAYS], {}, {name: kind for name, kind in AT.items() if name != "at hour"}),
    "free text": (COMMENTS, {}, None),
    "read free text": (COMMENTS, {"columns": {"c": "text"}}, {"c": Bag(37, 33)}),
    "short free text": (
        COMMENTS,
        {"columns": {"c": {"kind": "text", "max_length": 4}}, "vocabulary": {"max_size": 3}},
        {"c": Bag(5, 4)},
    ),
    "names": ([f"Ann Mary Smith {i}" if i % 9 == 0 else f"Bo Lee{i}" for i in range(40)], {}, None),
    "titles": ([f"The Lord of the Rings, part {i % 8}" for i in range(40)], {}, {"c": Categorical(9)}),
    "lists of numbers": (TAGS, {}, {"c": Bag(42, 3)}),
    "short lists": (
        TAGS,
        {"columns": {"c": {"kind": "list", "max_length": 2}}, "vocabulary": {"min_count": 10}},
        {"c": Bag(6, 2)},
    ),  # 0, 1, 2 and 7
    **{f"dates as {name}": (series, {}, AT) for name, series in DATES.items()},
    **{
        f"genres as {n}": (
            s,
            {"columns": {"c": {"kind": "list", "separator": "|"}}} if n == "text" else {},
            {"c": Bag(6, 3)},
        )
        for n, s in LISTS.items()
    },
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", COLUMNS)
def test_kinds(name: str, way: str, tmp_path: Path) -> None:
    column, options, expected = COLUMNS[name]
    series = pl.Series("at" if name == "days" or name.startswith("dates") else "c", column)
    if way == "csv" and isinstance(series.dtype, pl.List | pl.Array):
        pytest.skip("a CSV file has no lists")
    if name == "empty texts" and way == "csv":
        expected = None
    frame = pl.DataFrame([series]) if expected else pl.DataFrame({series.name: series, "x": HALVES})
    data = serve_rows(frame, tmp_path, way, **options)
    frame = pl.read_csv(tmp_path / "t.csv", infer_schema=False) if way == "csv" else frame
    assert data.spec.inputs == (expected or NUMBER)
    assert data.row_encoder.columns == (["x"] if expected is None else [series.name])
    found = rows_of(data)
    expected_rows = restore_encoder(data).encode(frame, "rows")
    assert all(torch.equal(found.inputs[input], expected_rows[input]) for input in data.spec.inputs)
    slices = ((0, 1), (1, 2), (2, 9), (9, 40))  # rows do not depend on each other
    parts = [data.row_encoder.encode(frame[first:end], "rows") for first, end in slices]
    assert all(torch.equal(torch.cat([part[one] for part in parts]), found.inputs[one]) for one in found.inputs)


TYPED = pl.DataFrame(
    {
        "size": [0.0, 1.0, None, 3.0] * 5,
        "flag": [True, False, None, True] * 5,
        "cost": pl.Series(["0.00", "1.50", None, "3.00"] * 5).cast(pl.Decimal(10, 2)),
        "zero": [-0.0, 0.0, 1.0, None] * 5,
        "text": ["a", " b ", "", None] * 5,
    }
)
WRITTEN = pl.DataFrame(  # as pandas writes the same cells
    {
        "size": ["0.0", "1.0", None, "3.0"] * 5,
        "flag": ["True", "False", None, "True"] * 5,
        "cost": ["0.0", "1.5", None, "3.0"] * 5,
        "zero": ["-0.0", "0.0", "1.0", None] * 5,
        "text": ["a", "b", None, None] * 5,
    }
)


@pytest.mark.parametrize(("rows", "others"), [(TYPED, WRITTEN), (WRITTEN, TYPED)])
def test_categories_and_classes_do_not_depend_on_the_type_of_a_column(
    rows: pl.DataFrame, others: pl.DataFrame, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_table(rows.with_columns(y=rows["flag"], z=rows["size"]), tmp_path / "t.parquet")
    tasks = {"y": {"kind": "binary"}, "z": {"kind": "multiclass"}}
    data = load_table(path, tasks=tasks, columns=dict.fromkeys(rows.columns, "category"), **SAME)
    own, found = (data.row_encoder.encode(frame, "rows") for frame in (rows, others))
    for name, categories in {"size": 4, "flag": 3, "cost": 4, "zero": 3, "text": 3}.items():  # one is the empty cell
        assert torch.equal(own[name], found[name]), name
        assert own[name].unique().tolist() == list(range(1, 1 + categories))  # 0 would be unknown
    assert [task.classes for task in data.spec.tasks] == [("false", "true"), ("0", "1", "3")]
    with_labels = [
        data.labelled(frame.with_columns(y=frame["flag"], z=frame["size"]), "rows").targets for frame in (rows, others)
    ]
    for task in tasks:
        torch.testing.assert_close(with_labels[0][task], with_labels[1][task], equal_nan=True, rtol=0, atol=0)
    assert not caplog.records
    data.row_encoder.encode(others.with_columns(size=pl.col("size").cast(pl.String) + "?"), "new rows")
    assert "new rows, column 'size': 15 of 20 cells are unknown or rare categories" in caplog.text


@pytest.mark.parametrize("way", ["csv", "parquet"])
def test_rows_to_predict_keep_their_texts_and_are_empty_where_the_training_rows_were(way: str, tmp_path: Path) -> None:
    rows = pl.DataFrame({"country": ["NA", "US", "None", "US"] * 5, "x": [1.5, 2.5, 0.5, 3.5] * 5})
    data = serve_rows(rows, tmp_path, way, columns={"country": "category", "x": "number"})
    path = write_table(
        pl.DataFrame({"country": ["NA", "US", "None", "FR"], "x": ["NA", "2.0", "", "2"]}), tmp_path / "new.csv"
    )
    [(block, _)] = data.row_encoder.blocks(path)
    assert block["country"].to_list() == ["NA", "US", "None", "FR"]
    found = data.row_encoder.encode(block, "new.csv")
    assert found["country"].tolist() == ([1, 2, 1, 0] if way == "csv" else [1, 3, 2, 0])  # 1: the empty cell, in CSV
    assert found[NUMERIC][:, 0].tolist() == [0, 0, 0, 0]  # the mean, 2; the others are empty in both


def test_most_frequent_categories_keep_their_ids(tmp_path: Path) -> None:
    cities = pl.DataFrame({"city": ["Ulm"] * 200 + ["Rom"] * 120 + ["Bern"] * 80})
    encoder = serve_rows(cities, tmp_path, "streamed", vocabulary={"max_size": 2}).row_encoder
    ids = encoder.encode(pl.DataFrame({"city": ["Bern", "Rom", "Ulm", "Nice"]}), "rows")["city"]
    assert ids.tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("form", DATES)
def test_parts_and_ages_of_dates(form: str, tmp_path: Path) -> None:
    data = serve_rows(pl.DataFrame({"at": DATES[form]}), tmp_path, "streamed")
    inputs, names = rows_of(data).inputs, data.row_encoder.vocabularies
    readers: dict[str, Callable[[datetime], int]] = {
        "weekday": lambda day: day.isoweekday(),
        "hour": lambda day: day.hour,
    }
    for part, read in readers.items():
        known = names[f"at {part}"].values
        assert [known[id - 1] for id in inputs[f"at {part}"].tolist()] == [str(read(day)) for day in DAYS]
    ages = torch.tensor([(DAYS[-1] - day).total_seconds() / 86400 for day in DAYS], dtype=torch.float64)
    torch.testing.assert_close(inputs[NUMERIC][:, 2], ((ages - ages.mean()) / ages.std(correction=0)).float())


def test_days_in_all_forms_and_empty_ones(tmp_path: Path) -> None:
    data = serve_rows(pl.DataFrame({"at": [None, *(day.date() for day in DAYS[1:])]}), tmp_path, "csv")
    assert data.spec.inputs[NUMERIC] == Numeric(6)
    assert rows_of(data).inputs[NUMERIC][0].tolist() == [0, 1] * 3  # the means, marked
    assert data.row_encoder.vocabularies["at weekday"].values[0] == "\0missing"
    encoder = restore_encoder(data)
    expected = encoder.encode(pl.DataFrame({"at": [datetime(2026, 1, 5), None]}), "rows")
    for rows in ({"at": ["2026-01-05", None]}, {"at": [date(2026, 1, 5), None]}, {"at": ["2026-01-05T00:00", "NA"]}):
        assert_same_rows(Batch(encoder.encode(pl.DataFrame(rows), "rows"), {}), Batch(expected, {}))
    july = encoder.encode(pl.DataFrame({"at": ["2026-07-01"]}), "rows")
    assert july[NUMERIC][0, 0] == pytest.approx((7 - 6.5) / np.std(np.linspace(1, 12, 10**6)), rel=1e-4)
    encoder.remarks.unusual.clear()
    encoder.encode(pl.DataFrame({"at": ["2026-12-31"]}), "rows")
    assert "unknown" not in encoder.unusual_cells()  # no month or day is
    assert july[NUMERIC][0, 4] < rows_of(data).inputs[NUMERIC][:, 4].min()  # newer than all


@pytest.mark.parametrize("form", LISTS)
def test_elements_of_lists(form: str, tmp_path: Path) -> None:
    way = "csv" if form == "text" else "streamed"
    columns = {"genres": {"kind": "list", "separator": "|"}} if form == "text" else None
    data = serve_rows(pl.DataFrame({"genres": LISTS[form]}), tmp_path, way, columns=columns)
    assert rows_of(data).inputs["genres"][:4].tolist() == [[2, 4, 0], [0, 0, 0], [4, 0, 0], [5, 2, 3]]
    encoder = restore_encoder(data)
    rows = pl.DataFrame({"genres": [["Drama", "Opera", None, ""], ["War"] * 5, None]})
    assert encoder.encode(rows, "rows")["genres"].tolist() == [[4, 1, 0], [5, 5, 5], [0, 0, 0]]
    assert encoder.lists == {"genres": "|" if form == "text" else ""}
    if form == "text":
        rows = pl.DataFrame({"genres": [" Drama |Opera||", "War|War|War|War", "NA"]})
        assert encoder.encode(rows, "rows")["genres"].tolist() == [[4, 1, 0], [5, 5, 5], [0, 0, 0]]


def test_words_and_letter_groups_of_texts(tmp_path: Path) -> None:
    texts = pl.Series(["So good", "à BAS!\ta", "!!", None, "no no"])
    assert words_and_groups(texts).to_list() == [
        ["<so>", "<good>", "<so", "ood", "so>", "<go", "od>", "goo"],
        ["<à>", "<bas>", "<a>", "<ba", "bas", "as>"],
        [],
        None,
        ["<no>", "<no", "no>"],
    ]
    rows = pl.DataFrame({"c": ["no way", "No, Noah", "a way", ""] * 10})
    data = serve_rows(rows, tmp_path, "csv", columns={"c": "text"})
    vocabulary = data.row_encoder.vocabularies["c"].values
    found = restore_encoder(data).encode(pl.DataFrame({"c": ["NO?", "zz", None]}), "rows")["c"]
    assert [[vocabulary[id - 2] for id in row if id > 1] for row in found.tolist()] == [["<no>", "<no", "no>"], [], []]
    assert found[1].tolist()[:3] == [1, 1, 1]  # unknown: <zz>, <zz and zz>
    assert not found[2].any()


@pytest.mark.parametrize("way", WAYS)
def test_a_list_and_its_target_have_one_vocabulary(way: str, tmp_path: Path) -> None:
    seen = pl.Series([["7", "3"], [], ["5", "5", "3"], []] * 10)
    frame = pl.DataFrame({"item": [3, 9, 7, None] * 10, "seen": seen, "liked": seen.list.head(1)})
    if way == "csv":
        frame = frame.with_columns(pl.col("seen", "liked").list.join("|"))
    columns = {name: {"kind": "list", "separator": "|", "target": "item"} for name in ("seen", "liked")}
    data = serve_rows(frame, tmp_path, way, columns=columns)
    assert data.spec.inputs == {"item": Categorical(6), "seen": Bag(7, 3, "item"), "liked": Bag(7, 1, "item")}
    assert data.row_encoder.vocabularies["item"].values == ["\0missing", "3", "5", "7", "9"]
    found = rows_of(data).inputs
    assert found["item"][:4].tolist() == [2, 5, 4, 1]
    assert found["seen"][:4].tolist() == [[5, 3, 0], [0, 0, 0], [4, 4, 3], [0, 0, 0]]
    unknown = restore_encoder(data).encode(pl.DataFrame({"item": [8], "seen": [["8", "9"]], "liked": [["3"]]}), "rows")
    assert (unknown["item"].tolist(), unknown["seen"].tolist()) == ([0], [[1, 6, 0]])


@pytest.mark.parametrize("way", WAYS)
def test_learning_is_from_the_training_rows_only(way: str, tmp_path: Path) -> None:
    train = pl.DataFrame({"city": ["Bern", "Ulm"] * 20, "size": [1.5, 3.5] * 20, "y": [0, 1] * 20})
    test = pl.DataFrame({"city": ["Rom", "Bern", None], "size": [1e6, None, 2.5], "y": [1, 0, None]})
    suffix = "csv" if way == "csv" else "parquet"
    other = str(write_table(test, tmp_path / f"test.{suffix}"))
    data = load_table(
        write_table(train, tmp_path / f"a.{suffix}"),
        way,
        val_path=other,
        test_path=other,
        split={"fractions": [1, 0, 0]},
    )
    assert data.spec.inputs == {"city": Categorical(3), NUMERIC: Numeric(1)}
    found = rows_of(data, "test")
    assert found.inputs["city"].tolist() == [0, 1, 0]  # unknown, Bern, empty: unknown too
    assert found.inputs[NUMERIC].flatten().tolist() == pytest.approx([1e6 - 2.5, 0.0, 0.0])
    assert found.targets["y"].isnan().tolist() == [False, False, True]
    new = str(write_table(test.with_columns(y=3), tmp_path / f"new.{suffix}"))
    with pytest.raises(InputError, match=r"row 1: '?3'? is a label of task 'y' that does not occur"):  # noqa: PT012
        data = load_table(tmp_path / f"a.{suffix}", way, val_path=new, test_path=other, split={"fractions": [1, 0, 0]})
        rows_of(data)  # a streamed table is read by then


@pytest.mark.parametrize("way", WAYS)
def test_bad_cells(way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cells, days = [f"{i}.5" for i in range(40)], [day.date().isoformat() for day in DAYS]
    cells[3], cells[8], cells[20], days[6], days[9] = "many", "inf", "", "2026-02-30", "soon"
    frame = pl.DataFrame({"age": cells, "more": HALVES, "at": days})
    for column, options, message in (
        ("age", {}, "row 4: 'many' is not a number, but most of the column is"),
        ("age", {"columns": {"age": "number"}}, r"row 4: 'many' is not a number; \d of \d+ cells"),
        ("at", {}, "row 7: '2026-02-30' is not a date as in 2026-03-01 or 2026-03-01 14:30, but most"),
        ("at", {"columns": {"at": "date"}}, r"row 7: '2026-02-30' is not a date as in .*; 2 of \d+ cells"),
    ):
        with pytest.raises(InputError, match=rf"(part-0.parquet|t.csv|t.parquet), column '{column}', {message}"):
            serve_rows(frame.select(column, "more"), tmp_path, way, **options)
    options = {"csv": {"null_values": ["", "NA"]}, "on_invalid": "missing"}
    data = serve_rows(frame, tmp_path, way, **options)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2  # one for each column
    bad = 2 if way == "csv" else 3  # in a typed file, "" is a text
    count = bad * (1 if way == "streamed" else 3) - 1  # those of the training rows, or of all three splits
    told = rf"column 'age', row (4|9): .* It and {count} other cells of this column are treated as missing"
    assert re.search(told, "".join(warnings))
    emptied = frame.with_columns(
        pl.col("age").replace(["many", "inf", ""], None), pl.col("at").replace(days[6:10:3], None)
    )
    expected = serve_rows(emptied, tmp_path / "emptied", way)
    assert_same_rows(rows_of(data), rows_of(expected))
    assert data.row_encoder.scales == expected.row_encoder.scales
    new = pl.DataFrame({"age": ["a few"], "more": [1.0], "at": [None]}, schema_overrides={"at": pl.String})
    assert restore_encoder(data).encode(new, "rows")[NUMERIC][0, :2].tolist() == [0, 1]
    with pytest.raises(InputError, match=r"rows, column 'age', row 1: 'a few' is not a number"):
        restore_encoder(expected).encode(new, "rows")


@pytest.mark.parametrize("shift", [0.0, 2.0**53 - 9, -1e18])
def test_mean_and_deviation_do_not_depend_on_the_blocks_nor_on_the_size_of_the_numbers(shift: float) -> None:
    step = 2.0 ** max(0, 8 * (abs(shift) > 2**53))  # neighbours at 1e18 are 128 apart
    values = [shift + step * (index * 7 % 3 > 0) for index in range(40)]
    for rows in (values, values[::-1]):
        for size in (40, 7, 1):
            found = Moments()
            for start in range(0, 40, size):
                found.add(pl.Series(rows[start : start + size]))
            assert found.mean == pytest.approx(shift + step * 26 / 40, abs=0.5 * step)
            assert found.std == pytest.approx(step * math.sqrt(26 / 40 * 14 / 40))


def test_example_is_served_if_no_table_is_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = loaded(TableDataModule(data_dir=str(tmp_path), batch_size=16))
    assert "made-up rows" in caplog.text
    assert {name: len(batch) for name, batch in data.splits.items()} == {"train": 16000, "val": 2000, "test": 2000}
    assert set(data.spec.inputs) == {"user", "city", "hour", "device", "age", NUMERIC}
    train = data.splits["train"].targets
    assert torch.equal(train["click"] == 0, train["minutes"].isnan())


def test_whether_the_seed_draws_the_test_rows() -> None:
    for options, expected in (
        ({}, True),
        ({"val_path": "val.csv"}, True),
        ({"test_path": "test.csv"}, False),
        ({"split": {"by": "column", "column": "part"}}, False),
    ):
        assert TableDataModule(path="rows.csv", tasks={"a": "binary"}, batch_size=2, **options).random_split == expected


@pytest.mark.parametrize("way", WAYS)
def test_some_categories_of_a_training_step_are_hidden(way: str, tmp_path: Path) -> None:
    """So that the id of unknown categories, 0, or 1 in lists, is learnt; evaluation hides nothing.

    Two processes together hide what one does, and each batch of each epoch hides others.
    """
    rows = {"city": [f"c{i % 5}" for i in range(400)], "seen": ["a|b", "c"] * 200, "x": [i + 0.5 for i in range(400)]}
    options = {"columns": {"seen": {"kind": "list", "separator": "|"}}, "vocabulary": {"unknown_rate": 0.25}}

    def hidden(batch_size: int, rank: int, world_size: int, epoch: int = 0) -> list[Batch]:
        data = serve_rows(pl.DataFrame(rows), tmp_path, way, batch_size=batch_size, **options)
        data._processes, data.trainer = (lambda: (rank, world_size)), SimpleNamespace(training=True)
        place = [epoch, 0]
        data._position = lambda: tuple(place)
        found = []
        for number, batch in enumerate(list(data.train_dataloader())):
            place[1] = number
            after = data.on_after_batch_transfer(batch, 0)
            for name, unknown in (("city", 0), ("seen", 1)):
                changed = after.inputs[name] != batch.inputs[name]
                assert (after.inputs[name][changed] == unknown).all()
                assert not changed[batch.inputs[name] <= unknown].any()
            found.append(after)
        data.trainer.training = False
        assert data.on_after_batch_transfer(batch, 0) is batch
        return found

    one = hidden(100, 0, 1)
    for name, unknown in (("city", 0), ("seen", 1)):
        ids = torch.cat([batch.inputs[name] for batch in one])
        assert (ids == unknown).sum() / (ids >= unknown).sum() == pytest.approx(0.25, abs=0.06)
    two = [concat_batches([a, b]) for a, b in zip(hidden(50, 0, 2), hidden(50, 1, 2), strict=True)]
    for here, there in zip(one, two, strict=True):
        assert_same_rows(here, there)
    assert not torch.equal(one[0].inputs["city"] == 0, one[1].inputs["city"] == 0)
    assert not torch.equal(one[0].inputs["city"] == 0, hidden(100, 0, 1, epoch=1)[0].inputs["city"] == 0)
