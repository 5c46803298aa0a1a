"""Columns of dates, lists and free text, and cells that cannot be read."""

from __future__ import annotations

import json
import logging
import re
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from mtl.data_modules.table import TableDataModule
from mtl.data_modules.tables.encoder import NUMERIC, TableEncoder

from mtl.checks import InputError
from mtl.types import Bag, Categorical, Numeric

DAYS = [datetime(2026, 1, 1, 6) + timedelta(hours=43 * i) for i in range(40)]  # of three months


def module(frame: pl.DataFrame, path: Path, **options: Any) -> TableDataModule:
    """Return the data of ``frame`` with labels ``y``, all rows in each split unless ``options`` say otherwise."""
    if "y" not in frame.columns:
        frame = frame.with_columns(y=pl.int_range(pl.len()) // 2 % 2)
    frame.write_parquet(path) if path.suffix == ".parquet" else frame.write_csv(path)
    same = {"val_path": str(path), "test_path": str(path), "split": [1, 0, 0]}
    data = TableDataModule(str(path), {"y": {"kind": "binary"}}, batch_size=8, **(same | options))
    data.prepare_data()
    data.setup()
    return data


def refusal(frame: pl.DataFrame, path: Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        module(frame, path, **options)
    message = str(caught.value)
    assert message.isprintable()
    return message


def again(data: TableDataModule) -> TableEncoder:
    """Return the encoder from its state, as a checkpoint holds it."""
    return TableEncoder.from_state(json.loads(json.dumps(data.row_encoder.state())))


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


TEXT = {
    "datetime": pl.Series(DAYS),
    "zone": pl.Series(DAYS).dt.replace_time_zone("Asia/Tokyo"),
    "iso": pl.Series([day.isoformat() for day in DAYS]),
    "space": pl.Series([day.isoformat(" ", "minutes") for day in DAYS]),
    "offset": pl.Series([f"{day.isoformat()}.250+05:30" for day in DAYS]),
    "utc": pl.Series([f"{day.isoformat()}Z" for day in DAYS]),
}


@pytest.mark.parametrize("form", TEXT)
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_dates_become_parts_and_age(form: str, suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    data = module(pl.DataFrame({"at": TEXT[form]}), tmp_path / f"t{suffix}")
    assert data.spec.inputs == {
        "at month": Categorical(4),
        "at day": Categorical(len({day.day for day in DAYS}) + 1),
        "at weekday": Categorical(8),
        "at hour": Categorical(len({day.hour for day in DAYS}) + 1),
        NUMERIC: Numeric(1),
    }
    assert f"at: date as month, day, weekday, hour, age (days before {DAYS[-1]})" in caplog.text
    inputs = data.splits["train"].inputs
    names = data.row_encoder.categorical
    for part, values in {
        "month": [day.month for day in DAYS],
        "day": [day.day for day in DAYS],
        "weekday": [day.isoweekday() for day in DAYS],
        "hour": [day.hour for day in DAYS],
    }.items():
        known = names[f"at {part}"].values
        assert [known[id - 1] for id in inputs[f"at {part}"].tolist()] == list(map(str, values))
    ages = torch.tensor([(DAYS[-1] - day).total_seconds() / 86400 for day in DAYS], dtype=torch.float64)
    expected = (ages - ages.mean()) / ages.std(correction=0)
    torch.testing.assert_close(inputs[NUMERIC][:, 0], expected.float())
    assert data.row_encoder.columns == ["at"]


def test_days_without_times_have_no_hour_and_empty_cells_are_missing(tmp_path: Path) -> None:
    days = [day.date() for day in DAYS]
    data = module(pl.DataFrame({"at": [None, *days[1:]]}), tmp_path / "t.csv")
    assert list(data.spec.inputs) == ["at month", "at day", "at weekday", NUMERIC]
    assert data.spec.inputs[NUMERIC] == Numeric(2)
    assert data.splits["train"].inputs[NUMERIC][0].tolist() == [0, 1]  # the mean, marked
    assert data.row_encoder.categorical["at month"].values[0] == "\0missing"
    encoder = again(data)
    for rows in ({"at": ["2026-01-05", None]}, {"at": [date(2026, 1, 5), None]}, {"at": ["2026-01-05T00:00", "NA"]}):
        found = encoder.encode(pl.DataFrame(rows), "rows")
        assert equal(found, encoder.encode(pl.DataFrame({"at": [datetime(2026, 1, 5), None]}), "rows"))
    july = encoder.encode(pl.DataFrame({"at": ["2026-07-01"]}), "rows")
    assert july["at month"].tolist() == [0]  # unknown to the network, like a category
    assert july[NUMERIC][0, 0] < data.splits["train"].inputs[NUMERIC].min()  # newer than all


def test_bad_dates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cells = [day.date().isoformat() for day in DAYS]
    cells[6], cells[9] = "2026-02-30", "soon"
    message = refusal(pl.DataFrame({"at": cells}), tmp_path / "t.csv")
    assert "t.csv, column 'at', row 7: '2026-02-30' is not a date as in 2026-03-01 or 2026-03-01 14:30, but" in message
    message = refusal(pl.DataFrame({"at": cells}), tmp_path / "t.csv", dates=["at"])
    assert "row 7: '2026-02-30' is not a date" in message
    assert "2 of 40 cells" in message
    message = refusal(pl.DataFrame({"at": [*range(40)]}), tmp_path / "t.parquet", dates=["at"])
    assert "column 'at', row 1: 0 is not a date" in message
    assert "rename the column at month" in refusal(
        pl.DataFrame({"at": DAYS, "at month": [*range(40)]}), tmp_path / "t.parquet"
    )
    data = module(
        pl.DataFrame({"at": cells}), tmp_path / "t.csv", on_bad="missing", test_path=None, split=[0.5, 0, 0.5]
    )
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1  # for the column, whatever the splits
    assert re.search(r"row (7|10): .* is not a date as in .* Like 3 more cells of the column it is taken", warnings[0])
    assert data.row_encoder.numeric["at age"].gaps


def test_few_dates_among_texts_are_no_dates(tmp_path: Path) -> None:
    cells = [f"id{i % 5}" if i % 2 else "2026-01-01" for i in range(40)]
    assert list(module(pl.DataFrame({"at": cells}), tmp_path / "t.csv").spec.inputs) == ["at"]
    numbers = [f"2026{1 + i % 9:02}01" for i in range(40)]
    assert list(module(pl.DataFrame({"at": numbers}), tmp_path / "t.csv").spec.inputs) == [NUMERIC]
    days = pl.DataFrame({"at": [day.date().isoformat() for day in DAYS], "x": [i + 0.5 for i in range(40)]})
    given = module(days, tmp_path / "t.csv", categorical=["at"])
    assert list(given.spec.inputs) == ["at", NUMERIC]


GENRES = [["Action", "Drama"], [], ["Drama"], ["War", "Action", "Comedy"]] * 10


@pytest.mark.parametrize("form", ["text", "lists", "categories", "array"])
def test_lists_become_bags(form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    padded = [[*genres, None, None, None][:3] for genres in GENRES]
    series = {
        "text": pl.Series(["|".join(genres) for genres in GENRES]),
        "lists": pl.Series(GENRES),
        "categories": pl.Series(GENRES, dtype=pl.List(pl.Categorical)),
        "array": pl.Series(padded, dtype=pl.Array(pl.String, 3)),
    }[form]
    path = tmp_path / ("t.csv" if form == "text" else "t.parquet")
    data = module(pl.DataFrame({"genres": series}), path, lists={"genres": "|"} if form == "text" else None)
    assert data.spec.inputs == {"genres": Bag(6, 3)}  # nothing, unknown, and four genres
    assert "genres: lists of up to 3 of 4 elements" in caplog.text
    expected = [[2, 4, 0], [0, 0, 0], [4, 0, 0], [5, 2, 3]]
    assert data.splits["train"].inputs["genres"][:4].tolist() == expected
    encoder = again(data)
    rows = pl.DataFrame({"genres": [["Drama", "Opera", None, ""], ["War"] * 5, None]})
    assert encoder.encode(rows, "rows")["genres"].tolist() == [[4, 1, 0], [5, 5, 5], [0, 0, 0]]
    assert encoder.lists == {"genres": "|" if form == "text" else ""}
    if form == "text":
        rows = pl.DataFrame({"genres": [" Drama |Opera||", "War|War|War|War", "NA"]})
        assert encoder.encode(rows, "rows")["genres"].tolist() == [[4, 1, 0], [5, 5, 5], [0, 0, 0]]


def test_lists_of_numbers_and_their_options(tmp_path: Path) -> None:
    frame = pl.DataFrame({"tags": [[i % 3, 7, i] for i in range(40)]})
    data = module(frame, tmp_path / "t.parquet", max_length=2, min_count=10)
    assert data.spec.inputs == {"tags": Bag(6, 2)}  # 0, 1, 2 and 7; the others are too rare
    assert data.splits["train"].inputs["tags"][5].tolist() == [4, 5]
    assert module(frame, tmp_path / "t.parquet", lists={"tags": None}).spec.inputs == {"tags": Bag(42, 3)}
    for lists in ("|", ["tags"], {"tags": 5}, {5: "|"}):
        assert "data.lists=" in refusal(frame, tmp_path / "t.parquet", lists=lists)
    assert "data.max_length=0" in refusal(frame, tmp_path / "t.parquet", max_length=0)
    assert "no column 'tag' (did you mean 'tags'?)" in refusal(frame, tmp_path / "t.parquet", lists={"tag": "|"})
    assert "tags is named more than once" in refusal(
        frame, tmp_path / "t.parquet", lists={"tags": "|"}, categorical=["tags"]
    )


COMMENTS = [f"I came {i} times and liked it {'a lot' if i % 2 else 'less'}" for i in range(40)]
IDS = {  # texts that are categories, however many there are
    "user names": [f"Ann Mary Smith {i}" if i % 9 == 0 else f"Bo Lee{i}" for i in range(40)],
    "zip codes": [f"D-{10000 + i}" for i in range(40)],
    "hashes": [f"{i:064x}x" for i in range(40)],
    "titles": [f"The Lord of the Rings, part {i % 8}" for i in range(40)],  # long, but they repeat
}


def test_free_text_is_left_out_unless_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    frame = pl.DataFrame({"comment": COMMENTS, "x": [i + 0.5 for i in range(40)]})
    data = module(frame, tmp_path / "t.csv")
    assert list(data.spec.inputs) == [NUMERIC]
    assert data.row_encoder.columns == ["x"]
    assert re.search(
        r"column 'comment' looks like free text \(8.5 words on average, 100% of the cells distinct\) and is ignored; "
        r"data.categorical=\[comment\] uses it as ids",
        caplog.text,
    )
    caplog.clear()
    data = module(frame, tmp_path / "t.csv", categorical=["comment"])
    assert data.spec.inputs["comment"] == Categorical(41)
    assert "free text" not in caplog.text
    assert "every input column is constant in the training rows, or free text" in refusal(
        frame.drop("x"), tmp_path / "t.csv"
    )


@pytest.mark.parametrize("name", IDS)
def test_ids_are_no_free_text(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = module(pl.DataFrame({name: IDS[name]}), tmp_path / "t.csv")
    assert data.spec.inputs == {name: Categorical(len(set(IDS[name])) + 1)}
    assert "free text" not in caplog.text


def test_bad_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cells = [f"{i}.5" for i in range(40)]
    cells[3], cells[8], cells[20] = "many", "inf", ""
    frame = pl.DataFrame({"age": cells, "more": [i + 0.5 for i in range(40)]})
    assert "row 4: 'many' is not a number, but most of the column is" in refusal(frame, tmp_path / "t.csv")
    data = module(frame, tmp_path / "t.csv", on_bad="missing", val_path=None, test_path=None, split=[0.8, 0.1, 0.1])
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert re.search(r"t.csv, column 'age', row (4|9): .* Like 1 more cells of the column", warnings[0])
    emptied = frame.with_columns(age=pl.col("age").replace(["many", "inf"], None))
    options: dict[str, Any] = {"val_path": None, "test_path": None, "split": [0.8, 0.1, 0.1]}
    expected = module(emptied, tmp_path / "u.csv", **options)
    for split, rows in expected.splits.items():
        assert equal(data.splits[split].inputs, rows.inputs)
    encoder, new = again(data), pl.DataFrame({"age": ["a few"], "more": [1.0]})
    assert encoder.encode(new, "rows")[NUMERIC][0, :2].tolist() == [0, 1]
    with pytest.raises(InputError, match=r"rows, column 'age', row 1: 'a few' is not a number"):
        again(expected).encode(new, "rows")


def test_other_cells_among_whole_numbers_that_repeat_are_categories(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Among zip codes, say, a few with letters tell more as categories than as missing values."""
    frame = pl.DataFrame({"zip": [str(i % 3) for i in range(39)] + ["K1A"]})
    assert "row 40: 'K1A' is not a number, but most" in refusal(frame, tmp_path / "t.csv")
    data = module(frame, tmp_path / "t.csv", on_bad="missing")
    assert data.row_encoder.categorical["zip"].values == ["0", "1", "2", "K1A"]
    assert caplog.text == ""


@pytest.mark.parametrize("kind", ["regression", "binary"])
def test_bad_labels_are_errors_whatever_on_bad_says(kind: str, tmp_path: Path) -> None:
    labels = ["1", "0"] * 19 + ["1", "many"]
    path = tmp_path / "t.csv"
    pl.DataFrame({"x": [i + 0.5 for i in range(40)], "y": labels}).write_csv(path)
    data = TableDataModule(str(path), {"y": {"kind": kind}}, batch_size=8, on_bad="missing")
    with pytest.raises(InputError, match=r"many"):
        data.setup()
    assert "data.on_bad=skip: must be one of error, missing" in refusal(
        pl.DataFrame({"x": labels}), path, on_bad="skip"
    )


def test_rows_do_not_depend_on_each_other(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {
            "at": [day.isoformat() for day in DAYS],
            "genres": GENRES,
            "x": [i + 0.5 if i % 7 else None for i in range(40)],
        }
    )
    encoder = module(frame, tmp_path / "t.parquet").row_encoder
    whole = encoder.encode(frame, "rows")
    rows = [encoder.encode(frame[i : i + 1], "rows") for i in range(40)]
    assert equal({name: torch.cat([row[name] for row in rows]) for name in whole}, whole)
