"""Splits of a table by time and by groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from mtl.data_modules.split_rows import read_rare_classes
from mtl.data_modules.splits import random_split
from mtl.data_modules.table import TableDataModule
from mtl.data_modules.tables.row_source import Block, RowSource

from mtl.checks import InputError
from tests.loaded import loaded

ROWS = 600
ORDER = np.random.default_rng(1).permutation(ROWS)
HOURS = [datetime(2026, 1, 1) + timedelta(hours=int(hour)) for hour in ORDER]
TIMES = {
    "dates": pl.Series(HOURS).dt.date(),
    "datetimes": pl.Series(HOURS),
    "text": pl.Series(HOURS).dt.strftime("%d/%m/%Y %H:%M"),
    "Unix times": pl.Series(HOURS).dt.timestamp("ms") // 1000,
    "numbers": pl.Series(ORDER / 4),
}
WAYS = {"csv": {}, "stream": {"window_rows": 640}}


def split(folder: Path, way: str, change: dict[str, Any], **options: Any) -> dict[str, pl.DataFrame]:
    """Return the rows of each split, in the order of the table."""
    frame = pl.DataFrame({"n": ORDER, "y": [row % 2 for row in range(ROWS)]} | change)
    path = folder / f"t.{'csv' if way == 'csv' else 'parquet'}"
    frame.write_csv(path) if way == "csv" else frame.write_parquet(path)
    data = TableDataModule(path=path, tasks={"y": "binary"}, batch_size=8, **WAYS[way], **options)
    found = {}
    for name, part in data.split_rows().items():
        blocks = [block for block, _ in part.frames(frame.columns)]
        found[name] = pl.concat(blocks).with_columns(pl.col("n").cast(pl.Int64))
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", TIMES)
def test_training_rows_come_before_validation_rows_before_test_rows(kind: str, way: str, tmp_path: Path) -> None:
    found = split(
        tmp_path, way, {"at": TIMES[kind]}, split={"by": "time", "column": "at", "fractions": [0.6, 0.2, 0.2]}
    )
    assert sum(map(len, found.values())) == ROWS
    if kind == "dates":  # rows of one day stay together
        assert [sorted(part["n"]) for part in found.values()] == [[*range(360)], [*range(360, 480)], [*range(480, 600)]]
    for earlier, later in (("train", "val"), ("val", "test")):
        assert found[earlier]["n"].max() < found[later]["n"].min()


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_one_time_stay_together_and_those_in_a_gap_are_left_out(way: str, tmp_path: Path) -> None:
    days = {"at": pl.Series(HOURS).dt.date(), "day": ORDER // 24}
    found = split(tmp_path, way, days, split={"by": "time", "column": "at", "fractions": [0.5, 0.25, 0.25], "gap": 2})
    assert {name: (part["day"].cast(int).min(), part["day"].cast(int).max()) for name, part in found.items()} == {
        "train": (0, 11),
        "val": (14, 17),
        "test": (20, 24),
    }


@pytest.mark.parametrize(
    "options",
    [
        {"split": {"by": "time", "column": "at"}},
        {"split": {"by": "group", "column": "user"}},
        {"split": {"by": "column", "column": "part"}},
    ],
    ids=["time", "group", "column"],
)
def test_an_epoch_of_a_stream_does_not_read_what_split_the_rows(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"at": ORDER / 4, "user": ORDER % 150, "part": np.array(["train", "val", "test"])[ORDER % 3]}
    frame = pl.DataFrame({"n": ORDER, "y": ORDER % 2} | columns)
    frame.write_parquet(tmp_path / "t.parquet")
    ignored = [name for name in columns if name != options["split"]["column"]]
    options |= {"ignore": ignored, "batch_size": 8, **WAYS["stream"]}
    data = loaded(TableDataModule(tmp_path / "t.parquet", {"y": "binary"}, **options))
    read, requested = RowSource.read, []

    def recording(source: RowSource, block: Block, wanted: Sequence[str]) -> pl.DataFrame:
        requested.append(tuple(wanted))
        return read(source, block, wanted)

    monkeypatch.setattr(RowSource, "read", recording)
    assert sum(map(len, data.train_dataloader())) == data.row_counts()["train"]
    assert set(requested) == {tuple(data._columns(False))}


def test_the_format_of_dates_follows_from_all_files(tmp_path: Path) -> None:
    """In the second file alone, 03/02/2026 may be in March."""
    days = [datetime(2026, month, day) for month, most in ((1, 28), (2, 4)) for day in range(1, most + 1)]
    texts = [day.strftime("%d/%m/%Y") for day in days]
    rows = pl.DataFrame({"n": range(32), "y": [0, 1] * 16, "at": texts})
    (tmp_path / "t").mkdir()
    rows[:28].write_csv(tmp_path / "t" / "1.csv")
    rows[28:].write_csv(tmp_path / "t" / "2.csv")
    options = {"split": {"by": "time", "column": "at", "fractions": [0.5, 0.25, 0.25]}, "batch_size": 8}
    found = TableDataModule(path=tmp_path / "t", tasks={"y": "binary"}, **options).split_rows()
    parts = {name: pl.concat([frame for frame, _ in part.frames(["n"])]) for name, part in found.items()}
    assert [len(part) for part in parts.values()] == [16, 8, 8]
    assert parts["test"]["n"].cast(int).to_list() == [*range(24, 32)]


@pytest.mark.parametrize("way", WAYS)
def test_all_rows_of_a_group_are_in_one_split(way: str, tmp_path: Path) -> None:
    users = {"user": [f"u{row % 150}" for row in range(ROWS)]}
    found = split(tmp_path, way, users, split={"by": "group", "column": "user", "fractions": [0.6, 0.2, 0.2]})
    groups = {name: set(part["user"]) for name, part in found.items()}
    assert sum(map(len, groups.values())) == 150
    assert groups["train"] | groups["val"] | groups["test"] == set(users["user"])
    assert {name: len(users) for name, users in groups.items()} == {"train": 90, "val": 30, "test": 30}
    other = split(tmp_path, way, users, split={"by": "group", "column": "user", "fractions": [0.6, 0.2, 0.2]}, seed=1)
    assert set(other["test"]["user"]) != groups["test"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"split": {"fractions": [0.5, 0.3, 0.2]}, "seed": 1},
        {"split": {"by": "time", "column": "at", "gap": 2.0}},
        {"split": {"by": "group", "column": "user"}},
        {"split": {"by": "column", "column": "part"}},
    ],
    ids=["random", "seed", "time", "group", "column"],
)
def test_streams_are_split_as_tables_in_memory(options: dict[str, Any], tmp_path: Path) -> None:
    """Also a rare class, which is spread evenly."""
    columns = {"at": ORDER / 4, "user": ORDER % 150, "part": np.array(["train", "val", "test"])[ORDER % 3]}
    columns["y"] = (ORDER % 30 == 0).astype(int)
    memory, stream = (split(tmp_path, way, columns, **options) for way in WAYS)
    assert {name: part["n"].to_list() for name, part in memory.items()} == {
        name: part["n"].to_list() for name, part in stream.items()
    }
    if not options or "fractions" in options["split"]:
        assert [int(part["y"].cast(int).sum()) for part in stream.values()] == ([10, 6, 4] if options else [16, 2, 2])


def test_hundreds_of_rare_classes_are_spread_without_changing_the_sizes_of_the_splits() -> None:
    """With nearly as many sets of rare classes as rows, each row would go to the first split."""
    rare = pl.DataFrame(np.random.default_rng(0).random((2000, 200)) < 0.03).cast(pl.Int8)
    strata = read_rare_classes(RowSource.of_frames({"rows": rare}), rare.columns, 0.05)
    assert strata is not None
    parts = random_split(strata, {"train": 0.8, "val": 0.1, "test": 0.1}, torch.Generator())
    assert {name: round(len(part) / 2000, 1) for name, part in parts.items()} == {"train": 0.8, "val": 0.1, "test": 0.1}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": {"by": "time"}}, r"split={.*}: name the column, as in data.split.column=NAME"),
        ({"split": {"by": "group"}}, r"split={.*}: name the column, as in data.split.column=NAME"),
        ({"split": {"column": "at"}}, r"split={.*}: column is for by=time, group, scaffold or column"),
        ({"split": {"gap": 2.0}}, r"split={.*}: gap is for by=time"),
        ({"split": {"by": "days", "column": "at"}}, r"split.by=days: must be 'random', 'time', 'group', 'scaffold' or"),
        ({"split": {"by": "time", "column": "att"}}, r"no column 'att' \(did you mean 'at'"),
        ({"split": {"by": "time", "column": "gaps"}}, "column 'gaps', row 2: None: data.split.by=time needs"),
        ({"split": {"by": "group", "column": "gaps"}}, "column 'gaps', row 2: None: data.split.by=group needs"),
        ({"split": {"by": "group", "column": "blank"}}, "column 'blank', row 2: None: data.split.by=group needs"),
        ({"split": {"by": "time", "column": "word"}}, "column 'word', row 1: 'x' is not a date"),
        ({"split": {"by": "time", "column": "same"}}, "data.split.fractions leaves none for train"),
    ],
)
def test_errors(options: dict[str, Any], message: str, way: str, tmp_path: Path) -> None:
    gaps = [None if row == 1 else float(row) for row in range(ROWS)]
    change = {
        "at": TIMES["numbers"],
        "gaps": gaps,
        "blank": ["a", " "] * (ROWS // 2),
        "word": ["x"] * ROWS,
        "same": [1.5] * ROWS,
    }
    with pytest.raises(InputError, match=message):
        split(tmp_path, way, change, **options)
