"""Data modules give the rows they gave before: every split, the order of training rows, encoded rows, histograms.

``data.json`` holds sums over them. After a change that is meant to change rows, write it anew with
``python -m tests.golden.test_data`` and say in the commit why it changed.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mtl.data_modules.table import TableDataModule
from torch import Tensor

from mtl.types import Batch
from tests.golden.pinned import keep_equal
from tests.loaded import loaded
from tests.tiny_data import write_tiny_data
from tests.unit.test_data_sets import CASES as SETS
from tests.visit_files import visits

FILE = Path(__file__).parent / "data.json"
SAME = {"rel": 1e-9, "abs": 1e-9}
Summary = list[Any]  # number of values, type, sum, sum weighted by place
TASKS = {
    "click": {"kind": "binary"},
    "plan": {"kind": "multiclass"},
    "minutes": {"kind": "regression"},
}
PLAIN: dict[str, Any] = {"ignore": ["cart", "rare", "part", "weight"]}
KINDS = {
    "day": "date",
    "tags": {"kind": "list", "separator": "|"},
    "note": "text",
    "price": {"format": "1.234,5"},
    "visits": "number",
}
TABLES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # files, tasks, options
    "csv": ("csv", TASKS, {"seed": 3}),
    "three files": ("files", TASKS, {"vocabulary": {"unknown_rate": 0.2}}),
    "streamed": ("stream", TASKS, {"vocabulary": {"min_count": 2}}),
    "streamed, by column": (
        "stream",
        TASKS,
        {"split": {"by": "column", "column": "part"}, "ignore": ["cart", "rare", "weight"]},
    ),
    "by time": ("csv", TASKS, {"split": {"by": "time", "column": "day", "gap": 5.0}}),
    "by group": ("csv", TASKS, {"split": {"by": "group", "column": "user"}, "group_column": "user"}),
    "by column": ("csv", TASKS, {"split": {"by": "column", "column": "part"}, "ignore": ["cart", "rare", "weight"]}),
    "rare label": ("csv", {"rare": {"kind": "binary"}}, {"ignore": ["click", "cart", "plan", "minutes", "weight"]}),
    "kinds of columns": ("csv", TASKS, {"columns": KINDS, "vocabulary": {"max_size": 12}}),
    "weights": ("csv", {**TASKS, "rare": {"kind": "binary", "weight_column": "visits"}}, {"weight_column": "weight"}),
    "chain": ("csv", {**TASKS, "cart": {"kind": "binary", "after": "click"}}, {"normalize_losses": True}),
}


def summary(values: Iterable[Tensor]) -> Summary:
    """Return numbers that change with any value, and with the order of the values."""
    tensors = [value.flatten() for value in values]
    flat = torch.cat(tensors).double().nan_to_num(nan=-7.0)
    places = torch.arange(len(flat), dtype=torch.float64).sin()
    return [len(flat), str(tensors[0].dtype), float(flat.sum()), float(flat @ places)]


def parts_of(loader: Iterable[Batch | list[Batch]]) -> dict[str, Summary]:
    """Return a summary of each tensor of the batches of ``loader``, one batch after another."""
    tensors: dict[str, list[Tensor]] = {}
    for batches in loader:
        for batch in [batches] if isinstance(batches, Batch) else batches:
            groups = {} if batch.groups is None else {"": batch.groups}
            parts = {"input": batch.inputs, "target": batch.targets, "weight": batch.weights, "groups": groups}
            for part, by_name in parts.items():
                for name, value in by_name.items():
                    tensors.setdefault(f"{part} {name}".strip(), []).append(value)
    return {name: summary(values) for name, values in tensors.items()}


def rows_of(data: Any) -> dict[str, Summary]:
    """Return a summary of each split."""
    splits = {name: parts_of(getattr(data, f"{name}_dataloader")()) for name in ("train", "val", "test")}
    return {f"{split}: {name}": value for split, parts in splits.items() for name, value in parts.items()}


def encoded(data: Any) -> dict[str, Summary]:
    """Return a summary of 20 new rows as the encoder reads them, and of their histograms beside those of training."""
    new = visits(20, seed=1, users=40)
    found = {f"new {name}": summary([value]) for name, value in data.row_encoder.encode(new, "new rows").items()}
    for column, pair in data.row_encoder.histograms_of(new, "new rows").items():
        counts = [torch.tensor([*one.counts, one.rows], dtype=torch.float64) for one in pair]
        found[f"histograms {column}"] = summary(counts)
    return found


def table(name: str, folder: Path) -> Any:
    """Return the data module of ``TABLES[name]``, whose files are written to ``folder``."""
    files, tasks, options = TABLES[name]
    frame = visits()
    path = folder / "visits.csv"
    if files == "csv":
        frame.write_csv(path)
    else:
        path, count = folder, len(frame) // 3
        for number in range(3):
            part = frame[number * count : (number + 1) * count]
            part.write_parquet(path / f"{number}.parquet", row_group_size=30)
    if files == "stream":
        options = {"window_rows": 64, **options}
    return loaded(TableDataModule(str(path), tasks, **{**PLAIN, "batch_size": 16, "eval_batch_size": 64, **options}))


def continued(folder: Path) -> Any:
    """Return a data module that goes on with the encoding of another one, whose table had fewer users."""
    visits(120, seed=2, users=12).write_csv(folder / "before.csv")
    before = loaded(TableDataModule(str(folder / "before.csv"), TASKS, **PLAIN, batch_size=16))
    visits().write_csv(folder / "visits.csv")
    data = TableDataModule(str(folder / "visits.csv"), TASKS, **PLAIN, batch_size=16)
    data.continue_from(json.loads(json.dumps(before.state_dict())))
    return loaded(data)


def of_table(name: str) -> Callable[[Path, Path], dict[str, Summary]]:
    def summaries(folder: Path, tiny_data: Path) -> dict[str, Summary]:
        data = table(name, folder)
        return rows_of(data) | encoded(data)

    return summaries


def of_continued(folder: Path, tiny_data: Path) -> dict[str, Summary]:
    data = continued(folder)
    return rows_of(data) | encoded(data)


def of_set(name: str) -> Callable[[Path, Path], dict[str, Summary]]:
    def summaries(folder: Path, tiny_data: Path) -> dict[str, Summary]:
        for part in SETS[name].folders:  # what is cached stays in the folder
            shutil.copytree(tiny_data / part, folder / part)
        return rows_of(SETS[name].ready(folder))

    return summaries


CASES: dict[str, Callable[[Path, Path], dict[str, Summary]]] = {
    **{name: of_set(name) for name in SETS},
    **{f"table, {name}": of_table(name) for name in TABLES},
    "table, continued": of_continued,
}


@pytest.mark.parametrize("name", CASES)
def test_rows_are_unchanged(name: str, tmp_path: Path, tiny_data: Path) -> None:
    expected: dict[str, Summary] = json.loads(FILE.read_text())[name]
    now = CASES[name](tmp_path, tiny_data)
    assert list(now) == list(expected)
    for part, (count, dtype, *sums) in expected.items():
        assert now[part][:2] == [count, dtype], part
        assert now[part][2:] == pytest.approx(sums, **SAME), part


def is_same(new: Summary, pinned: Summary) -> bool:
    return new[:2] == pinned[:2] and new[2:] == pytest.approx(pinned[2:], **SAME)


def all_summaries() -> Iterator[tuple[str, dict[str, Summary]]]:
    with tempfile.TemporaryDirectory() as root:
        tiny_data = write_tiny_data(Path(root) / "data")
        for number, (name, summaries) in enumerate(CASES.items()):
            folder = Path(root) / str(number)
            folder.mkdir()
            yield name, summaries(folder, tiny_data)


def main() -> None:
    """Write what is new or has changed into ``data.json``, a line for each tensor."""
    cases, pinned = [], json.loads(FILE.read_text())
    for name, parts in all_summaries():
        kept = keep_equal(parts, pinned.get(name, {}), is_same)
        lines = [f"  {json.dumps(part)}: {json.dumps(value)}" for part, value in kept.items()]
        cases.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    FILE.write_text("{\n" + ",\n".join(cases) + "\n}\n")
    sys.stdout.write(f"{len(cases)} data sets in {FILE}\n")


if __name__ == "__main__":
    main()
