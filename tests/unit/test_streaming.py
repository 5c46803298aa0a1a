"""A table that is streamed: what is learnt from it, its splits and its rows are those of the table in memory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from mtl.data_modules.stream import tensors
from mtl.data_modules.table import TableDataModule
from mtl.data_modules.table_stream import TableStreamDataModule, drawn
from mtl.data_modules.tables.parquet import Block

from mtl.checks import InputError
from mtl.types import Batch

TASKS: dict[str, Any] = {
    "click": {"kind": "binary", "pos_weight": "balanced"},
    "genre": {"kind": "multiclass", "class_weights": "balanced"},
    "stars": {"kind": "regression"},
}
CLICK = {"click": TASKS["click"]}
COUNT = 500


def rows(count: int = COUNT, seed: int = 0) -> pl.DataFrame:
    """Return a table of many kinds of columns, each with its own kind of gap."""
    draw = np.random.default_rng(seed)
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
            "click": draw.choice(["no", "yes"], count, p=[0.8, 0.2]),
            "genre": draw.choice([10, 9, 100], count),
            "stars": draw.normal(50, 20, count),
        }
    )
    gaps = {name: draw.random(count) < 0.1 for name in ("user", "city", "price", "floor", "click", "genre", "stars")}
    frame = frame.with_columns(
        pl.when(pl.Series(gap)).then(None).otherwise(pl.col(name)).alias(name) for name, gap in gaps.items()
    )
    nan = pl.when(pl.col("number") % 7 == 0).then(float("nan")).otherwise(pl.col("price"))
    part = pl.Series(draw.choice(["train", "val", "test"], count, p=[0.7, 0.2, 0.1]))
    return frame.with_columns(price=nan, part=part)


def files(folder: Path, frame: pl.DataFrame, sizes: tuple[int, ...] = (200, 170, 130)) -> str:
    """Write the rows to several files with small row groups; return the pattern of their names."""
    folder.mkdir(exist_ok=True)
    first = 0
    for number, size in enumerate(sizes):
        frame[first : first + size].write_parquet(folder / f"{number}.parquet", row_group_size=60)
        first += size
    return str(folder / "*.parquet")


def module(path: str, tasks: Any = None, streaming: bool = True, **options: Any) -> Any:
    options = {"batch_size": 32, "eval_batch_size": 64} | ({"window_rows": 480} if streaming else {}) | options
    make = TableStreamDataModule if streaming else TableDataModule
    data = make(path, TASKS if tasks is None else tasks, **options)
    data.prepare_data()
    data.setup()
    return data


@pytest.fixture(scope="module")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> str:
    return files(tmp_path_factory.mktemp("rows"), rows())


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the pattern of files with few columns, which are read faster."""
    return files(tmp_path_factory.mktemp("few"), rows().select("number", "city", "click"))


@pytest.fixture(scope="module")
def both(pattern: str) -> tuple[Any, Any]:
    """Return the same table, streamed and in memory."""
    whole = Path(pattern).parent.parent / "whole.parquet"
    rows().write_parquet(whole)
    options: dict[str, Any] = {"split_column": "part", "group_column": "user", "min_count": 3}
    return module(pattern, **options), module(str(whole), None, False, **options)


def gathered(loader: Any) -> Batch:
    """Return the rows of all batches as one."""
    batches = list(loader)
    first = batches[0]
    return Batch(
        {name: torch.cat([batch.inputs[name] for batch in batches]) for name in first.inputs},
        {name: torch.cat([batch.targets[name] for batch in batches]) for name in first.targets},
    )


def same(one: Batch, other: Batch) -> None:
    for there, here in ((one.inputs, other.inputs), (one.targets, other.targets)):
        assert list(there) == list(here)
        for name in there:
            torch.testing.assert_close(there[name], here[name], rtol=0, atol=1e-6, equal_nan=True, msg=name)


def test_streaming_learns_what_the_table_in_memory_teaches(both: tuple[Any, Any]) -> None:
    streamed, memory = both
    one, other = streamed.row_encoder.state(), memory.row_encoder.state()
    assert one["categorical"] == other["categorical"]
    assert list(one["categorical"]) == ["user", "city", "floor", "text_code", "flag"]
    assert list(one["numeric"]) == list(other["numeric"]) == ["number", "price", "text_number", "late"]
    for name, scaling in other["numeric"].items():
        assert one["numeric"][name] == pytest.approx(scaling, rel=1e-12), name
    assert (one["separator"], one["null_values"], one["from_text"]) == (",", other["null_values"], False)
    assert streamed.spec.inputs == memory.spec.inputs
    for here, there in zip(streamed.spec.tasks, memory.spec.tasks, strict=True):
        assert (here.name, here.kind, here.classes, here.num_classes) == (
            there.name,
            there.kind,
            there.classes,
            there.num_classes,
        )
        assert (here.mean, here.std) == pytest.approx((there.mean, there.std), rel=1e-12)
        assert (here.pos_weight, here.class_weights) == (there.pos_weight, there.class_weights)
    assert streamed.spec.tasks[0].pos_weight > 3
    assert streamed.row_counts() == memory.row_counts()


