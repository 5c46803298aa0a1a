"""A user's table, in memory and streamed: what is learnt from the training rows, and the tensors that follow."""

from __future__ import annotations

import json
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
from mtl.data_modules.files.identity import fingerprint
from mtl.data_modules.state import describe_changes
from mtl.data_modules.stream import batch_tensors, concat_batches
from mtl.data_modules.table import TableDataModule
from mtl.data_modules.tables.columns.list import words_and_groups
from mtl.data_modules.tables.encoder import NUMERIC, TableEncoder
from mtl.data_modules.tables.labels import TargetOptions, mask_by_conditions
from mtl.data_modules.tables.statistics import Moments

from mtl.checks import InputError
from mtl.training.losses import task_loss_sums
from mtl.types import MISSING_CLASS, Bag, Batch, Categorical, Numeric
from tests.loaded import loaded

WAYS = ("csv", "streamed")
Y = {"y": {"kind": "binary"}}
SAME: dict[str, Any] = {
    "split": {"fractions": [1, 0, 0]},
    "val_path": "same",
    "test_path": "same",
}  # all rows in each split


def made(path: Path | str, way: str = "csv", tasks: Any = None, **options: Any) -> Any:
    options = {name: str(path) if value == "same" else value for name, value in options.items()}
    window = {"window_rows": 480} if way == "streamed" else {}
    return loaded(TableDataModule(str(path), tasks or Y, **{"batch_size": 8, "eval_batch_size": 64} | window | options))


def write(frame: pl.DataFrame, path: Path) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    frame.write_parquet(path, row_group_size=60) if path.suffix == ".parquet" else frame.write_csv(path)
    return path


