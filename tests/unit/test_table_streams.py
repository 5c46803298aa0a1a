"""A table in memory and streamed, in one file and in several: the same rows, splits and encoding."""

from __future__ import annotations

import logging
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from mtl.data_modules.files.identity import fingerprint
from mtl.data_modules.state import describe_changes
from mtl.data_modules.table import TableDataModule
from mtl.data_modules.tables.encoder import NUMERIC

from tests.tables import (
    assert_same_rows,
    load_table,
    rows_of,
    write_parts,
    write_table,
)

COUNT = 500
TASKS: dict[str, Any] = {
    "click": {"kind": "binary", "pos_weight": "balanced"},
    "genre": {"kind": "multiclass", "class_weights": "balanced"},
    "stars": {"kind": "regression"},
}


def draw_rows(count: int = COUNT, seed: int = 0) -> pl.DataFrame:
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
    return write_parts(draw_rows().select("number", "city", "click"), tmp_path_factory.mktemp("few") / "rows")


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
    whole = write_table(draw_rows(), folder / "whole.parquet")
    return load_table(write_parts(draw_rows(), folder / "rows"), "streamed", TASKS, **options), load_table(
        whole, "parquet", TASKS, **options
    )


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
        assert_same_rows(here, there, exact=False)
        pairs |= set(zip(here.groups.tolist(), there.groups.tolist(), strict=True))
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})  # the same groups
    assert [(a, b) for a, b in pairs if a < 0 or b < 0] == [(-1, -1)]
    nothing = both[0].splits[split].read(0, torch.arange(0))  # for a process with fewer batches than the others
    assert len(nothing) == 0
    streamed[0].row_ids = None
    assert [value.dtype for value in nothing.tensors()] == [value.dtype for value in streamed[0].tensors()]
    [*predicted] = both[0].predict_dataloader() if split == "test" else []
    assert len(predicted) == (len(streamed) if split == "test" else 0)


def test_training_has_every_row_once(both: tuple[Any, Any]) -> None:
    streamed, memory = both
    found, expected = rows_of(streamed, "train"), memory.splits["train"]
    one, other = (batch.inputs[NUMERIC][:, 0].argsort() for batch in (found, expected))  # by row
    assert one.tolist() != list(range(len(one)))
    assert_same_rows(found.select(one), expected.select(other), exact=False)
    assert [len(batch) for batch in streamed.train_dataloader()] == [len(b) for b in memory.train_dataloader()]


@pytest.mark.parametrize("way", ["parquet", "streamed"])
def test_split_by_share_and_by_files(way: str, few: Path, tmp_path: Path) -> None:
    tasks = {"click": {"kind": "binary"}}
    first, repeated, other_seed = (load_table(few, way, tasks, seed=seed, batch_size=64) for seed in (0, 0, 1))
    counts = first.row_counts()
    assert counts == pytest.approx({"train": 400, "val": 50, "test": 50}, abs=0 if way == "parquet" else 25)
    numbers = []
    for data in (first, repeated, other_seed):
        scaling = data.row_encoder.scales["number"]
        columns = [rows_of(data, split).inputs[NUMERIC][:, 0].double() for split in ("train", "val", "test")]
        numbers.append([sorted((c * scaling.std + scaling.mean).round().int().tolist()) for c in columns])
        assert sorted(number for part in numbers[-1] for number in part) == list(range(COUNT))
    assert numbers[0] == numbers[1] != numbers[2]
    frame = draw_rows(100, seed=1).select("number", "city", "click")
    folder = write_parts(frame, tmp_path / "other", count=2)
    files = {"val_path": str(folder), "test_path": str(folder / "part-1.parquet")}
    for split in ([1, 0, 0], [0.5, 0.3, 0.2]):  # shares of splits with a file are ignored
        assert load_table(few, way, tasks, **files, split={"fractions": split}).row_counts() == {
            "train": COUNT,
            "val": 100,
            "test": 50,
        }
    counts = load_table(few, way, tasks, test_path=str(folder), split={"fractions": [0.5, 0.5, 0]}).row_counts()
    assert counts["test"] == 100
    assert counts["train"] + counts["val"] == COUNT
    assert counts["train"] == 250
    counts = load_table(few, way, tasks, val_path=str(folder)).row_counts()  # a tenth of the rows, not a ninth
    assert counts == {"train": 450, "val": 100, "test": 50}