@pytest.mark.parametrize("split", ["val", "test"])
def test_evaluation_has_the_batches_of_the_table_in_memory(both: tuple[Any, Any], split: str) -> None:
    streamed, memory = ([*getattr(data, f"{split}_dataloader")()] for data in both)
    assert len(streamed) == len(memory) == len(getattr(both[0], f"{split}_dataloader")())
    pairs = set[tuple[int, int]]()
    for here, there in zip(streamed, memory, strict=True):
        same(here, there)
        pairs |= set(zip(here.groups.tolist(), there.groups.tolist(), strict=True))
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})  # the same groups
    assert [(a, b) for a, b in pairs if a < 0 or b < 0] == [(-1, -1)]
    nothing = both[0]._batch(split, 0, torch.arange(0))  # for a process with fewer batches than the others
    assert len(nothing) == 0
    assert [value.dtype for value in tensors(nothing)] == [value.dtype for value in tensors(streamed[0])]
    [*predicted] = both[0].predict_dataloader() if split == "test" else []
    assert len(predicted) == (len(streamed) if split == "test" else 0)


def test_training_has_every_row_once(both: tuple[Any, Any]) -> None:
    streamed, memory = both
    found, expected = gathered(streamed.train_dataloader()), memory.splits["train"]
    one, other = (batch.inputs["numeric columns"][:, 0].argsort() for batch in (found, expected))  # by row
    assert one.tolist() != list(range(len(one)))
    same(found.select(one), expected.select(other))
    assert [len(batch) for batch in streamed.train_dataloader()] == [len(b) for b in memory.train_dataloader()]


def test_shares_are_drawn_for_each_row(few: str) -> None:
    data, again, other = module(few, CLICK), module(few, CLICK, window_rows=5000), module(few, CLICK, seed=1)
    counts = data.row_counts()
    assert sum(counts.values()) == COUNT
    assert counts == pytest.approx({"train": 400, "val": 50, "test": 50}, abs=25)
    numbers = {}
    for one in (data, again, other):
        loaders = (one.train_dataloader(), one.val_dataloader(), one.test_dataloader())
        scaling = one.row_encoder.numeric["number"]
        columns = [gathered(loader).inputs["numeric columns"][:, 0] for loader in loaders]
        numbers[one] = [sorted((c.double() * scaling.std + scaling.mean).round().int().tolist()) for c in columns]
        assert sorted(number for part in numbers[one] for number in part) == list(range(COUNT))
    assert numbers[data] == numbers[again]  # whatever the blocks are
    assert numbers[data] != numbers[other]
    mark = [drawn(3, [0.5, 0.5], Block(Path(), 0, 10, first)).tolist() for first in (0, 5)]
    assert mark[0][5:] == mark[1][:5]


def test_own_files_for_validation_and_test(few: str, tmp_path: Path) -> None:
    folder = Path(files(tmp_path / "other", rows(100, seed=1).select("number", "city", "click"), (60, 40))).parent
    data = module(few, CLICK, val_path=str(folder), test_path=str(folder / "1.parquet"), split=[1, 0, 0])
    assert data.row_counts() == {"train": COUNT, "val": 100, "test": 40}
    data = module(few, CLICK, test_path=str(folder), split=[0.5, 0.5, 0])
    assert data.row_counts()["test"] == 100
    assert data.row_counts()["train"] + data.row_counts()["val"] == COUNT


def test_checkpoint_state_teaches_what_was_learnt(few: str, caplog: pytest.LogCaptureFixture) -> None:
    before = module(few, CLICK)
    after = TableStreamDataModule(few, CLICK, batch_size=32, window_rows=480)
    after.load_state_dict(before.state_dict())
    assert after.changed_files() == {}
    with caplog.at_level(logging.INFO):
        after.setup()
    assert "inputs:" not in caplog.text  # no pass over the rows
    assert after.state_dict() == before.state_dict()
    same(gathered(after.train_dataloader()), gathered(before.train_dataloader()))
    tested = TableStreamDataModule(few, CLICK, batch_size=32)
    tested.load_state_dict(before.state_dict(), test_only=True)
    tested.setup()
    assert tested.row_counts() == {"test": before.row_counts()["test"]}


