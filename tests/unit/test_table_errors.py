"""A user's table with a mistake: one sentence that says where it is; and unusual tables that are read all the same."""

from __future__ import annotations

import gzip
import io
import math
import os
import random
import re
import tracemalloc
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from mtl.data_modules.files import reading
from mtl.data_modules.table import TableDataModule
from mtl.data_modules.tables import row_source
from mtl.data_modules.tables.encoder import NUMERIC
from mtl.data_modules.tables.row_source import RowSource

from mtl.checks import InputError
from tests.loaded import loaded

TASKS = {"y": {"kind": "binary"}}
GOOD = "a,b,y\n" + "".join(f"{i}.5,{'ST'[i % 2]},{i // 2 % 2}\n" for i in range(40))
KINDS = ("binary", "multiclass", "regression")
ENDS: dict[str, Callable[[], bytes]] = {  # the same table in each format
    ".csv": GOOD.encode,
    ".csv.gz": lambda: gzip.compress(GOOD.encode()),
    ".tsv": lambda: GOOD.replace(",", "\t").encode(),
    ".parquet": lambda: parquet(pl.read_csv(GOOD.encode())),
}


def module(path: Path | str | None, tasks: Any = TASKS, streamed: bool = False, **options: Any) -> Any:
    options = {"batch_size": 8, "window_rows": 1 << 20 if streamed else None} | options
    return loaded(TableDataModule(None if path is None else str(path), tasks, **options))


def rows(data: TableDataModule) -> int:
    return sum(map(len, data.splits.values()))


