"""A user's own texts: files, splits, labels, messages about what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from mtl.data_modules.text import TextDataModule

from mtl.checks import InputError
from tests.loaded import loaded

SPAM = {"text": ["subject", "body"], "label": "spam", "kind": "binary"}


def mails(count: int = 40, start: int = 0) -> pl.DataFrame:
    """Return mails with distinct texts; every tenth has no label."""
    numbers = range(start, start + count)
    return pl.DataFrame(
        {
            "subject": [f"mail {n}" for n in numbers],
            "body": [f"buy now {n} times" if n % 2 else f'see you at "{n}", dear' for n in numbers],
            "spam": [None if n % 10 == 9 else ("no", "yes")[n % 2] for n in numbers],
            "topic": [("sport", "art", "music")[n % 3] for n in numbers],
            "score": [n / 4 for n in numbers],
        }
    )


def write(frame: pl.DataFrame, path: Path) -> str:
    if path.suffix == ".parquet":
        frame.write_parquet(path)
    else:
        frame.write_csv(path, separator="\t" if path.suffix == ".tsv" else ",")
    return str(path)


def module(folder: Path, tasks: Any, **options: Any) -> TextDataModule:
    common = {"data_dir": str(folder / "data"), "batch_size": 4, "eval_batch_size": 8, "vocabulary": 100}
    return loaded(TextDataModule(tasks, **common | options))


def lengths(data: TextDataModule, task: str) -> dict[str, int]:
    return {split: len(data.tasks[split][task]) for split in ("train", "val", "test")}


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".parquet"])
def test_tasks_of_one_file(tmp_path: Path, suffix: str) -> None:
    path = write(mails(), tmp_path / f"mails{suffix}")
    tasks = {
        "spam": {**SPAM, "path": path, "weight": 0.5, "metrics": ["f1", "accuracy"]},
        "topic": {"path": path, "text": "body", "label": "topic", "kind": "multiclass"},
        "score": {"path": path, "text": ["body"], "label": "score", "kind": "regression"},
    }
    data = module(tmp_path, tasks)
    assert [(t.name, t.kind, t.num_classes, t.weight, t.metrics, t.small) for t in data.spec.tasks] == [
        ("spam", "binary", 1, 0.5, ("f1", "accuracy"), True),
        ("topic", "multiclass", 3, 1.0, (), True),
        ("score", "regression", 1, 1.0, ("mse", "mae", "r2"), True),
    ]
    assert lengths(data, "spam") == {"train": 29, "val": 3, "test": 4}  # four of 40 have no label
    assert lengths(data, "topic") == {"train": 32, "val": 4, "test": 4}
    _, texts = data.read_tasks()
    rows = [row for s in texts.values() for row in zip(s["topic"].first, s["topic"].labels.tolist(), strict=True)]
    expected = zip(mails()["body"], [("art", "music", "sport").index(topic) for topic in mails()["topic"]], strict=True)
    assert sorted(rows) == sorted(expected)
    for split in texts.values():
        spam = zip(split["spam"].second, split["spam"].labels.tolist(), strict=True)
        assert all(label == ("buy" in text) for text, label in spam)
    for batch in data.train_dataloader():
        assert bool(batch.inputs["segments"].any()) == ("spam" in batch.targets)  # two texts


def test_files_of_their_own(tmp_path: Path) -> None:
    paths = {"path": write(mails(), tmp_path / "mails.csv"), "test_path": write(mails(10, 50), tmp_path / "test.csv")}
    task = {"text": "body", "label": "topic", "kind": "multiclass"}
    data = module(tmp_path, {"topic": {**task, **paths}}, split=[0.75, 0.25, 0])
    assert lengths(data, "topic") == {"train": 30, "val": 10, "test": 10}
    val = write(mails(5, 90), tmp_path / "val.csv")
    data = module(tmp_path, {"topic": {**task, **paths, "val_path": val}})
    assert lengths(data, "topic") == {"train": 40, "val": 5, "test": 10}


def test_empty_cells_are_empty_texts_and_words_are_words(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b,y\n" + "".join(f"None,,{n % 2}\n" for n in range(20)))
    task = {"path": str(tmp_path / "rows.csv"), "text": ["a", "b"], "label": "y", "kind": "binary"}
    _, texts = module(tmp_path, {"t": task}).read_tasks()
    assert set(texts["train"]["t"].first) == {"None"}
    assert set(texts["train"]["t"].second) == {""}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"label": "spam", "kind": "binary", "text": "body"}, r"tasks\.t\.path is missing"),
        ({"path": "FILE", **SPAM, "texts": 1}, r"tasks\.t\.texts: no such option; did you mean text\?"),
        ({"path": "FILE", **SPAM, "label": "sham"}, r"data\.tasks\.t: .*no column 'sham' \(did you mean 'spam'\?\)"),
        ({"path": "FILE", **SPAM, "text": "score"}, r"data\.tasks\.t: column 'score' of .* holds Float64, not texts"),
        ({"path": "FILE", "val_path": "other.csv", **SPAM}, r"data\.tasks\.t\.val_path=other\.csv: no such file"),
        ({"path": "FEW", **SPAM}, r"few\.csv: of its 4 rows with labels, data\.split leaves none for test"),
    ],
)
def test_bad_tasks_are_one_message(task: Any, message: str, tmp_path: Path) -> None:
    files = {"FILE": write(mails(), tmp_path / "mails.parquet"), "FEW": write(mails(4), tmp_path / "few.csv")}
    if task.get("path") in files:
        task = {**task, "path": files[task["path"]]}
    with pytest.raises(InputError, match=message):
        module(tmp_path, {"t": task})