def parts(frame: pl.DataFrame, folder: Path, suffix: str = ".parquet", count: int = 4) -> Path:
    """Write the rows to several files of a folder."""
    size = -(-len(frame) // count)
    for number in range(count):
        write(frame[number * size : (number + 1) * size], folder / f"part-{number}{suffix}")
    return folder


def served(frame: pl.DataFrame, folder: Path, way: str, tasks: Any = None, **options: Any) -> Any:
    """Serve ``frame``, with labels ``y`` if it has none; a streamed one comes from several files."""
    if "y" not in frame.columns:
        frame = frame.with_columns(y=pl.int_range(pl.len()) // 2 % 2)
    path = parts(frame, folder / "rows") if way == "streamed" else write(frame, folder / f"t.{way}")
    return made(path, way, tasks, **(SAME | options))


def rows_of(data: Any, split: str = "val") -> Batch:
    """Return the rows of a split in the order of the files."""
    loader = data.train_dataloader() if split == "train" else getattr(data, f"{split}_dataloader")()
    batches = list(loader)
    first = batches[0]
    inputs = {name: torch.cat([batch.inputs[name] for batch in batches]) for name in first.inputs}
    targets = {name: torch.cat([batch.targets[name] for batch in batches]) for name in first.targets}
    return Batch(inputs, targets)


def again(data: Any) -> TableEncoder:
    """Return the encoder from its state, as a checkpoint holds it."""
    return TableEncoder.from_state(json.loads(json.dumps(data.row_encoder.state())))


def same(one: Batch, other: Batch, exact: bool = True) -> None:
    for there, here in ((one.inputs, other.inputs), (one.targets, other.targets)):
        assert list(there) == list(here)
        for name in there:
            torch.testing.assert_close(
                there[name], here[name], rtol=0, atol=0 if exact else 1e-6, equal_nan=True, msg=name
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
    data = served(frame, tmp_path, way, **options)
    frame = pl.read_csv(tmp_path / "t.csv", infer_schema=False) if way == "csv" else frame
    assert data.spec.inputs == (expected or NUMBER)
    assert data.row_encoder.columns == (["x"] if expected is None else [series.name])
    found = rows_of(data)
    expected_rows = again(data).encode(frame, "rows")
    assert all(torch.equal(found.inputs[input], expected_rows[input]) for input in data.spec.inputs)
    single = [data.row_encoder.encode(frame[i : i + 1], "rows") for i in range(40)]  # rows do not depend on each other
    assert all(torch.equal(torch.cat([row[one] for row in single]), found.inputs[one]) for one in found.inputs)


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
    path = write(rows.with_columns(y=rows["flag"], z=rows["size"]), tmp_path / "t.parquet")
    tasks = {"y": {"kind": "binary"}, "z": {"kind": "multiclass"}}
    data = made(path, tasks=tasks, columns=dict.fromkeys(rows.columns, "category"), **SAME)
    own, found = (data.row_encoder.encode(frame, "rows") for frame in (rows, others))
    for name, categories in {"size": 4, "flag": 3, "cost": 4, "zero": 3, "text": 3}.items():  # one is the empty cell
        assert torch.equal(own[name], found[name]), name
        assert own[name].unique().tolist() == list(range(1, 1 + categories))  # 0 would be unknown
    assert [task.classes for task in data.spec.tasks] == [("false", "true"), ("0", "1", "3")]
    labelled = [
        data.labelled(frame.with_columns(y=frame["flag"], z=frame["size"]), "rows").targets for frame in (rows, others)
    ]
    for task in tasks:
        torch.testing.assert_close(labelled[0][task], labelled[1][task], equal_nan=True, rtol=0, atol=0)
    assert not caplog.records
    data.row_encoder.encode(others.with_columns(size=pl.col("size").cast(pl.String) + "?"), "new rows")
    assert "new rows, column 'size': 15 of 20 cells are unknown or rare categories" in caplog.text


@pytest.mark.parametrize("way", ["csv", "parquet"])
def test_rows_to_predict_keep_their_texts_and_are_empty_where_the_training_rows_were(way: str, tmp_path: Path) -> None:
    rows = pl.DataFrame({"country": ["NA", "US", "None", "US"] * 5, "x": [1.5, 2.5, 0.5, 3.5] * 5})
    data = served(rows, tmp_path, way, columns={"country": "category", "x": "number"})
    path = write(
        pl.DataFrame({"country": ["NA", "US", "None", "FR"], "x": ["NA", "2.0", "", "2"]}), tmp_path / "new.csv"
    )
    [(block, _)] = data.row_encoder.blocks(path)
    assert block["country"].to_list() == ["NA", "US", "None", "FR"]
    found = data.row_encoder.encode(block, "new.csv")
    assert found["country"].tolist() == ([1, 2, 1, 0] if way == "csv" else [1, 3, 2, 0])  # 1: the empty cell, in CSV
    assert found[NUMERIC][:, 0].tolist() == [0, 0, 0, 0]  # the mean, 2; the others are empty in both


def test_most_frequent_categories_keep_their_ids(tmp_path: Path) -> None:
    cities = pl.DataFrame({"city": ["Ulm"] * 200 + ["Rom"] * 120 + ["Bern"] * 80})
    encoder = served(cities, tmp_path, "streamed", vocabulary={"max_size": 2}).row_encoder
    ids = encoder.encode(pl.DataFrame({"city": ["Bern", "Rom", "Ulm", "Nice"]}), "rows")["city"]
    assert ids.tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("form", DATES)
def test_parts_and_ages_of_dates(form: str, tmp_path: Path) -> None:
    data = served(pl.DataFrame({"at": DATES[form]}), tmp_path, "streamed")
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
    data = served(pl.DataFrame({"at": [None, *(day.date() for day in DAYS[1:])]}), tmp_path, "csv")
    assert data.spec.inputs[NUMERIC] == Numeric(6)
    assert rows_of(data).inputs[NUMERIC][0].tolist() == [0, 1] * 3  # the means, marked
    assert data.row_encoder.vocabularies["at weekday"].values[0] == "\0missing"
    encoder = again(data)
    expected = encoder.encode(pl.DataFrame({"at": [datetime(2026, 1, 5), None]}), "rows")
    for rows in ({"at": ["2026-01-05", None]}, {"at": [date(2026, 1, 5), None]}, {"at": ["2026-01-05T00:00", "NA"]}):
        same(Batch(encoder.encode(pl.DataFrame(rows), "rows"), {}), Batch(expected, {}))
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
    data = served(pl.DataFrame({"genres": LISTS[form]}), tmp_path, way, columns=columns)
    assert rows_of(data).inputs["genres"][:4].tolist() == [[2, 4, 0], [0, 0, 0], [4, 0, 0], [5, 2, 3]]
    encoder = again(data)
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
    data = served(rows, tmp_path, "csv", columns={"c": "text"})
    vocabulary = data.row_encoder.vocabularies["c"].values
    found = again(data).encode(pl.DataFrame({"c": ["NO?", "zz", None]}), "rows")["c"]
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
    data = served(frame, tmp_path, way, columns=columns)
    assert data.spec.inputs == {"item": Categorical(6), "seen": Bag(7, 3, "item"), "liked": Bag(7, 1, "item")}
    assert data.row_encoder.vocabularies["item"].values == ["\0missing", "3", "5", "7", "9"]
    found = rows_of(data).inputs
    assert found["item"][:4].tolist() == [2, 5, 4, 1]
    assert found["seen"][:4].tolist() == [[5, 3, 0], [0, 0, 0], [4, 4, 3], [0, 0, 0]]
    unknown = again(data).encode(pl.DataFrame({"item": [8], "seen": [["8", "9"]], "liked": [["3"]]}), "rows")
    assert (unknown["item"].tolist(), unknown["seen"].tolist()) == ([0], [[1, 6, 0]])


@pytest.mark.parametrize("way", WAYS)
def test_learning_is_from_the_training_rows_only(way: str, tmp_path: Path) -> None:
    train = pl.DataFrame({"city": ["Bern", "Ulm"] * 20, "size": [1.5, 3.5] * 20, "y": [0, 1] * 20})
    test = pl.DataFrame({"city": ["Rom", "Bern", None], "size": [1e6, None, 2.5], "y": [1, 0, None]})
    suffix = "csv" if way == "csv" else "parquet"
    other = str(write(test, tmp_path / f"test.{suffix}"))
    data = made(
        write(train, tmp_path / f"a.{suffix}"), way, val_path=other, test_path=other, split={"fractions": [1, 0, 0]}
    )
    assert data.spec.inputs == {"city": Categorical(3), NUMERIC: Numeric(1)}
    found = rows_of(data, "test")
    assert found.inputs["city"].tolist() == [0, 1, 0]  # unknown, Bern, empty: unknown too
    assert found.inputs[NUMERIC].flatten().tolist() == pytest.approx([1e6 - 2.5, 0.0, 0.0])
    assert found.targets["y"].isnan().tolist() == [False, False, True]
    new = str(write(test.with_columns(y=3), tmp_path / f"new.{suffix}"))
    with pytest.raises(InputError, match=r"row 1: '?3'? is a label of task 'y' that does not occur"):  # noqa: PT012
        data = made(tmp_path / f"a.{suffix}", way, val_path=new, test_path=other, split={"fractions": [1, 0, 0]})
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
            served(frame.select(column, "more"), tmp_path, way, **options)
    options = {"csv": {"null_values": ["", "NA"]}, "on_invalid": "missing"}
    data = served(frame, tmp_path, way, **options)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2  # one for each column
    bad = 2 if way == "csv" else 3  # in a typed file, "" is a text
    count = bad * (1 if way == "streamed" else 3) - 1  # those of the training rows, or of all three splits
    told = rf"column 'age', row (4|9): .* It and {count} other cells of this column are treated as missing"
    assert re.search(told, "".join(warnings))
    emptied = frame.with_columns(
        pl.col("age").replace(["many", "inf", ""], None), pl.col("at").replace(days[6:10:3], None)
    )
    expected = served(emptied, tmp_path / "emptied", way)
    same(rows_of(data), rows_of(expected))
    assert data.row_encoder.scales == expected.row_encoder.scales
    new = pl.DataFrame({"age": ["a few"], "more": [1.0], "at": [None]}, schema_overrides={"at": pl.String})
    assert again(data).encode(new, "rows")[NUMERIC][0, :2].tolist() == [0, 1]
    with pytest.raises(InputError, match=r"rows, column 'age', row 1: 'a few' is not a number"):
        again(expected).encode(new, "rows")


COUNT = 500
TASKS: dict[str, Any] = {
    "click": {"kind": "binary", "pos_weight": "balanced"},
    "genre": {"kind": "multiclass", "class_weights": "balanced"},
    "stars": {"kind": "regression"},
}


def many(count: int = COUNT, seed: int = 0) -> pl.DataFrame:
    """Return a table of many kinds of columns, each with its own kind of gap."""
    draw = np.random.default_rng(seed)
    start = datetime(2024, 1, 1)
    frame = pl.DataFrame(
        {
            "number": range(count),  # distinct whole numbers: numeric
            "user": draw.integers(0, 20, count),
            "city": draw.choice(["Bern", " Ulm", "Rom ", "Oslo"], count),
            "price": draw.normal(1e3, 1e-1, count),
            "floor": draw.integers(0, 5, count).astype(float),  # whole numbers as floats: categories
            "text_number": [f"{value:.3f}" for value in draw.normal(size=count)],
            "text_code": [str(value) for value in draw.integers(0, 9, count)],
            "late": draw.integers(0, 9, count) + np.where(np.arange(count) > 450, 0.5, 0.0),
            "note": [f"this is note number {number}" for number in range(count)],  # free text
            "flag": draw.integers(0, 2, count).astype(bool),
            "same": [7] * count,
            "empty": [None] * count,
            "day": [(start + timedelta(hours=7 * number)).isoformat() for number in range(count)],
            "tags": [[str(value) for value in draw.integers(0, 9, size)] for size in draw.integers(0, 4, count)],
            "click": draw.choice(["no", "yes"], count, p=[0.8, 0.2]),
            "genre": draw.choice([10, 9, 100], count),
            "stars": draw.normal(50, 20, count),
        }
    )
    gaps = ("user", "city", "price", "floor", "day", "tags", "click", "genre", "stars")
    frame = frame.with_columns(
        pl.when(pl.Series(draw.random(count) < 0.1)).then(None).otherwise(pl.col(name)).alias(name) for name in gaps
    )
    nan = pl.when(pl.col("number") % 7 == 0).then(float("nan")).otherwise(pl.col("price"))
    return frame.with_columns(
        price=nan, part=pl.Series(draw.choice(["train", "val", "test"], count, p=[0.7, 0.2, 0.1]))
    )


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of files with few columns, which are read faster."""
    return parts(many().select("number", "city", "click"), tmp_path_factory.mktemp("few") / "rows")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return the same table, streamed and in memory."""
    folder = tmp_path_factory.mktemp("both")
    options: dict[str, Any] = {
        "split": {"by": "column", "column": "part"},
        "vocabulary": {"min_count": 3},
        "group_column": "user",
        "columns": {"note": "text"},
        "batch_size": 32,
    }
    whole = write(many(), folder / "whole.parquet")
    return made(parts(many(), folder / "rows"), "streamed", TASKS, **options), made(whole, "parquet", TASKS, **options)


def test_streaming_learns_what_the_table_in_memory_teaches(both: tuple[Any, Any]) -> None:
    streamed, memory = both
    one, other = streamed.row_encoder.state(), memory.row_encoder.state()
    scales: list[dict[str, Any]] = [
        {name: scale for column in state["columns_by_name"].values() for name, scale in column.pop("scales").items()}
        for state in (one, other)
    ]
    for scale, expected in zip(*(by_name.values() for by_name in scales), strict=True):
        assert (scale.pop("bounds"), scale.pop("edges")) == (expected.pop("bounds"), expected.pop("edges"))
        assert scale == pytest.approx(expected, rel=1e-12)
    columns = [state["columns_by_name"].values() for state in (one, other)]
    means = ([column["histogram"].pop("mean") for column in part] for part in columns)
    for mean, expected_mean in zip(*means, strict=True):
        assert mean == (None if expected_mean is None else pytest.approx(expected_mean, rel=1e-12))
    assert (
        list(scales[0])
        == list(scales[1])
        == ["number", "price", "floor", "text_number", "late", "day month", "day age"]
    )
    names = ["user", "city", "floor", "text_code", "flag", "day day", "day weekday", "day hour"]
    names += ["note", "tags"]
    assert list(streamed.row_encoder.vocabularies) == names
    assert one == other
    assert streamed.spec.inputs == memory.spec.inputs
    for here, there in zip(streamed.state_dict()["spec"]["tasks"], memory.state_dict()["spec"]["tasks"], strict=True):
        for name in ("mean", "std", "constant"):
            assert here.pop(name) == pytest.approx(there.pop(name), rel=1e-12, abs=1e-12)
        assert here == there
    assert streamed.spec.tasks[0].pos_weight > 3
    assert streamed.row_counts() == memory.row_counts()


@pytest.mark.parametrize("split", ["val", "test"])
def test_evaluation_has_the_batches_of_the_table_in_memory(both: tuple[Any, Any], split: str) -> None:
    streamed, memory = ([*getattr(data, f"{split}_dataloader")()] for data in both)
    assert len(streamed) == len(memory) == len(getattr(both[0], f"{split}_dataloader")())
    pairs = set[tuple[int, int]]()
    for here, there in zip(streamed, memory, strict=True):
        same(here, there, exact=False)
        pairs |= set(zip(here.groups.tolist(), there.groups.tolist(), strict=True))
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})  # the same groups
    assert [(a, b) for a, b in pairs if a < 0 or b < 0] == [(-1, -1)]
    nothing = both[0].splits[split].read(0, torch.arange(0))  # for a process with fewer batches than the others
    assert len(nothing) == 0
    assert [value.dtype for value in batch_tensors(nothing)] == [value.dtype for value in batch_tensors(streamed[0])]
    [*predicted] = both[0].predict_dataloader() if split == "test" else []
    assert len(predicted) == (len(streamed) if split == "test" else 0)


def test_training_has_every_row_once(both: tuple[Any, Any]) -> None:
    streamed, memory = both
    found, expected = rows_of(streamed, "train"), memory.splits["train"]
    one, other = (batch.inputs[NUMERIC][:, 0].argsort() for batch in (found, expected))  # by row
    assert one.tolist() != list(range(len(one)))
    same(found.select(one), expected.select(other), exact=False)
    assert [len(batch) for batch in streamed.train_dataloader()] == [len(b) for b in memory.train_dataloader()]


@pytest.mark.parametrize("way", ["parquet", "streamed"])
def test_split_by_share_and_by_files(way: str, few: Path, tmp_path: Path) -> None:
    tasks = {"click": {"kind": "binary"}}
    one, again, other = (made(few, way, tasks, seed=seed) for seed in (0, 0, 1))
    counts = one.row_counts()
    assert counts == pytest.approx({"train": 400, "val": 50, "test": 50}, abs=0 if way == "parquet" else 25)
    numbers = []
    for data in (one, again, other):
        scaling = data.row_encoder.scales["number"]
        columns = [rows_of(data, split).inputs[NUMERIC][:, 0].double() for split in ("train", "val", "test")]
        numbers.append([sorted((c * scaling.std + scaling.mean).round().int().tolist()) for c in columns])
        assert sorted(number for part in numbers[-1] for number in part) == list(range(COUNT))
    assert numbers[0] == numbers[1] != numbers[2]
    frame = many(100, seed=1).select("number", "city", "click")
    folder = parts(frame, tmp_path / "other", count=2)
    files = {"val_path": str(folder), "test_path": str(folder / "part-1.parquet")}
    for split in ([1, 0, 0], [0.5, 0.3, 0.2]):  # shares of splits with a file are ignored
        assert made(few, way, tasks, **files, split={"fractions": split}).row_counts() == {
            "train": COUNT,
            "val": 100,
            "test": 50,
        }
    counts = made(few, way, tasks, test_path=str(folder), split={"fractions": [0.5, 0.5, 0]}).row_counts()
    assert counts["test"] == 100
    assert counts["train"] + counts["val"] == COUNT
    assert counts["train"] == 250
    counts = made(few, way, tasks, val_path=str(folder)).row_counts()  # a tenth of the rows, not a ninth
    assert counts == {"train": 450, "val": 100, "test": 50}


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


def test_rows_are_drawn_whatever_the_blocks_are(few: Path) -> None:
    tasks = {"click": {"kind": "binary"}}
    one, other = (made(few, "streamed", tasks, window_rows=rows) for rows in (480, 5000))
    assert one.row_counts() == other.row_counts()
    same(rows_of(one), rows_of(other), exact=False)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_several_files_are_the_table_of_all_their_rows(suffix: str, tmp_path: Path) -> None:
    frame = pl.DataFrame({"x": HALVES * 2, "city": [f"c{i % 6}" for i in range(80)], "y": [0, 0, 1, 1] * 20})
    expected = made(write(frame, tmp_path / f"all{suffix}"))
    folder = parts(frame, tmp_path / "parts", suffix)
    write(frame, folder / f".hidden{suffix}")
    (folder / "_SUCCESS").touch()
    for path in (folder, f"{folder}/*{suffix}", f"{tmp_path}/p*s/part-?{suffix}", f"{tmp_path}/**/part-[0-3]{suffix}"):
        data = made(path)
        assert data.spec == expected.spec
        for split, batch in expected.splits.items():
            same(data.splits[split], batch)
        assert data.row_encoder.state() == expected.row_encoder.state()
        assert len(data.open("train").blocks(None)) == 1  # hundreds of small files would take seconds each time
    write(frame[60:].cast({"y": pl.Int8}).select("y", "city", "x"), folder / f"part-3{suffix}")  # which fits
    assert made(folder).row_encoder.state() == expected.row_encoder.state()


@pytest.mark.parametrize("way", ["csv", "streamed"])
def test_checkpoint_state_teaches_what_was_learnt(way: str, few: Path, tmp_path: Path, caplog: Any) -> None:
    path = few if way == "streamed" else parts(many().select("number", "city", "click"), tmp_path / "rows", ".csv")
    tasks = {"click": {"kind": "binary"}}
    window = {"window_rows": 480} if way == "streamed" else {}
    before = made(path, way, tasks)
    after = TableDataModule(str(path), tasks, batch_size=8, **window)
    after.load_state_dict(before.state_dict())
    assert after.changed_files() == {}
    with caplog.at_level(logging.INFO):
        after.setup()
    assert "taken for" not in caplog.text  # no pass over the rows
    assert after.state_dict() == before.state_dict()
    same(rows_of(after, "train"), rows_of(before, "train"))
    tested = TableDataModule(str(path), tasks, batch_size=8, **window)
    tested.load_state_dict(before.state_dict(), test_only=True)
    tested.setup()
    assert tested.row_counts() == {"test": before.row_counts()["test"]}


@pytest.mark.parametrize("way", ["csv", "streamed"])
def test_changed_files_are_noticed(way: str, tmp_path: Path) -> None:
    suffix = ".parquet" if way == "streamed" else ".csv"
    table = many().select("number", "user", "click")
    folder = parts(table, tmp_path / "rows", suffix)
    pattern, tasks = f"{folder}/*{suffix}", {"click": {"kind": "binary"}}
    state = made(pattern, way, tasks).state_dict()

    def found(path: Path | str = pattern) -> str:
        data = TableDataModule(str(path), tasks, batch_size=8, window_rows=480 if way == "streamed" else None)
        data.load_state_dict(state)
        return "".join(data.changed_files().values())

    assert found() == found(folder) == ""
    parts(table.with_columns(user=pl.when(pl.col("number") == 300).then(1).otherwise(pl.col("user"))), folder, suffix)
    assert re.search(
        r"data.path=.*rows/\*\.\w+ has changed \([\d,]+ bytes in 4 files, before [\d,]+ bytes in 4", found()
    )
    parts(table, folder, suffix)
    assert found() == ""
    (folder / f"part-2{suffix}").rename(folder / f"part-9{suffix}")
    assert "has changed (" in found()
    (folder / f"part-9{suffix}").unlink()
    assert re.search(r"has changed \([\d,]+ bytes in 3 files, before [\d,]+ bytes in 4 files\)", found())
    (folder / f"part-1{suffix}").unlink()
    (folder / f"part-3{suffix}").unlink()
    one = {"data.path": fingerprint(folder / f"part-0{suffix}")}
    assert describe_changes(one, {}, {}) == {"data.path": f"data.path=part-0{suffix} is not given"}


def test_example_is_served_if_no_table_is_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = loaded(TableDataModule(data_dir=str(tmp_path), batch_size=16))
    assert "made-up rows" in caplog.text
    assert {name: len(batch) for name, batch in data.splits.items()} == {"train": 16000, "val": 2000, "test": 2000}
    assert set(data.spec.inputs) == {"user", "city", "hour", "device", "age", NUMERIC}
    train = data.splits["train"].targets
    assert torch.equal(train["click"] == 0, train["minutes"].isnan())


# Labels: 12 training rows, 4 of validation and 4 of test
PART = {"part": ["train"] * 12 + ["val"] * 4 + ["test"] * 4}
LABELS: dict[str, Any] = PART | {
    "user": ["ann", "bob", None, "ann", "cat"] * 4,
    "x": [float(row % 7) for row in range(20)],
    "click": ["yes", "no", "no", "no", None] * 4,
    "genre": ["pop", "rock", "jazz", "pop"] * 5,
    "stars": [1.0, 2.0, None, 4.0] * 5,
    "w": [float(1 + row % 3) for row in range(20)],
}
BINARY, CLASSES, REGRESSION = {"kind": "binary"}, {"kind": "multiclass"}, {"kind": "regression"}


def labelled(folder: Path, way: str, tasks: Any, change: Any = None, **options: Any) -> Any:
    path = write(pl.DataFrame(LABELS | (change or {})), folder / f"t.{'csv' if way == 'csv' else 'parquet'}")
    return made(path, way, tasks, split={"by": "column", "column": "part"}, **options)


@pytest.mark.parametrize("way", WAYS)
def test_labels(way: str, tmp_path: Path) -> None:
    tasks = {
        "click": BINARY | {"metrics": ["auprc", "ece"], "pos_weight": "balanced", "weight": 0.5},
        "no": BINARY | {"column": "click", "positive": "no"},
        "genre": CLASSES | {"class_weights": "balanced"},
        "stars": REGRESSION | {"metrics": ["rmse"]},
        "raw": REGRESSION | {"column": "stars", "standardize": False},
        "half": BINARY | {"pos_weight": 2},
        "number": CLASSES | {"class_weights": {1: 2.0, 3.0: 4.0}},
        "constant": REGRESSION,
    }
    change = {"half": [9, 10] * 10, "number": [1, 2, 3, 2] * 5, "constant": [0.1] * 20}
    data = labelled(tmp_path, way, tasks, change)
    click, no, genre, stars, raw, half, number, constant = data.spec.tasks
    assert (click.metrics, genre.metrics, stars.metrics, click.weight) == (("auprc", "ece"), (), ("rmse",), 0.5)
    assert click.pos_weight == 7 / 3  # of 10 labelled training rows, 3 are positive
    assert genre.classes == ("jazz", "pop", "rock")
    assert genre.class_weights == (12 / (3 * 3), 12 / (3 * 6), 12 / (3 * 3))
    assert (click.classes, no.classes, half.classes) == (("no", "yes"), ("yes", "no"), ("9", "10"))  # as numbers
    assert (half.pos_weight, number.class_weights) == (2, (2, 1, 4))
    labels = torch.tensor([1.0, 2.0, 4.0] * 3)
    assert (stars.mean, stars.std) == pytest.approx((float(labels.mean()), float(labels.std(correction=0))))
    assert (raw.mean, raw.std, constant.mean, constant.std) == (0, 1, pytest.approx(0.1), 1)
    targets, nan = rows_of(data, "val").targets, float("nan")
    expected = {"click": [0, 0, nan, 1], "no": [1, 1, nan, 0], "genre": [1, 2, 0, 1], "stars": [1, 2, nan, 4]}
    for name, values in expected.items():
        torch.testing.assert_close(targets[name].double(), torch.tensor(values).double(), equal_nan=True)
    types = {name: target.dtype for name, target in targets.items()}
    assert (types["click"], types["genre"], types["stars"]) == (torch.float32, torch.int64, torch.float64)
    groups = labelled(tmp_path, way, {"click": BINARY | {"metrics": ["mrr"]}}, group_column="user")
    [train, val] = (next(iter(loader)).groups for loader in (groups.train_dataloader(), groups.val_dataloader()))
    assert train is None  # they count in evaluation only
    assert val[0] == -1  # of None, ann, cat, ann
    assert val[1] == val[3] != val[2]
    assert "user" in groups.spec.inputs


def test_labels_count_where_all_nested_conditions_hold() -> None:
    tasks = {"a": BINARY, "b": BINARY | {"where": "a"}, "y": REGRESSION | {"where": "b"}, "c": CLASSES | {"where": "b"}}
    a, b = torch.tensor([1.0, 0.0, math.nan, 1.0, 1.0]), torch.tensor([1.0, 1.0, 1.0, 0.0, math.nan])
    targets = {"a": a, "b": b, "y": torch.arange(5.0), "c": torch.arange(5)}
    kept = mask_by_conditions(TargetOptions.from_tasks(tasks), targets)
    assert torch.equal(kept["y"].isnan(), torch.tensor([False, True, True, True, True]))
    assert kept["c"].tolist() == [0, *[MISSING_CLASS] * 4]


@pytest.mark.parametrize("way", WAYS)
def test_rows_with_an_empty_group_are_in_none_in_any_file(way: str, tmp_path: Path) -> None:
    """As text, empty cells are "" or one of ``null_values``, of the training file alone."""
    change = {"user": ["ann", " ", None, "ann", "cat"] * 4}
    data = labelled(tmp_path, way, {"click": BINARY | {"metrics": ["gauc"]}}, change, group_column="user")
    expected = next(iter(data.val_dataloader())).groups
    assert (expected < 0).tolist() == [True, False, False, False]  # None, ann, cat, ann
    users = pl.Series(["ann", " ", "", "ann", "cat", "NA"])
    rows = pl.DataFrame(LABELS | change).cast(pl.String)[10:16].with_columns(user=users)
    groups = data.labelled(rows, "rows").groups
    assert (groups < 0).tolist() == [False, True, True, False, False, way == "csv"]
    assert groups[0] == groups[3] == expected[1]
    assert groups[4] == expected[2]


@pytest.mark.parametrize("way", WAYS)
def test_labels_count_where_another_task_is_positive(way: str, tmp_path: Path) -> None:
    tasks = {"click": BINARY, "genre": CLASSES | {"where": "click"}, "stars": REGRESSION | {"where": "click"}}
    all_tasks = {name: {key: value for key, value in task.items() if key != "where"} for name, task in tasks.items()}
    rows, every = (rows_of(labelled(tmp_path, way, some)) for some in (tasks, all_tasks))
    clicked = every.targets["click"] == 1  # not NaN either
    assert 0 < clicked.sum() < len(clicked)
    assert torch.equal(rows.targets["genre"], every.targets["genre"].masked_fill(~clicked, MISSING_CLASS))
    stars = every.targets["stars"].masked_fill(~clicked, math.nan)
    torch.testing.assert_close(rows.targets["stars"], stars, rtol=0, atol=0, equal_nan=True)


def test_weights_of_rows(tmp_path: Path) -> None:
    """They have a mean of 1 over the labels of each split, and the loss is the weighted mean."""
    tasks = {"click": BINARY, "stars": REGRESSION | {"standardize": False}}
    own = labelled(tmp_path / "own", "csv", tasks | {"stars": tasks["stars"] | {"weight_column": "w"}})
    data = labelled(tmp_path, "csv", tasks, weight_column="w")
    for split, rows in data.splits.items():
        assert (own.splits[split].weights["click"] == 1).all()
        assert torch.equal(own.splits[split].weights["stars"], rows.weights["stars"])
    assert data.spec.inputs[NUMERIC] == Numeric(1)  # x alone
    for rows in data.splits.values():
        for task, target in rows.targets.items():
            assert float(rows.weights[task][~target.isnan()].mean()) == pytest.approx(1)
    train = data.splits["train"]
    ratio = train.weights["click"] / train.weights["click"][0]
    assert ratio.tolist() == pytest.approx([float(1 + row % 3) for row in range(12)])
    some = train.select(torch.tensor([3, 0]))
    assert torch.equal(some.weights["click"], train.weights["click"][[3, 0]])
    rows, specs = data.splits["val"], {task.name: task for task in data.spec.tasks}
    predictions = {name: torch.linspace(-1, 1, 4) for name in specs}
    names, totals, counts = task_loss_sums(specs, predictions, rows.targets, rows.weights)
    found = dict(zip(names, (totals / counts).tolist(), strict=True))
    weight, kept = torch.tensor([1.0 + row % 3 for row in range(12, 16)]), ~rows.targets["stars"].isnan()
    errors = (predictions["stars"] - rows.targets["stars"]).square()
    assert found["stars"] == pytest.approx(float((errors * weight)[kept].sum() / weight[kept].sum()))


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
        data = served(pl.DataFrame(rows), tmp_path, way, batch_size=batch_size, **options)
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
        same(here, there)
    assert not torch.equal(one[0].inputs["city"] == 0, one[1].inputs["city"] == 0)
    assert not torch.equal(one[0].inputs["city"] == 0, hidden(100, 0, 1, epoch=1)[0].inputs["city"] == 0)
