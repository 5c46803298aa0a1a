"""Reading files in blocks, and the encoders of rows: the same inputs from the state as in the training."""

from __future__ import annotations

import gzip
import io
import json
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from mtl.data_modules.books import BooksDataModule
from mtl.data_modules.jester import JesterDataModule
from mtl.data_modules.movielens import MovieLensDataModule
from mtl.data_modules.table import TableDataModule
from mtl.data_modules.tables import row_source, vocabulary
from mtl.data_modules.tables.row_source import read_blocks
from mtl.data_modules.tables.vocabulary import Vocabulary
from mtl.data_modules.text import TextDataModule
from polars.testing import assert_frame_equal

from mtl.checks import InputError
from mtl.types import ROW, RowEncoder
from tests.loaded import loaded

QUOTED = 'id,text\n1,"a, ""b""\nof two lines"\n2,plain\n3,"\n\n"\n4,NA\n'
PLAIN = "id,text\n" + "".join(f"{number},{'x' * (number % 37)}\n" for number in range(300))


@pytest.mark.parametrize("text", [QUOTED, PLAIN])
@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
def test_blocks_hold_the_rows_of_the_file(
    text: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix == ".csv.gz" else text.encode())
    monkeypatch.setattr(row_source, "BLOCK_ROWS", 2)
    blocks = list(read_blocks(path, separator=",", null_values=["NA"]))
    rows = pl.read_csv(io.StringIO(text), infer_schema=False, null_values="NA").with_row_index(ROW, offset=1)
    assert_frame_equal(pl.concat([frame for frame, _ in blocks]), rows)
    assert len(blocks) == (2 if text == QUOTED else 150)
    assert blocks[-1][1] == 1


