"""The labels, groups and weights of a table's rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from mtl.data_modules.table import TableDataModule
from mtl.data_modules.tables.encoder import NUMERIC
from mtl.data_modules.tables.labels import TargetOptions, mask_by_conditions
from mtl.data_modules.tables.vocabulary_growth import learn_tasks

from mtl.checks import InputError
from mtl.training.losses import task_loss_sums
from mtl.types import MISSING_CLASS, Numeric, TaskSpec
from tests.tables import (
    WAYS,
    load_table,
    rows_of,
    write_table,
)

# Labels: 12 training rows, 4 of validation and 4 of test
PART = {"part": ["train"] * 12 + ["val"] * 4 + ["test"] * 4}
LABELS: dict[str, Any] = PART | {
    "user": ["ann", "bob", None, "ann", "cat"] * 4,
    "x": [float(row % 7) for row in range(20)],
    "click": ["yes", "no", "no", "no", None] * 4,
    "genre": ["pop", "rock", "jazz", "pop"] * 5,
    "stars": [1.0, 2.0, None, 4.0] * 5,
    "w": [float(1 + row % 3) for row in range(20)],
}
BINARY, CLASSES, REGRESSION = {"kind": "binary"}, {"kind": "multiclass"}, {"kind": "regression"}


def load_labels(folder: Path, way: str, tasks: Any, change: Any = None, **options: Any) -> Any:
    path = write_table(pl.DataFrame(LABELS | (change or {})), folder / f"t.{'csv' if way == 'csv' else 'parquet'}")
    return load_table(path, way, tasks, split={"by": "column", "column": "part"}, **options)


@pytest.mark.parametrize("way", WAYS)
def test_labels(way: str, tmp_path: Path) -> None:
    tasks = {
        "click": BINARY | {"metrics": ["auprc", "ece"], "pos_weight": "balanced", "weight": 0.5},
        "no": BINARY | {"column": "click", "positive": "no"},
        "genre": CLASSES | {"class_weights": "balanced"},
        "stars": REGRESSION | {"metrics": ["rmse"]},
        "raw": REGRESSION | {"column": "stars", "standardize": False},
        "half": BINARY | {"pos_weight": 2},
        "number": CLASSES | {"class_weights": {1: 2.0, 3.0: 4.0}},
        "constant": REGRESSION,
    }
    change = {"half": [9, 10] * 10, "number": [1, 2, 3, 2] * 5, "constant": [0.1] * 20}
    data = load_labels(tmp_path, way, tasks, change)
    click, no, genre, stars, raw, half, number, constant = data.spec.tasks
    assert (click.metrics, genre.metrics, stars.metrics, click.weight) == (("auprc", "ece"), (), ("rmse",), 0.5)
    assert click.pos_weight == 7 / 3  # of 10 labelled training rows, 3 are positive
    assert genre.classes == ("jazz", "pop", "rock")
    assert genre.class_weights == (12 / (3 * 3), 12 / (3 * 6), 12 / (3 * 3))
    assert (click.classes, no.classes, half.classes) == (("no", "yes"), ("yes", "no"), ("9", "10"))  # as numbers
    assert (half.pos_weight, number.class_weights) == (2, (2, 1, 4))
    labels = torch.tensor([1.0, 2.0, 4.0] * 3)
    assert (stars.mean, stars.std) == pytest.approx((float(labels.mean()), float(labels.std(correction=0))))
    assert (raw.mean, raw.std, constant.mean, constant.std) == (0, 1, pytest.approx(0.1), 1)
    targets, nan = rows_of(data, "val").targets, float("nan")
    expected = {"click": [0, 0, nan, 1], "no": [1, 1, nan, 0], "genre": [1, 2, 0, 1], "stars": [1, 2, nan, 4]}
    for name, values in expected.items():
        torch.testing.assert_close(targets[name].double(), torch.tensor(values).double(), equal_nan=True)
    types = {name: target.dtype for name, target in targets.items()}
    assert (types["click"], types["genre"], types["stars"]) == (torch.float32, torch.int64, torch.float64)
    groups = load_labels(tmp_path, way, {"click": BINARY | {"metrics": ["mrr"]}}, group_column="user")
    [train, val] = (next(iter(loader)).groups for loader in (groups.train_dataloader(), groups.val_dataloader()))
    assert train is None  # they count in evaluation only
    assert val[0] == -1  # of None, ann, cat, ann
    assert val[1] == val[3] != val[2]
    assert "user" in groups.spec.inputs


def test_labels_count_where_all_nested_conditions_hold() -> None:
    tasks = {"a": BINARY, "b": BINARY | {"where": "a"}, "y": REGRESSION | {"where": "b"}, "c": CLASSES | {"where": "b"}}
    a, b = torch.tensor([1.0, 0.0, math.nan, 1.0, 1.0]), torch.tensor([1.0, 1.0, 1.0, 0.0, math.nan])
    targets = {"a": a, "b": b, "y": torch.arange(5.0), "c": torch.arange(5)}
    kept = mask_by_conditions(TargetOptions.from_tasks(tasks), targets)
    assert torch.equal(kept["y"].isnan(), torch.tensor([False, True, True, True, True]))
    assert kept["c"].tolist() == [0, *[MISSING_CLASS] * 4]


@pytest.mark.parametrize("way", WAYS)
def test_rows_with_an_empty_group_are_in_none_in_any_file(way: str, tmp_path: Path) -> None:
    """As text, empty cells are "" or one of ``null_values``, of the training file alone."""
    change = {"user": ["ann", " ", None, "ann", "cat"] * 4}
    data = load_labels(tmp_path, way, {"click": BINARY | {"metrics": ["gauc"]}}, change, group_column="user")
    expected = next(iter(data.val_dataloader())).groups
    assert (expected < 0).tolist() == [True, False, False, False]  # None, ann, cat, ann
    users = pl.Series(["ann", " ", "", "ann", "cat", "NA"])
    rows = pl.DataFrame(LABELS | change).cast(pl.String)[10:16].with_columns(user=users)
    groups = data.labelled(rows, "rows").groups
    assert (groups < 0).tolist() == [False, True, True, False, False, way == "csv"]
    assert groups[0] == groups[3] == expected[1]
    assert groups[4] == expected[2]


@pytest.mark.parametrize("way", WAYS)
def test_labels_count_where_another_task_is_positive(way: str, tmp_path: Path) -> None:
    tasks = {"click": BINARY, "genre": CLASSES | {"where": "click"}, "stars": REGRESSION | {"where": "click"}}
    all_tasks = {name: {key: value for key, value in task.items() if key != "where"} for name, task in tasks.items()}
    rows, every = (rows_of(load_labels(tmp_path, way, some)) for some in (tasks, all_tasks))
    clicked = every.targets["click"] == 1  # not NaN either
    assert 0 < clicked.sum() < len(clicked)
    assert torch.equal(rows.targets["genre"], every.targets["genre"].masked_fill(~clicked, MISSING_CLASS))
    stars = every.targets["stars"].masked_fill(~clicked, math.nan)
    torch.testing.assert_close(rows.targets["stars"], stars, rtol=0, atol=0, equal_nan=True)


def test_weights_of_rows(tmp_path: Path) -> None:
    """They have a mean of 1 over the labels of each split, and the loss is the weighted mean."""
    tasks = {"click": BINARY, "stars": REGRESSION | {"standardize": False}}
    own = load_labels(tmp_path / "own", "csv", tasks | {"stars": tasks["stars"] | {"weight_column": "w"}})
    data = load_labels(tmp_path, "csv", tasks, weight_column="w")
    for split, rows in data.splits.items():
        assert (own.splits[split].weights["click"] == 1).all()
        assert torch.equal(own.splits[split].weights["stars"], rows.weights["stars"])
    assert data.spec.inputs[NUMERIC] == Numeric(1)  # x alone
    for rows in data.splits.values():
        for task, target in rows.targets.items():
            assert float(rows.weights[task][~target.isnan()].mean()) == pytest.approx(1)
    train = data.splits["train"]
    ratio = train.weights["click"] / train.weights["click"][0]
    assert ratio.tolist() == pytest.approx([float(1 + row % 3) for row in range(12)])
    some = train.select(torch.tensor([3, 0]))
    assert torch.equal(some.weights["click"], train.weights["click"][[3, 0]])
    rows, specs = data.splits["val"], {task.name: task for task in data.spec.tasks}
    predictions = {name: torch.linspace(-1, 1, 4) for name in specs}
    names, totals, counts = task_loss_sums(specs, predictions, rows.targets, rows.weights)
    found = dict(zip(names, (totals / counts).tolist(), strict=True))
    weight, kept = torch.tensor([1.0 + row % 3 for row in range(12, 16)]), ~rows.targets["stars"].isnan()
    errors = (predictions["stars"] - rows.targets["stars"]).square()
    assert found["stars"] == pytest.approx(float((errors * weight)[kept].sum() / weight[kept].sum()))


@pytest.mark.parametrize("way", WAYS)
def test_targets_of_a_pattern_that_teach_nothing_are_left_out(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning names them, none becomes an input, and a restored data module leaves out the same."""
    change = {"t_new": [None] * 12 + ["a", "b"] * 4, "t_one": ["1"] * 12 + ["0", "1"] * 4, "t_two": ["0", "1"] * 10}
    tasks = {name: BINARY | {"pattern": "t_*"} for name in change}
    tasks["stars"], change = REGRESSION | {"pattern": "s*"}, change | {"same": [2.0] * 20}
    tasks["same"] = tasks["stars"]
    data = load_labels(tmp_path, way, tasks, change)
    assert data.spec.task_names == list(rows_of(data).targets) == ["t_two", "stars"]
    assert not {*change} & {*data.row_encoder.columns}
    assert [m for m in caplog.messages if "left out" in m] == [
        "3 of 5 tasks are left out: their training rows have no label, or all the same one: t_new, t_one, same"
    ]
    split = {"by": "column", "column": "part"}
    again = TableDataModule(data.paths["train"], tasks, batch_size=8, split=split)
    again.load_state_dict(data.state_dict())
    again.setup()
    assert list(rows_of(again).targets) == ["t_two", "stars"]
    for problem, of in (({"t_new": tasks["t_new"]}, "t_new"), (tasks | {"t_new": BINARY}, "t_new")):
        with pytest.raises(InputError, match=f"no training row has a label for task '{of}'"):
            load_labels(tmp_path, way, problem, change)
    labels = [*TargetOptions.from_tasks(tasks)]
    earlier = [*data.spec.tasks, TaskSpec("t_one", "binary", classes=("0", "1"))]
    read = [(pl.DataFrame(LABELS | change)[:12], "day.csv")]
    again_learnt = learn_tasks(labels, earlier, lambda columns: iter(read), "day.csv")
    assert [task.name for task in again_learnt] == ["t_one", "t_two", "stars"]  # what is trained stays
    named = tasks | {"t_two": BINARY | {"pattern": "t_*", "where": "t_one"}}
    with pytest.raises(InputError, match="task 't_one' needs at least two classes"):
        load_labels(tmp_path, way, named, change)