def save(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def parquet(frame: pl.DataFrame) -> bytes:
    target = io.BytesIO()
    frame.write_parquet(target)
    return target.getvalue()


def refusal(path: Path | str | None, tasks: Any = TASKS, **options: Any) -> str:
    """Return the message that refuses a table."""
    with pytest.raises(InputError) as caught:
        module(path, tasks, **options)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1000
    return message


def with_lines(line: int, text: str) -> str:
    """Return the table with another line."""
    lines = GOOD.splitlines()
    lines[line - 1] = text
    return "\n".join(lines)


TEXTS = {  # content of t.csv: the message
    "empty": ("", "t.csv is empty"),
    "header alone": ("a,y\n", "t.csv has a header but no rows"),
    "same names": ("a,y,y\n1,2,3\n", "2 columns are called 'y': give each a name of its own"),
    "no last name": ("a,b, \n1,2,3\n", "the name '' of a column is empty"),
    "name of two lines": (
        'a,"b\nc",y\n1,2,3\n',
        r"the name 'b\nc' of a column is empty or contains control characters",
    ),
    "numeric columns": (GOOD.replace("b", "numeric columns", 1), "rename the column 'numeric columns'"),
    "carriage returns": (GOOD.replace("\n", "\r"), "has a header but no rows"),
    "latin-1": (
        GOOD.replace("S", "\xe9", 1).encode("latin-1"),
        "t.csv, line 2: invalid continuation byte; save",
    ),
    "parquet": (parquet(pl.DataFrame({"y": [0, 1] * 20})), "save the table as CSV in UTF-8"),
    "too few": (with_lines(5, "1.5,S"), "row 4 has 2 cells, but the first line names 3 columns (separated by ',')"),
    "nothing": (with_lines(5, ""), "row 4 has 1 cells"),
    "too many": (with_lines(5, "1.5,S,0,1"), "row 4 has 4 cells"),
    "line feed in quotes": (with_lines(5, '1.5,"S\nT",0\n1.5'), "row 5 has 1 cells"),
    "open quote": (with_lines(5, '1.5,"S,0'), "cannot read"),
    "text among numbers": (with_lines(8, "z,S,0"), "t.csv, column 'a', row 7: 'z' is not a number, but most"),
    "huge number": (with_lines(8, "-1e308,S,0"), "column 'a', row 7: '-1e308' is so large that"),
    "one label": ("a,y\n" + "1,yes\n" * 20, "column 'y': all 20 labels of the training rows are 'yes'"),
    "no label": ("a,y\n" + "1,\n" * 20, "no training row has a label for task 'y'"),
    "three labels": ("a,y\n" + "1,a\n1,b\n1,c\n" * 20, "3 different labels, a, b, c; use kind=multiclass"),
    "constant input": (
        "a,y\n" + "1,0\n1,1\n" * 20,
        "every input column is constant in the training rows, an identifier, or free text",
    ),
    "no input": ("y\n" + "0\n1\n" * 20, "no column is left as input"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_bad_texts(name: str, tmp_path: Path) -> None:
    content, message = TEXTS[name]
    path = save(tmp_path / "t.csv", content)
    found = refusal(path, split={"fractions": [1, 0, 0]}, val_path=str(path), test_path=str(path))
    assert message in found


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


@pytest.mark.parametrize("separator", ["", "ab", "\n", '"', "\xe9", ";"])
def test_unsuitable_separators_are_refused(separator: Any, tmp_path: Path) -> None:
    message = refusal(save(tmp_path / "t.csv", GOOD), csv={"separator": separator})
    assert "separator=" in message or separator == ";"  # which is not that of the file


def test_inputs_far_from_the_training_rows_are_refused_with_their_row(tmp_path: Path) -> None:
    good, other = save(tmp_path / "t.csv", GOOD), save(tmp_path / "u.csv", with_lines(8, "1e300,S,0"))
    message = refusal(good, test_path=str(other))
    assert "u.csv, column 'a', row 7: '1e300' is too far from the training rows" in message


def test_damaged_gzip_file_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "t.csv.gz", gzip.compress(GOOD.encode())[:40])
    assert "t.csv.gz is damaged or not a gzip file" in refusal(path)


def test_files_that_unpack_to_much_more_than_themselves_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = bytes(1 << 16)
    with gzip.open(tmp_path / "bomb.csv.gz", "wb", compresslevel=1) as file:
        for _ in range(2048):
            file.write(zeros)
    tracemalloc.start()
    assert re.search(
        r"bomb.csv.gz holds more than 100 times its [\d,]+ bytes: unpack it", refusal(tmp_path / "bomb.csv.gz")
    )
    assert tracemalloc.get_traced_memory()[1] < 1.5 * 2**27
    tracemalloc.stop()
    draw = random.Random(0).random
    save(tmp_path / "much.csv.gz", gzip.compress("".join(f"{draw()},{draw()}\n" for _ in range(3000)).encode()))
    pl.DataFrame({"a": [0] * 4000, "y": [1] * 4000}).write_parquet(tmp_path / "much.parquet")
    monkeypatch.setattr(reading, "HARMLESS", 1000)
    monkeypatch.setattr(reading, "MEMORY", 100_000)
    assert "much.csv.gz holds more than a table in memory may have" in refusal(tmp_path / "much.csv.gz")
    monkeypatch.setattr(row_source, "MEMORY", 100_000)
    message = refusal(tmp_path / "much.parquet")
    monkeypatch.setattr(row_source, "MEMORY", 4000 * (2 * 16 + 1))  # the cells alone would fit
    assert refusal(tmp_path / "much.parquet") == message
    assert "4,000 rows of 2 columns, which do not fit into memory: use data.window_rows=1048576" in message


def test_messages_of_several_files_name_the_file_and_its_row(tmp_path: Path) -> None:
    lines = GOOD.splitlines()
    for part in range(4):
        save(tmp_path / "rows" / f"{part}.csv", "\n".join([lines[0], *lines[1 + 10 * part : 11 + 10 * part]]))
    bad = tmp_path / "rows" / "2.csv"
    save(bad, bad.read_text().replace("26.5", "many"))
    assert f"{bad}, column 'a', row 7: 'many' is not a number" in refusal(tmp_path / "rows")
    save(bad, bad.read_text().replace("many,S,1", "26.5,S,?"))
    good = save(tmp_path / "t.csv", GOOD)
    assert f"{bad}, column 'y', row 7: '?' is a label of task 'y' that does" in refusal(good, test_path=str(bad.parent))


def test_first_uneven_row_is_named_whatever_the_others_have(tmp_path: Path) -> None:
    chance, path = random.Random(0), tmp_path / "t.csv"
    for _ in range(100):
        lines = ["x,x,x"] * 6
        for _ in range(chance.randrange(4)):  # lines too long may make up for lines too short
            lines[chance.randrange(6)] = ",".join("x" * chance.randrange(2, 5))
        save(path, "\n".join(["a,b,c", *lines]))
        uneven = [number for number, line in enumerate(lines, 1) if line.count(",") != 2]
        if uneven:
            with pytest.raises(InputError, match=f"row {uneven[0]} has "):
                RowSource.open(path, separator=",")
        else:
            assert RowSource.open(path, separator=",").count == 6


@pytest.mark.parametrize("suffix", ENDS)
@pytest.mark.parametrize("folder", ["x [y]", "**"])
def test_paths_with_glob_characters_are_files(folder: str, suffix: str, tmp_path: Path) -> None:
    path = save(tmp_path / folder / f"[t]*{suffix}", ENDS[suffix]())
    save(tmp_path / "y" / f"t{suffix}", "a,b,y\n")  # what the pattern would match
    assert rows(module(path)) == 40


@pytest.mark.parametrize("suffix", ENDS)
def test_files_that_cannot_be_read_are_refused(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"folder{suffix}").mkdir()
    os.mkfifo(tmp_path / f"pipe{suffix}")
    (tmp_path / f"zero{suffix}").symlink_to("/dev/zero")
    (tmp_path / f"link{suffix}").symlink_to("nowhere")
    assert f"data.path={tmp_path}/folder{suffix} is a folder without" in refusal(tmp_path / f"folder{suffix}")
    assert "is a pipe or a device" in refusal(tmp_path / f"pipe{suffix}")
    assert "is a pipe or a device" in refusal(tmp_path / f"zero{suffix}")
    assert "no such file" in refusal(tmp_path / f"link{suffix}")
    good = save(tmp_path / f"t{suffix}", ENDS[suffix]())
    assert "no such file" in refusal(good / "below.csv")
    if os.geteuid() != 0:  # root may read every file
        good.chmod(0)
        assert "Permission denied" in refusal(good)


def test_every_damage_of_a_parquet_file_gives_one_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    content, path, chance = ENDS[".parquet"](), tmp_path / "t.parquet", random.Random(0)
    damaged = [content[:size] for size in (1, 4, 100, len(content) // 2, len(content) - 1)]
    for _ in range(40):
        index = chance.randrange(len(content))
        damaged.append(content[:index] + bytes([content[index] ^ 0xFF]) + content[index + 1 :])
    refused = 0
    for raw in damaged:
        try:
            module(save(path, raw))
        except InputError:
            refused += 1
    assert refused > 10
    capfd.readouterr()  # polars may write about a panic


def test_unsuitable_column_names_of_parquet_files_are_refused(tmp_path: Path) -> None:
    content = parquet(pl.DataFrame({"ab1": [1, 2] * 20, "ab2": [0, 1] * 20}))
    path = save(tmp_path / "t.parquet", content.replace(b"ab2", b"ab1"))
    assert "with a name of its own for each column" in refusal(path, {"ab1": {"kind": "binary"}})
    for name, message in (("y ", "2 columns are called 'y'"), ("", "the name '' of a column is empty")):
        save(path, parquet(pl.DataFrame({"y": [0, 1] * 20, name: [0, 1] * 20})))
        for streamed in (False, True):
            assert message in refusal(path, streamed=streamed)


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


@pytest.mark.parametrize("change", ["short", "gone", "other rows"])
def test_file_that_changes_while_it_is_streamed_is_one_message(
    change: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    table, file = pl.read_csv((GOOD + "".join(GOOD.splitlines(True)[1:]) * 9).encode()), tmp_path / "rows" / "1.parquet"
    for number in range(3):
        save(tmp_path / "rows" / f"{number}.parquet", parquet(table[100 * number : 100 * (number + 1)]))
    data = module(tmp_path / "rows", streamed=True, window_rows=100)
    content = file.read_bytes()
    file.unlink()
    if change != "gone":
        file.write_bytes(content[:200] if change == "short" else parquet(table))
    message = r"^.*/1.parquet was changed, replaced or deleted while it was being read; .* until the run ends$"
    with pytest.raises(InputError, match=message):
        list(data.train_dataloader())
    assert capfd.readouterr().err == ""


def test_unusual_texts_are_read(tmp_path: Path) -> None:
    quoted = GOOD.replace("S", '"S,""x""\nz"')
    texts = ("\ufeff" + GOOD, GOOD.replace("\n", "\r\n"), GOOD + "\n\n", GOOD[:-1], quoted, GOOD.replace("S", "\u2603"))
    for content in (*texts, GOOD.replace("S", '"' + "s" * 2**18 + '"', 1)):
        data = module(save(tmp_path / "t.csv", content), {"z": {"column": "y", "kind": "binary"}}, ignore=["a"])
        assert list(data.spec.inputs) == ["b"]
        assert rows(data) == 40
    text = GOOD.replace("a,b,y", "2024,b. [c]/{d} \N{SNOWMAN},1", 1)
    data = module(save(tmp_path / "t.csv", text), {"y": {"kind": "binary", "column": 1, "positive": 0}})
    assert list(data.spec.inputs) == ["b. [c]/{d} \N{SNOWMAN}", NUMERIC]
    assert "ignore[0]=2024: must be text" in refusal(tmp_path / "t.csv", ignore=[2024])
