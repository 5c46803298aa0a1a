"""A user's table with a mistake in options, tasks or cells: one sentence that says where it is."""

from __future__ import annotations

import math
import re
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from mtl.data_modules.tables.encoder import NUMERIC

from tests.table_refusals import GOOD, TASKS, module, parquet, refusal, save, with_lines

KINDS = ("binary", "multiclass", "regression")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("options", "value", "message"),
    [
        ({}, "four", " is not a number"),
        ({}, "inf", " is not a number"),
        ({}, "-1e19", " is too large for a label of task 'y'"),
        ({"transform": "log"}, "0.0", ": transform=log takes positive labels of task 'y'"),
        ({"loss": "poisson"}, "-1.0", ": loss=poisson takes no negative labels of task 'y'"),
    ],
)
def test_bad_labels_are_errors_whatever_on_bad_says(
    options: dict[str, Any], value: str, message: str, streamed: bool, tmp_path: Path
) -> None:
    labels = [*["3.5", "2"] * 3, value, *["2"] * 33]
    path = save(tmp_path / "t.parquet", parquet(pl.DataFrame({"a": [row + 0.5 for row in range(40)], "y": labels})))
    files = {"split": {"fractions": [1, 0, 0]}, "on_invalid": "missing", "val_path": str(path), "test_path": str(path)}
    found = refusal(path, {"y": {"kind": "regression"} | options}, streamed=streamed, **files)
    assert f"t.parquet, column 'y', row 7: {value!r}{message}" in found


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"path": None}, "data.path is not given"),
    ({"path": "nowhere.parquet"}, "nowhere.parquet: no such file"),
    ({"path": "{0}/nope*.parquet"}, r"data.path=.*nope\*.parquet: no file matches this pattern"),
    ({"path": "{0}/empty"}, r"data.path=.*/empty is a folder without tables \("),
    ({"path": "{0}/damaged.parquet"}, ".*damaged.parquet is damaged"),
    ({"path": "{0}/unlike"}, r"unlike: its files 0.parquet and 1.parquet differ in b \(Int32 and String\)$"),
    (
        {"path": "{0}/fewer"},
        r"its files 0.parquet and 1.parquet differ in b \(String and None\), z \(None and",
    ),
    ({"tasks": {}}, "data.tasks is empty"),
    ({"tasks": {"z": {"kind": "binary"}}}, "t.parquet has no column 'z'; it has a, b, y, city"),
    ({"tasks": {"y": {"kind": "binary", "positive": "maybe"}}}, 'positive=maybe; the labels of .* are "0", "1"'),
    (
        {"tasks": {"y": {"kind": "multiclass", "class_weights": {"9": 2}}}},
        'class_weights: "9": the labels of .* are "0',
    ),
    ({"tasks": {"y": {"kind": "binary", "metrics": ["ndcg@5"]}}}, "ndcg@5 ranks the rows of each group; name its col"),
    ({"tasks": {"y": {"kind": "binary", "where": "y"}}}, "y: where=y: name another binary task; there are none"),
    (
        {"tasks": {"y": {"kind": "binary", "where": "z"}, "z": {"kind": "binary", "where": "y"}}},
        "data.tasks.y.where: y where z where y is a circle",
    ),
    ({"split": {"fractions": [0.9, 0.1, 0]}}, "data.split.fractions="),
    ({"split": {"fractions": [0, 0.5, 0.5]}, "test_path": "{0}/t.parquet"}, "data.split.fractions="),
    ({"split": {"by": "column", "column": "city"}, "test_path": "x.csv"}, "one or the other"),
    ({"split": {"by": "column", "column": "city"}}, "column 'city', row 1: 'Bern'; accepted are train, val, test"),
    ({"split": {"by": "column", "column": "b"}}, "column 'b': no row is marked (val|test)"),
    ({"split": {"fractions": [0.9999998, 1e-7, 1e-7]}}, "of its 40 rows, data.split.fractions leaves none for"),
    ({"columns": {"city": "number"}}, r"column 'city', row \d+: 'Bern' is not a number"),
    ({"columns": {"a": {"kind": "date", "ids": True}}}, "columns.a={.*}: ids is for kind=number"),
    (
        {"columns": {"a": {"kind": "list", "target": "b"}}, "ignore": ["b"]},
        "data.columns, data.ignore: b is named in both",
    ),
    ({"columns": {"cty": "category"}}, r"t.parquet has no column 'cty' \(did you mean 'city'"),
    (
        {"columns": {"b": "number", "a": {"kind": "list", "target": "b"}}},
        "data.columns.b: a is compared with it, so its kind is category",
    ),
    ({"columns": {"a": {"kind": "list", "target": "bb"}}}, "t.parquet has no column 'bb' .did you mean 'b'"),
    ({"columns": {"a": {"kind": "list", "target": "y"}}}, "its column 'y' is also named as an input"),
    ({"columns": {"a": "date"}}, "column 'a', row 1: 0.5 is not a date"),
    ({"columns": {"a": "text"}}, "column 'a', row 1: 0.5 is not text, nor is any other cell of the column"),
    ({"columns": {"city": "date"}, "on_invalid": "missing"}, r"row \d+: '\w+' is not a date, nor is any other cell of"),
    ({"columns": {"city": {"kind": "text", "separator": " "}}}, "columns.city={.*}: separator is for kind=list"),
    ({"columns": {"city": "text"}, "ignore": ["city"]}, "data.columns, data.ignore: city is named in both"),
    (
        {"columns": {"city": {"kind": "list", "separator": " "}}, "ignore": ["city"]},
        "data.columns, data.ignore: city is named in both",
    ),
    ({"path": "{0}/named.parquet"}, "rename the column at month: the date 'at' becomes parts of this name"),
]
ALONE = [  # of tables in memory
    ({"test_path": "{0}/less.csv"}, "less.csv lacks columns of .*t.parquet: a, city"),
    ({"weight_column": "city"}, "column 'city', row 1: 'Bern' is not a number"),
    ({"weight_column": "y"}, "data.tasks.y: its column 'y' is also named as a weight_column"),
    ({"weight_column": "a", "columns": {"a": "number"}}, "data.weight_column=a: this column is also named as an input"),
    ({"weight_column": "w"}, "column 'w', row 1: -1.0 is not a weight, a number from 0 to 1e"),
    ({"weight_column": "zero"}, "column 'zero': all labels of task 'y' have weight 0"),
    ({"tasks": {"y": {"kind": "binary", "weight_column": "ww"}}}, "has no column 'ww'"),
    ({"path": "{0}/mixed"}, r"mixed: .csv and .parquet files: give a pattern that matches one format"),
    ({"path": "{0}/d.xlsx"}, "accepted formats are .csv, .csv.gz, .tsv, .parquet"),
]
STREAMED = [
    ({"path": "{0}/a.csv"}, r"data.window_rows reads .parquet files; convert it with polars.scan_csv\('a.csv'\)"),
    ({"window_rows": 0}, "window_rows=0"),
    ({"path": "{0}/none.parquet"}, "none.parquet, of its 0 rows, data.split.fractions leaves none for train"),
    (
        {"tasks": {"y": {"kind": "binary", "weight_column": "a"}}},
        "weight_column: rows that are read by data.window_rows have no weights",
    ),
]


