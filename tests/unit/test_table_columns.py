"""What the columns of a user's table are taken for, and what the user is told about them."""

from __future__ import annotations

import io
import logging
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from mtl.data_modules.table import TableDataModule
from mtl.data_modules.tables.cells import MISSING
from mtl.data_modules.tables.encoder import NUMERIC, TableEncoder
from mtl.data_modules.tables.inference import has_id_name
from mtl.data_modules.tables.statistics import outlier_bounds
from mtl.data_modules.tables.suggested_options import suggest_column_options

from mtl.checks import InputError
from mtl.types.metrics import OF_FEW_POSITIVES
from tests.loaded import loaded
from tests.messy import TASKS, messy

ROWS = 200
LABEL = pl.Series("y", [0, 1, 1, 0, 1] * (ROWS // 5))
DAYS = [datetime(2024 + i % 2, 1 + i % 12, 1 + i % 28) for i in range(ROWS)]


def formats_of(encoder: TableEncoder) -> dict[str, str]:
    return {name: column.format for name, column in encoder.columns_by_name.items() if column.format}


def learnt(cells: Any, folder: Path, suffix: str = "csv", label: pl.Series = LABEL, **options: Any) -> Any:
    """Return the data module of a table; all its rows are training rows."""
    frame = pl.DataFrame(cells).with_columns(label)
    path = folder / f"t.{suffix}"
    frame.write_csv(path) if suffix == "csv" else frame.write_parquet(path)
    same = {
        "window_rows": None if suffix == "csv" else 1 << 20,
        "split": {"fractions": [1, 0, 0]},
        "val_path": str(path),
        "test_path": str(path),
    }
    tasks = options.pop("tasks", {"y": {"kind": "regression" if label.dtype.is_float() else "binary"}})
    return loaded(TableDataModule(str(path), tasks, batch_size=32, **same, **options))


KINDS: dict[str, tuple[list[Any], str]] = {  # of a column with this name: its cells, and what it is taken for
    "Age": ([18 + i % 60 for i in range(ROWS)], "number"),
    "stars": ([1 + i % 5 for i in range(ROWS)], "both"),
    "new": ([i % 2 for i in range(ROWS)], "category"),  # two numbers have no order to learn
    "id": ([1000 + i % 90 for i in range(ROWS)], "number"),  # few rows for each
    "user_id": ([1000 + i % 60 for i in range(ROWS)], "category"),
    "CustomerID": (list(range(ROWS)), "identifier"),
    "Order ID": ([f"ORD-{i}" for i in range(ROWS)], "identifier"),
    "income": (list(range(ROWS)), "number"),  # whole numbers alone do not make an identifier
    "weight": ([f"{i}.5 kg" for i in range(ROWS)], "1,234.5 kg"),
    "rate": ([f"{i}%" for i in range(ROWS)], "1,234.5%"),
    "cost": ([f"€ {i},5" for i in range(ROWS)], "€ 1.234,5"),
    "price": ([f"{i},234,567.8" for i in range(1, 1 + ROWS)], "1,234.5"),
    "mixed units": ([f"{i} {'kg' if i % 2 else 'g'}" for i in range(ROWS // 2)] * 2, "category"),
    "signup": ([day.strftime("%d/%m/%Y") for day in DAYS], "dd/mm/yyyy"),
    "american": ([day.strftime("%m/%d/%Y %I:%M %p") for day in DAYS], "mm/dd/yyyy"),
    "german": ([day.strftime("%d.%m.%y") for day in DAYS], "dd.mm.yy"),
    "long": ([day.strftime("%B %d, %Y") for day in DAYS], "mmm dd, yyyy"),
    "short": ([day.strftime("%d %b %Y") for day in DAYS], "dd mmm yyyy"),
}


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_kinds_and_formats(suffix: str, tmp_path: Path) -> None:
    columns = {name: cells for name, (cells, _) in KINDS.items()}
    encoder = learnt(columns, tmp_path, suffix).row_encoder
    for name, (_, expected) in KINDS.items():
        column = encoder.columns_by_name.get(name)
        kind = "identifier" if column is None else "both" if column.options["ids"] else column.kind
        assert formats_of(encoder).get(name, kind) == expected
    again = TableEncoder.from_state(encoder.state())
    assert again.state() == encoder.state()
    formatted = {name: columns[name][:3] for name in encoder.columns}
    plain = formatted | {
        "weight": [0.5, 1.5, 2.5],
        "cost": [0.5, 1.5, 2.5],
        "rate": [0, 1, 2],
        "price": [1234567.8, 2234567.8, 3234567.8],
        **dict.fromkeys(("signup", "american", "german", "long", "short"), DAYS[:3]),
    }
    served = plain | {"weight": ["0.5", "1.5 kg", "2.5"], "signup": [str(day) for day in DAYS[:3]]}
    one, *others = (again.encode(pl.DataFrame(rows), "rows") for rows in (formatted, plain, served))
    assert all(one[name].equal(other[name]) for name in one for other in others)


QUESTIONS: dict[str, tuple[list[str], str]] = {
    "may be day or month": (
        ["03/03/2024", "03/04/2024", "05/06/2024", "11/12/2024"] * 50,
        r"row 2: '03/04/2024' may be written as dd/mm/yyyy or mm/dd/yyyy, and no other cell tells: give "
        r"'data.columns=\{c: \{format: dd/mm/yyyy\}\}' or mm/dd/yyyy",
    ),
    "may be thousands": (
        ["12", "1,234", "25,500", "7"] * 50,
        r"row 2: '1,234' may be written as 1,234.5 or 1.234,5, .* "
        r"'data.columns=\{c: \{format: \"1,234.5\"\}\}' or \"1.234,5\"",
    ),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_columns_that_can_be_read_in_two_ways_are_asked_about(name: str, tmp_path: Path, caplog: Any) -> None:
    cells, message = QUESTIONS[name]
    caplog.set_level(logging.INFO)
    with pytest.raises(InputError, match=message):
        learnt({"c": cells, "x": range(ROWS)}, tmp_path)
    assert re.search(r"^c +\? ", caplog.text, re.MULTILINE)  # the table of columns is shown
    form = "1.234,5" if name == "may be thousands" else "mm/dd/yyyy"
    encoder = learnt({"c": cells, "x": range(ROWS)}, tmp_path, columns={"c": {"format": form}}).row_encoder
    assert "c" in encoder.columns
    assert formats_of(encoder) == {"c": form}


def test_dates_in_two_formats_are_named(tmp_path: Path) -> None:
    cells = ["2024-12-31", "31.12.2024", "12/31/2024", "01/31/2024"]
    assert formats_of(learnt({"c": cells[:2] * 100, "x": range(ROWS)}, tmp_path).row_encoder) == {"c": "dd.mm.yyyy"}
    with pytest.raises(InputError, match=r"row 3: '31.12.2024' is not a date as in mm/dd/yyyy, as other cells are"):
        learnt({"c": [*cells[2:], cells[1], cells[2]] * 50, "x": range(ROWS)}, tmp_path)


def test_values_that_differ_only_in_case_or_spaces_are_named(tmp_path: Path, caplog: Any) -> None:
    learnt({"c": ["Red", "red ", "blue", "Blue"] * (ROWS // 4), "d": ["a", "b"] * (ROWS // 2)}, tmp_path)
    assert [text for text in caplog.messages if "case" in text] == [
        "c: Blue, blue differ only in case or spaces, but are different categories; so do 1 more; "
        "data.vocabulary.fold=true makes them one"
    ]
    caplog.clear()
    labels = pl.Series("y", ["No", "no", "yes", "YES"] * (ROWS // 4))  # which keep their spelling
    learnt({"x": [0.5 + row for row in range(ROWS)]}, tmp_path, label=labels, tasks={"y": "multiclass"})
    [line] = [text for text in caplog.messages if "case" in text]
    assert line.endswith("but are different categories; so do 1 more")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])  # in memory, and in blocks
def test_folded_categories_are_one(suffix: str, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO")
    cells = {
        "c": ["Red", "red ", "New  York", None, "new york", "RED", "b", "b"] * (ROWS // 8),
        "l": ["Red b", "zoo", "ZOO", "b"] * (ROWS // 4),
    }
    options: dict[str, Any] = {"columns": {"l": {"kind": "list", "separator": " ", "target": "c"}}}
    folded, plain = (learnt(cells, tmp_path, suffix, vocabulary={"fold": fold}, **options) for fold in (True, False))
    encoder = folded.row_encoder
    assert encoder.vocabularies["c"].values == [MISSING, "b", "new york", "red", "zoo"]
    assert len(plain.row_encoder.vocabularies["c"].values) > 5
    assert sum("case" in text for text in caplog.messages) == 1  # of the plain one
    assert [line.split()[2] for text in caplog.messages for line in text.splitlines() if line.startswith("c  ")] == [
        "3",
        "6",
    ]
    rows = pl.DataFrame({"c": ["rED", "NEW YORK", "green", None], "l": ["Zoo rED", "b", None, "x"]})
    expected = {"c": [4, 3, 0, 1], "l": [[6, 5], [3, 0], [0, 0], [1, 0]]}
    for same in (encoder, TableEncoder.from_state(encoder.state())):
        assert {name: ids.tolist() for name, ids in same.encode(rows, "rows").items()} == expected
    trained, counted = encoder.histograms_of(pl.DataFrame(cells), "rows")["c"]
    assert trained.counts == counted.counts


def test_formats_of_columns_whose_kind_is_given(tmp_path: Path) -> None:
    columns = {name: KINDS[name][0] for name in ("weight", "signup", "income")}
    encoder = learnt(columns, tmp_path, columns={"weight": "number", "signup": "date"}).row_encoder
    assert formats_of(encoder) == {"weight": "1,234.5 kg", "signup": "dd/mm/yyyy"}
    with pytest.raises(InputError, match=r"columns.signup.format=d/m/y: must be a date such as dd/mm/yyyy, "):
        learnt(columns, tmp_path, columns={"signup": {"format": "d/m/y"}})


@pytest.mark.parametrize("name", ["id", "ID", "userId", "movieid", "zip code", "Order Key", "user", "Unnamed: 0"])
def test_names_of_identifiers(name: str) -> None:
    assert has_id_name(name)
    assert not any(map(has_id_name, ("paid", "user age", "key size", "grid", "price", "idle time", "customers")))


LEAKS: dict[str, Any] = {
    "copy": LABEL.replace_strict({0: "no", 1: "yes"}),
    "number": LABEL * 100.0 + pl.Series(range(ROWS)) / ROWS,
    "refunded on": [str(DAYS[i].date()) if LABEL[i] else None for i in range(ROWS)],
    "noise": [(7 * i) % 11 + 0.5 for i in range(ROWS)],
    "group": [f"g{i // 2}" for i in range(ROWS)],
}


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_columns_that_predict_a_label_perfectly(suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    learnt(LEAKS, tmp_path, suffix)
    leaking = [text.split(" predicts y perfectly")[0] for text in caplog.messages if "predicts y perfectly" in text]
    assert leaking == ["copy", "number", "refunded on"]
    caplog.clear()
    price = pl.Series("y", [(13 * i) % 101 + 0.25 for i in range(ROWS)])
    learnt({"in cents": (price * 100).round(), "noise": LEAKS["noise"]}, tmp_path, suffix, label=price)
    assert [text.split(" ", 3)[:3] for text in caplog.messages] == [["in", "cents", "predicts"]]


def test_outliers_do_not_squeeze_the_other_numbers(tmp_path: Path) -> None:
    plain = [float(i % 97) for i in range(10_000)]
    assert outlier_bounds(pl.Series(plain)) == pytest.approx((-94, 190), abs=3)
    label = pl.Series("y", [0, 1] * 5_000)
    cells = {"x": [1e9 if i == 77 else value + 0.5 for i, value in enumerate(plain)], "same": plain}
    data = learnt(cells, tmp_path, label=label, columns={"same": "number"})
    x, same = (data.row_encoder.scales[name] for name in ("x", "same"))
    assert same.bounds is None
    assert x.std == pytest.approx(same.std, rel=0.01)
    inputs = data.splits["train"].inputs[NUMERIC]
    assert inputs[:, 0].max() == inputs[77, 0] < 10
    rows = TableEncoder.from_state(data.row_encoder.state()).encode(pl.DataFrame({"x": [1e300], "same": [1]}), "rows")
    assert rows[NUMERIC][0, 0] == inputs[77, 0]


@pytest.mark.parametrize("never", [0, 5])
def test_dates_that_stand_for_none_do_not_squeeze_the_other_ages(never: int, tmp_path: Path) -> None:
    """The year 9999, in 0.5 % of the training rows or in none, is as far from the other dates as an outlier may be."""
    days = [f"{2020 + i % 5}-0{1 + i % 9}-1{i % 10}" for i in range(1_000)]
    days[:never] = ["9999-12-31"] * never
    data = learnt(
        {"due": days, "x": [i % 97 + 0.5 for i in range(1_000)]}, tmp_path, label=pl.Series("y", [0, 1] * 500)
    )
    ages = data.row_encoder.encode(pl.DataFrame({"due": ["2020-01-10", "2024-09-18"], "x": [1, 1]}), "rows")[NUMERIC]
    column = data.spec.inputs[NUMERIC].columns.index("due age")
    assert ages[0, column] - ages[1, column] > 3
    later = data.row_encoder.encode(pl.DataFrame({"due": ["9999-12-31"], "x": [1]}), "rows")[NUMERIC]
    assert -10 < later[0, column] < ages[1, column]


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_separators_are_recognised(separator: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    pl.DataFrame({"a, b": ["1,5", "2,25"] * 20, "c": range(40), "y": [0, 1] * 20}).write_csv(path, separator=separator)
    data = TableDataModule(str(path), {"y": {"kind": "binary"}}, batch_size=8)
    data.setup()
    assert formats_of(data.row_encoder) == {"a, b": "1.234,5"}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[str]]:
    """Return the data module of the messy table, and the lines that it logs."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logger = logging.getLogger("mtl")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    folder = tmp_path_factory.mktemp("messy")
    messy(4_000).write_csv(folder / "messy.csv")
    data = TableDataModule(str(folder / "messy.csv"), TASKS, batch_size=32)
    data.setup()
    logger.removeHandler(handler)
    logger.setLevel(before)
    return data, text.getvalue().splitlines()


def test_messy_table_is_understood(table: tuple[Any, list[str]]) -> None:
    data, lines = table
    encoder = data.row_encoder
    assert [*formats_of(encoder).values()] == ["dd/mm/yyyy", "mmm dd, yyyy", "1,234.5 kg", "1,234.5"]
    assert [name for name in encoder.scales if "age" not in name] == ["Age", "income", "weight", "price"]
    assert [name for name in encoder.vocabularies if " " not in name] == ["customer_id", "Age", "Country"]
    assert not {"Order ID", "currency"} & set(encoder.columns)
    rows = {line.split("  ")[0]: line for line in lines if "  " in line}
    assert "left out" in rows["Order ID"]
    assert "3,200" in rows["Order ID"]
    assert "constant" in rows["currency"]
    assert max(map(len, rows.values())) <= 80
    assert sum("ignored: " in line for line in lines) == 1


def test_default_metrics_fit_the_kind_and_rare_classes(table: tuple[Any, list[str]], tmp_path: Path) -> None:
    data, lines = table
    [usual, rare, classes, number] = [task.metrics for task in data.spec.tasks]
    assert (usual, rare, classes) == ((), OF_FEW_POSITIVES, ())
    assert number == ("mse", "mae", "r2")
    few = pl.Series("y", ["yes" if row % 6 == 0 else "no" for row in range(ROWS)])
    [task] = learnt({"x": [i + 0.5 for i in range(ROWS)]}, tmp_path, label=few, tasks={"y": "binary"}).spec.tasks
    assert task.metrics == OF_FEW_POSITIVES
    label = pl.Series("y", [*["a", "b"] * (ROWS // 2 - 2), *["c"] * 4])
    [task] = learnt({"x": [i + 0.5 for i in range(ROWS)]}, tmp_path, label=label, tasks={"y": "multiclass"}).spec.tasks
    assert task.metrics == ("accuracy", "macro_f1", "logloss")
    assert any(line.startswith('task fraud (binary): "0" 98.') for line in lines)


def test_very_wide_tables_show_some_columns_and_every_warning(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    columns = {f"c{number}": [(number + 1) * i % 101 + 0.5 for i in range(ROWS)] for number in range(100)}
    learnt(columns | {"key": range(ROWS)}, tmp_path)
    [shown] = [text for text in caplog.messages if "taken for" in text]
    assert "c39 " in shown
    assert "c40 " not in shown
    assert "... 60 more" in shown
    assert "key " in shown


def test_a_repeated_number_is_read_as_a_number(tmp_path: Path) -> None:
    """Also if the column is given as a number with ids, as ``mtl columns`` writes it."""
    cells = [f"{1 + i % 5} kg" for i in range(ROWS)]
    columns = {"stars": cells, "x": [i + 0.5 for i in range(ROWS)]}
    encoder = learnt(columns, tmp_path).row_encoder
    assert encoder == learnt(columns, tmp_path, columns={"stars": {"kind": "number", "ids": True}}).row_encoder
    assert formats_of(encoder) == {"stars": "1,234.5 kg"}
    with pytest.raises(InputError, match="'many' is not a number"):
        encoder.encode(pl.DataFrame({"stars": ["many"], "x": [0.5]}), "rows")
    written = suggest_column_options(tmp_path / "t.csv", ["y"], "t", tmp_path)
    for option in ("stars: {kind: number, ids: true, format: ", "x: number"):
        assert option in written