def test_rows_are_drawn_whatever_the_blocks_are(few: Path) -> None:
    tasks = {"click": {"kind": "binary"}}
    one, other = (load_table(few, "streamed", tasks, window_rows=rows) for rows in (480, 5000))
    assert one.row_counts() == other.row_counts()
    assert_same_rows(rows_of(one), rows_of(other), exact=False)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_several_files_are_the_table_of_all_their_rows(suffix: str, tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {"x": [i + 0.5 for i in range(40)] * 2, "city": [f"c{i % 6}" for i in range(80)], "y": [0, 0, 1, 1] * 20}
    )
    expected = load_table(write_table(frame, tmp_path / f"all{suffix}"))
    folder = write_parts(frame, tmp_path / "parts", suffix)
    write_table(frame, folder / f".hidden{suffix}")
    (folder / "_SUCCESS").touch()
    for path in (folder, f"{folder}/*{suffix}", f"{tmp_path}/p*s/part-?{suffix}", f"{tmp_path}/**/part-[0-3]{suffix}"):
        data = load_table(path)
        assert data.spec == expected.spec
        for split, batch in expected.splits.items():
            assert_same_rows(data.splits[split], batch)
        assert data.row_encoder.state() == expected.row_encoder.state()
        assert len(data.open("train").blocks(None)) == 1  # hundreds of small files would take seconds each time
    write_table(frame[60:].cast({"y": pl.Int8}).select("y", "city", "x"), folder / f"part-3{suffix}")  # which fits
    assert load_table(folder).row_encoder.state() == expected.row_encoder.state()


@pytest.mark.parametrize("way", ["csv", "streamed"])
def test_checkpoint_state_teaches_what_was_learnt(way: str, few: Path, tmp_path: Path, caplog: Any) -> None:
    rows = draw_rows().select("number", "city", "click")
    path = few if way == "streamed" else write_parts(rows, tmp_path / "rows", ".csv")
    tasks = {"click": {"kind": "binary"}}
    window = {"window_rows": 480} if way == "streamed" else {}
    before = load_table(path, way, tasks)
    after = TableDataModule(str(path), tasks, batch_size=8, **window)
    after.load_state_dict(before.state_dict())
    assert after.changed_files() == {}
    with caplog.at_level(logging.INFO):
        after.setup()
    assert "taken for" not in caplog.text  # no pass over the rows
    assert after.state_dict() == before.state_dict()
    assert_same_rows(rows_of(after, "train"), rows_of(before, "train"))
    tested = TableDataModule(str(path), tasks, batch_size=8, **window)
    tested.load_state_dict(before.state_dict(), test_only=True)
    tested.setup()
    assert tested.row_counts() == {"test": before.row_counts()["test"]}


@pytest.mark.parametrize("way", ["csv", "streamed"])
def test_changed_files_are_noticed(way: str, tmp_path: Path) -> None:
    suffix = ".parquet" if way == "streamed" else ".csv"
    table = draw_rows().select("number", "user", "click")
    folder = write_parts(table, tmp_path / "rows", suffix)
    pattern, tasks = f"{folder}/*{suffix}", {"click": {"kind": "binary"}}
    state = load_table(pattern, way, tasks).state_dict()

    def found(path: Path | str = pattern) -> str:
        data = TableDataModule(str(path), tasks, batch_size=8, window_rows=480 if way == "streamed" else None)
        data.load_state_dict(state)
        return "".join(data.changed_files().values())

    assert found() == found(folder) == ""
    write_parts(
        table.with_columns(user=pl.when(pl.col("number") == 300).then(1).otherwise(pl.col("user"))), folder, suffix
    )
    assert re.search(
        r"data.path=.*rows/\*\.\w+ has changed \([\d,]+ bytes in 4 files, before [\d,]+ bytes in 4", found()
    )
    write_parts(table, folder, suffix)
    assert found() == ""
    (folder / f"part-2{suffix}").rename(folder / f"part-9{suffix}")
    assert "has changed (" in found()
    (folder / f"part-9{suffix}").unlink()
    assert re.search(r"has changed \([\d,]+ bytes in 3 files, before [\d,]+ bytes in 4 files\)", found())
    (folder / f"part-1{suffix}").unlink()
    (folder / f"part-3{suffix}").unlink()
    one = {"data.path": fingerprint(folder / f"part-0{suffix}")}
    assert describe_changes(one, {}, {}) == {"data.path": f"data.path=part-0{suffix} is not given"}