@pytest.mark.parametrize(
    ("streamed", "options", "message"),
    [(way, *case) for way, cases in ((False, OPTIONS + ALONE), (True, OPTIONS + STREAMED)) for case in cases],
)
def test_bad_options_and_files(streamed: bool, options: dict[str, Any], message: str, files: Path) -> None:
    good = "weighted.parquet" if "weight_column" in options else "t.parquet"
    given: dict[str, Any] = {"path": f"{{0}}/{good}", "tasks": TASKS, "streamed": streamed} | options
    given = {name: value.format(files) if isinstance(value, str) else value for name, value in given.items()}
    assert re.search(message, refusal(**given))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of good and bad files."""
    folder, number = tmp_path_factory.mktemp("files"), pl.int_range(40)
    good = pl.read_csv(GOOD.encode()).with_columns(
        b=pl.lit("train"), city=pl.Series(["Bern", "Ulm"] * 20), w=-1.0 + number, zero=0.0
    )
    dated = good.with_columns(pl.date(2026, 1, 1 + number % 28).alias("at"), number.alias("at month"))
    frames = {
        "weighted": good,
        "t": good.drop("w", "zero"),
        "unlike/0": good.with_columns(b=1),
        "unlike/1": good.with_columns(b=pl.lit("1"), y=number),
        "fewer/0": good,
        "fewer/1": good.drop("b").with_columns(z=1),
        "mixed/b": good,
        "named": dated,
        "none": good.head(0),
    }
    for name, frame in frames.items():
        save(folder / f"{name}.parquet", parquet(frame))
    (folder / "empty").mkdir()
    save(folder / "damaged.parquet", b"PAR1 and no more")
    save(folder / "less.csv", "b,y\n" + "S,0\n" * 9)
    for name in ("a.csv", "d.xlsx", "mixed/a.csv"):
        save(folder / name, GOOD)
    return folder


BINARY, REGRESSION = ({"column": "y", "kind": kind} for kind in ("binary", "regression"))
BAD_TASKS: list[Any] = [
    5, {"y": None}, {"y": "binry"}, {"y": {}}, {"a/b": BINARY}, {1: BINARY}, {"y": BINARY | {"column": ["y"]}},
    {"y": BINARY | {"positive": ["1"]}}, {"y": BINARY | {"positive": 7}},
    {"y": BINARY | {"positive": math.nan}}, {"y": BINARY | {"colum": "x"}},
    {"y": {"kind": "regression", "positive": 1}}, {"y": {"kind": "multiclass", "pos_weight": 2}},
    {"y": BINARY | {"class_weights": {"1": 2}}}, {"y": BINARY | {"standardize": False}},
    {"y": BINARY | {"metrics": ["aucroc"]}}, {"y": BINARY | {"pos_weight": "even"}},
    {"y": {"kind": "multiclass", "class_weights": {"1": -1}}}, {"y": BINARY | {"weight": 1e30}},
    {"y": BINARY | {"loss": "quantile"}}, {"y": BINARY | {"transform": "log"}}, {"y": BINARY | {"gamma": 1}},
    {"y": REGRESSION | {"loss": "focal"}}, {"y": REGRESSION | {"smoothing": 0.1}}, {"y": REGRESSION | {"delta": 2}},
    {"y": REGRESSION | {"loss": "poisson", "transform": "log"}}, {"y": REGRESSION | {"metrics": ["pinball"]}},
    {"y": REGRESSION | {"loss": "quantile", "quantiles": [0.1, 1.5]}},
]  # fmt: skip


@pytest.mark.parametrize("tasks", BAD_TASKS)
def test_unsuitable_tasks_are_refused(tasks: Any, tmp_path: Path) -> None:
    assert re.match("data.tasks[^:]*", refusal(save(tmp_path / "t.csv", GOOD), tasks))


def test_inputs_far_from_the_training_rows_are_refused_with_their_row(tmp_path: Path) -> None:
    good, other = save(tmp_path / "t.csv", GOOD), save(tmp_path / "u.csv", with_lines(8, "1e300,S,0"))
    message = refusal(good, test_path=str(other))
    assert "u.csv, column 'a', row 7: '1e300' is too far from the training rows" in message


TYPES: dict[str, tuple[pl.Series, bool, bool]] = {  # of a Parquet file: a column, whether inputs and labels may have it
    "list": (pl.Series([[1], [2]] * 20), True, False),
    "date": (pl.Series([date(2020, 1, 1), date(2020, 1, 2)] * 20), True, False),
    "struct": (pl.Series([{"a": 1}, {"a": 2}] * 20), False, False),
    "vector": (pl.Series([[1.5], [2.5]] * 20), False, False),
    "time": (pl.Series([1, 2] * 20).cast(pl.Time), False, False),
    "binary": (pl.Series([b"a", b"b"] * 20), False, False),
    "categorical": (pl.Series(["1", "2"] * 20, dtype=pl.Categorical), True, True),
    "decimal": (pl.Series([Decimal("1.0"), Decimal("2.5")] * 20), True, True),
    "boolean": (pl.Series([True, False] * 20), True, True),
    "uint64": (pl.Series([1, 2**64 - 1] * 20, dtype=pl.UInt64), True, True),
    "float32": (pl.Series([1.5, 2.5] * 20, dtype=pl.Float32), True, True),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", TYPES)
def test_types_of_inputs_and_labels(name: str, streamed: bool, tmp_path: Path) -> None:
    column, inputs, labels = TYPES[name]
    frame = pl.DataFrame({"a": pl.Series(range(40)) + 0.5, "y": column, "z": [0, 1, 1, 0] * 10})
    path = save(tmp_path / "t.parquet", parquet(frame))
    for kind in KINDS:
        z, y = {"z": {"kind": kind}}, {"y": {"kind": kind}}
        if inputs:
            assert set(module(path, z, streamed).spec.inputs) & {"y", "y day", NUMERIC}
        else:
            assert re.search(r"column 'y': its type .*data\.ignore=\[y\]$", refusal(path, z, streamed=streamed))
            assert set(module(path, z, streamed, ignore=["y"]).spec.inputs) == {NUMERIC}
        if labels and kind != "regression":
            assert len(module(path, y, streamed).spec.tasks[0].classes) == 2
        if not labels:
            message = refusal(path, y, streamed=streamed)
            assert re.search(r"t\.parquet, column 'y': its type .* is neither text nor number;", message)
            assert "column 'y': its type" in refusal(path, z, streamed=streamed, split={"by": "column", "column": "y"})