def test_changed_files_are_noticed(tmp_path: Path) -> None:
    pattern = files(tmp_path / "rows", rows())
    state = module(pattern, CLICK, ignore=["empty"]).state_dict()

    def changes() -> list[str]:
        data = TableStreamDataModule(pattern, CLICK, batch_size=32)
        data.load_state_dict(state)
        return list(data.changed_files().values())

    assert changes() == []
    table = rows().with_columns(user=pl.when(pl.col("number") == 300).then(1).otherwise(pl.col("user")))
    files(tmp_path / "rows", table)
    assert "data.path=" in changes()[0]
    assert "has changed" in changes()[0]
    files(tmp_path / "rows", rows())
    assert changes() == []
    (tmp_path / "rows" / "3.parquet").write_bytes((tmp_path / "rows" / "0.parquet").read_bytes())
    assert "has changed (4 files, before 3; it has " in changes()[0]


@pytest.mark.parametrize(
    "change", ["shorter", "cut inside", "empty", "gone", "fewer rows", "other types", "other rows"]
)
def test_file_that_changes_while_it_is_streamed_is_one_message(
    change: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = module(files(tmp_path / "rows", rows()), CLICK, ignore=["empty"], window_rows=100)
    file = tmp_path / "rows" / "1.parquet"
    content, footer = file.read_bytes(), int.from_bytes(file.read_bytes()[-8:-4], "little") + 8
    file.unlink()
    if change in ("shorter", "cut inside", "empty"):
        file.write_bytes({"shorter": content[:2000], "empty": b""}.get(change, content[:500] + content[-footer:]))
    elif change != "gone":
        table = pl.read_parquet(tmp_path / "rows" / "0.parquet")
        {"fewer rows": table.head(1), "other types": table.cast(pl.String)}.get(change, table).write_parquet(file)
    message = r"^.*/1.parquet was changed, replaced or deleted while it was being streamed; .* until the run ends$"
    with pytest.raises(InputError, match=message):
        list(data.train_dataloader())
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "{0}/no*.parquet"}, r"data.path=.*no\*.parquet: no file matches this pattern"),
        ({"path": "{0}/none.parquet"}, "none.parquet: no such file"),
        ({"path": "{0}/empty"}, "is a folder without tables"),
        (
            {"path": "{0}/a.csv"},
            r"data=table_stream reads .parquet files; convert it with polars.scan_csv\('a.csv'\)",
        ),
        ({"path": "{0}/damaged.parquet"}, "cannot read .*damaged.parquet"),
        ({"path": "{0}/unlike"}, "compared with 0.parquet, 1.parquet has String in column y, not Int64"),
        ({"path": None}, "data.path is not given"),
        ({"window_rows": 0}, "data.window_rows=0: must be a whole number"),
        ({"tasks": {"z": {"kind": "binary"}}}, "data.tasks.z: .* has no column 'z'; it has x, y, part"),
        ({"tasks": {"y": {"kind": "multiclass"}}, "split_column": "x"}, "column 'x', row 1: .*accepted are train"),
        ({"split_column": "part"}, "column 'part': no row is marked val"),
        ({"tasks": {"x": {"kind": "binary"}}}, "task 'x' is binary but its training rows have"),
        ({"path": "{0}/almost.parquet"}, r"almost.parquet, column 'x', row 1: 'one' is not a number, but most"),
        ({"path": "{0}/almost.parquet", "numeric": ["x"]}, r"almost.parquet, column 'x', row 1: 'one' is not a number"),
    ],
)
def test_bad_input_is_one_message(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    frame = pl.DataFrame({"x": range(100), "y": [0, 1] * 50, "part": ["train"] * 100})
    for name in ("empty", "unlike"):
        (tmp_path / name).mkdir()
    frame.write_csv(tmp_path / "a.csv")
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 and no more")
    frame.write_parquet(tmp_path / "rows.parquet")
    frame.write_parquet(tmp_path / "unlike" / "0.parquet")
    frame.with_columns(pl.col("y").cast(pl.String)).write_parquet(tmp_path / "unlike" / "1.parquet")
    text = pl.Series(["one", *(str(number) for number in range(99))])
    frame.with_columns(x=text).write_parquet(tmp_path / "almost.parquet")
    given = {"path": "{0}/rows.parquet", "tasks": {"y": {"kind": "binary"}}, "split": [0.98, 0.01, 0.01]} | options
    given["path"] = given["path"] and given["path"].format(tmp_path)
    if "split" not in options and "almost" in str(given["path"]):
        given |= {"split": [1, 0, 0], "val_path": given["path"], "test_path": given["path"]}
    with pytest.raises(InputError, match=message):
        module(**given)