@pytest.mark.parametrize("in_memory", [False, True])
def test_blocks_of_parquet(in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows[1].parquet"
    rows = pl.DataFrame({"a": [1.0, float("nan"), None, 4.0, 5.0], "b": list("vwxyz")})
    rows.write_parquet(path)
    monkeypatch.setattr(row_source, "BLOCK_ROWS", 2)
    blocks = list(read_blocks(path, in_memory=in_memory))
    assert [len(frame) for frame, _ in blocks] == [2, 2, 1]
    expected = rows.fill_nan(None).with_row_index(ROW, offset=1)
    assert_frame_equal(pl.concat([frame for frame, _ in blocks]), expected)


def restored(data: Any, again: Any) -> RowEncoder:
    """Return the encoder of ``again``, which gets the state of ``data`` and reads no file."""
    state = json.loads(json.dumps(data.state_dict()))
    again.load_state_dict(state)
    assert again.spec == data.spec
    assert again.state_dict()["encoder"] == state["encoder"]
    return again.row_encoder


def ratings(kind: type, folder: Path) -> Any:
    options = {"variant": "1m", "alpha": 0.5} if kind is MovieLensDataModule else {}
    if kind is BooksDataModule:
        options = {"min_records": 2}
    return kind(str(folder), batch_size=8, download=False, **options)


@pytest.mark.parametrize(
    ("kind", "columns", "known", "ids", "unknown"),
    [
        (MovieLensDataModule, ["user", "movie"], (3, "20"), (2, 19), (7000, 1)),
        (JesterDataModule, ["user", "joke"], ("1", 100), (0, 99), (1, 101)),
        (BooksDataModule, ["user", "book"], (883, "B01"), (0, 0), (1, "B01")),
    ],
)
def test_pairs(
    kind: type, columns: list[str], known: tuple, ids: tuple, unknown: tuple, tiny_data: Path, tmp_path: Path
) -> None:
    data = loaded(ratings(kind, tiny_data))
    encoder = restored(data, ratings(kind, tmp_path))
    assert encoder.columns == columns
    found = encoder.encode(pl.DataFrame({name: [value] for name, value in zip(columns, known, strict=True)}), "a.csv")
    assert list(found) == list(data.spec.inputs)
    assert tuple(int(value) for value in found.values()) == ids
    rows = pl.DataFrame({name: [value] for name, value in zip(columns, unknown, strict=True)})
    with pytest.raises(InputError, match=r"^a.csv, column '(user|joke)', row 1: .* is unknown, .*: the network knows"):
        encoder.encode(rows, "a.csv")
    for wrong in (None, "x", 1.5):
        with pytest.raises(InputError, match=r"column 'user', row 1: .* is unknown"):
            encoder.encode(rows.with_columns(user=pl.lit(wrong)), "a.csv")
    with pytest.raises(
        InputError, match=r"^a.csv has no column '(movie|joke|book)', which the network reads; it has us"
    ):
        encoder.encode(rows.select("user"), "a.csv")


def test_other_users_than_those_of_the_training(tiny_data: Path, tmp_path: Path) -> None:
    data = loaded(ratings(MovieLensDataModule, tiny_data))
    (tmp_path / "ml-1m").mkdir()
    pairs = [(user, movie) for user in range(30, 60) for movie in range(1, 60) if (user + movie) % 3 == 0]
    rows = [f"{user}::{movie}::{1 + movie % 5}::0" for user, movie in pairs]
    (tmp_path / "ml-1m" / "ratings.dat").write_text("\n".join(rows) + "\n")
    again = ratings(MovieLensDataModule, tmp_path)
    again.load_state_dict(data.state_dict())
    again.prepare_data()
    assert list(again.changed_files()) == ["ml-1m/ratings.dat"]
    with pytest.raises(InputError, match=r"has other users than the 40 that the network was trained on"):
        again.setup()


TASKS = {name: {"text": ["review"], "label": name, "kind": "binary"} for name in ("liked", "same")}
TASKS["same"]["text"] = ["review", "other"]


def reviews() -> pl.DataFrame:
    made = [(f"the {thing} was {how}", thing) for thing in ("soup", "novel") for how in ("good", "dull")] * 25
    return pl.DataFrame(made, ["review", "other"], orient="row").with_columns(
        liked=pl.Series(["yes", "no"] * 50), same=pl.Series(["no", "yes", "yes", "no"] * 25)
    )


def texts(folder: Path, **paths: Path) -> TextDataModule:
    tasks = {name: {**task, **{key: str(file) for key, file in paths.items()}} for name, task in TASKS.items()}
    return TextDataModule(tasks, data_dir=str(folder), batch_size=8, vocabulary=120, max_length=24)


def test_texts(tmp_path: Path) -> None:
    reviews().write_csv(tmp_path / "all.csv")
    data = loaded(texts(tmp_path, path=tmp_path / "all.csv"))
    encoder = restored(data, texts(tmp_path / "other", path=Path("gone.csv")))
    assert encoder.columns == ["review", "other"]
    assert encoder.columns_of("liked") == ["review"]
    rows = pl.DataFrame({"review": ["the soup was good.", None], "other": ["[PAD] our novel", "x"]})
    for task, columns in (("liked", ["review"]), ("same", ["review", "other"])):
        found = encoder.encode(rows, "a.csv", task)
        expected = data.row_encoder.encode(rows.select(columns), "a.csv", task)
        assert all(torch.equal(found[name], expected[name]) for name in ("tokens", "segments"))
        assert found["tokens"].shape[0] == 2
    with pytest.raises(InputError, match="read different columns: name one"):
        encoder.encode(rows, "a.csv")
    with pytest.raises(InputError, match=r"^a.csv has no column 'other', which task 'same' reads; it has review$"):
        encoder.encode(rows.select("review"), "a.csv", "same")
    with pytest.raises(InputError, match=r"^a.csv, column 'review' holds Int\d+, not texts$"):
        encoder.encode(pl.DataFrame({"review": [1]}), "a.csv", "liked")


def test_texts_of_the_test_alone(tmp_path: Path) -> None:
    """The rows of a new test file, with the tokens and classes of the training; no other file is there."""
    rows = reviews()
    for name, frame in {"all": rows, "new": rows[:50]}.items():
        frame.write_csv(tmp_path / f"{name}.csv")
    data = loaded(texts(tmp_path, path=tmp_path / "all.csv"))
    again = texts(tmp_path, path=tmp_path / "gone.csv", test_path=tmp_path / "new.csv")
    again.load_state_dict(data.state_dict(), test_only=True)
    again.prepare_data()
    assert again.changed_files() == {}
    again.setup()
    assert list(again.tasks) == ["test"]
    assert again.spec == data.spec
    batch = again.tasks["test"]["same"].select(torch.arange(50))
    assert torch.equal(batch.inputs["tokens"], data.row_encoder.encode(rows[:50], "new", "same")["tokens"])
    assert batch.targets["same"].tolist() == [float(cell == "yes") for cell in rows["same"][:50]]


@pytest.mark.parametrize("damage", [{"encoder": 5}, {"spec": {}}, {"files": 1}, {"spec": None}])
def test_damaged_state_is_one_message(damage: dict[str, Any], tiny_data: Path) -> None:
    data = ratings(JesterDataModule, tiny_data)
    data.setup()
    again = ratings(JesterDataModule, tiny_data)
    with pytest.raises(InputError, match="the checkpoint's description of its data is damaged"):
        again.load_state_dict(data.state_dict() | damage)


BIG = 1 << 53


@pytest.mark.parametrize(
    ("categories", "cells", "ids"),
    [
        (["00", "01", "10", "23"], [0, 1, 10, 23, 2, None], [1, 2, 3, 4, 0, 0]),  # hours, as pandas.read_csv reads them
        (["07912"], [7912.0, 7913.0], [1, 0]),
        (["7"], ["007", "7.00", "+7", "7e0", "7a", "-7"], [1, 1, 1, 1, 0, 0]),
        (["007", "7"], ["7", "007", "07"], [2, 1, 0]),  # two categories: only their own spellings are clear
        (["false", "true"], [0, 1], [1, 2]),
        (["0", "1"], [True, False], [2, 1]),
        (["0", "1", "2"], [True, False], [0, 0]),  # booleans stand for 0 and 1 only if there are no other categories
        (["2026-03-01"], [date(2026, 3, 1), date(2026, 3, 2)], [1, 0]),
        (["2026-03-01"], [datetime(2026, 3, 1), datetime(2026, 3, 1, 14, 30)], [1, 0]),
        (["2026-03-01 14:30"], [datetime(2026, 3, 1, 14, 30)], [1]),
        ([str(BIG), str(BIG + 1)], [BIG + 1, BIG, BIG + 2], [2, 1, 0]),
        ([str(BIG), str(BIG + 1)], [Decimal(BIG + 1), Decimal(f"{BIG}.00")], [2, 1]),
        (["1.5"], [Decimal("1.50"), Decimal("1.51")], [1, 0]),
        (["10000000000000000"], ["1e16"], [1]),
    ],
)
def test_category_is_found_in_any_spelling_of_its_number(categories: list[str], cells: Any, ids: list[int]) -> None:
    assert Vocabulary(categories).encode(pl.Series(cells)).tolist() == ids


def test_rounded_categories_are_one_message(tmp_path: Path) -> None:
    """pandas turns whole numbers with an empty cell into Float64, which rounds large ones."""
    rows = pl.DataFrame({"user": [BIG + number % 4 for number in range(40)], "y": [0, 1] * 20})
    rows.write_parquet(tmp_path / "t.parquet")
    data = TableDataModule(tmp_path / "t.parquet", {"y": "binary"}, columns={"user": "category"}, batch_size=8)
    encoder = loaded(data).row_encoder
    with pytest.raises(InputError, match=r"rows, column 'user': .* beyond 2\^53, which have lost .* read it as text"):
        encoder.encode(rows.with_columns(pl.col("user").cast(float)), "rows")


def test_an_empty_cell_is_not_read_as_another_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most batches with labels have some; to look for numbers and dates takes longer than all else."""
    monkeypatch.delattr(vocabulary, "canonical_value")
    assert Vocabulary(["no", "yes"]).encode(pl.Series(["yes", None, "no", None])).tolist() == [2, 0, 1, 0]
