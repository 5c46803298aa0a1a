"""Options of a table's tasks: metrics, weights of classes, weights of rows, groups of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from mtl.data_modules.table import TableDataModule

from mtl.checks import InputError
from mtl.training.losses import summed_losses
from mtl.types import Numeric


def table(tmp_path: Path, tasks: Any, change: Any = None, **options: Any) -> TableDataModule:
    """Serve 12 training rows, 4 of validation and 4 of test."""
    part = ["train"] * 12 + ["val"] * 4 + ["test"] * 4
    columns = {
        "part": part,
        "user": ["ann", "bob", None, "ann", "cat"] * 4,
        "x": [float(row % 7) for row in range(20)],
        "click": ["yes", "no", "no", "no", None] * 4,
        "genre": ["pop", "rock", "jazz", "pop"] * 5,
        "stars": [1.0, 2.0, None, 4.0] * 5,
        "w": [float(1 + row % 3) for row in range(20)],
    }
    frame = pl.DataFrame(columns | (change or {}))
    frame.write_csv(tmp_path / "rows.csv")
    data = TableDataModule(str(tmp_path / "rows.csv"), tasks, batch_size=4, split_column="part", **options)
    data.prepare_data()
    data.setup()
    return data


BINARY = {"kind": "binary"}
CLASSES = {"kind": "multiclass"}


def test_metrics_and_weights_of_classes(tmp_path: Path) -> None:
    tasks = {
        "click": BINARY | {"metrics": ["auprc", "ece"], "pos_weight": "balanced"},
        "genre": CLASSES | {"class_weights": "balanced"},
        "stars": {"kind": "regression", "metrics": ["rmse"]},
    }
    click, genre, stars = table(tmp_path, tasks).spec.tasks
    assert (click.metrics, genre.metrics, stars.metrics) == (("auprc", "ece"), (), ("rmse",))
    assert click.pos_weight == 7 / 3  # of 10 labelled training rows, 3 are positive
    assert genre.class_weights == (12 / (3 * 3), 12 / (3 * 6), 12 / (3 * 3))  # jazz, pop, rock
    tasks = {"click": BINARY | {"pos_weight": 2}, "genre": CLASSES | {"class_weights": {"rock": 5, "jazz": 0}}}
    click, genre = table(tmp_path, tasks).spec.tasks
    assert (click.pos_weight, genre.class_weights) == (2, (0, 1, 5))


def test_classes_may_be_numbers(tmp_path: Path) -> None:
    tasks = {"genre": CLASSES | {"class_weights": {1: 2.0, 3.0: 4.0}}}
    data = table(tmp_path, tasks, {"genre": [1, 2, 3, 2] * 5})
    assert data.spec.tasks[0].class_weights == (2, 1, 4)


def test_row_weights_have_a_mean_of_one_over_the_labels_of_each_split(tmp_path: Path) -> None:
    data = table(tmp_path, {"click": BINARY, "stars": {"kind": "regression"}}, weight_column="w")
    assert "w" not in data.spec.inputs
    assert data.spec.inputs["numeric columns"] == Numeric(1)  # x alone
    for rows in data.splits.values():
        for task, target in rows.targets.items():
            assert float(rows.weights[task][~target.isnan()].mean()) == pytest.approx(1)
    train = data.splits["train"]
    ratio = train.weights["click"] / train.weights["click"][0]
    assert ratio.tolist() == pytest.approx([float(1 + row % 3) for row in range(12)])
    some = train.select(torch.tensor([3, 0]))
    assert torch.equal(some.weights["click"], train.weights["click"][[3, 0]])
    assert some.to("cpu").weights.keys() == {"click", "stars"}


def test_the_loss_of_a_split_is_the_weighted_mean(tmp_path: Path) -> None:
    data = table(tmp_path, {"click": BINARY, "stars": {"kind": "regression", "standardise": False}}, weight_column="w")
    rows, tasks = data.splits["val"], {task.name: task for task in data.spec.tasks}
    predictions = {name: torch.linspace(-1, 1, 4) for name in tasks}
    names, totals, counts = summed_losses(tasks, predictions, rows.targets, rows.weights)
    found = dict(zip(names, (totals / counts).tolist(), strict=True))
    weight, kept = torch.tensor([1.0 + row % 3 for row in range(12, 16)]), ~rows.targets["stars"].isnan()
    errors = (predictions["stars"] - rows.targets["stars"]).square()
    assert found["stars"] == pytest.approx(float((errors * weight)[kept].sum() / weight[kept].sum()))


def test_groups_are_numbered_within_a_split(tmp_path: Path) -> None:
    data = table(tmp_path, {"click": BINARY | {"metrics": ["mrr"]}}, group_column="user")
    assert data.splits["train"].groups is None  # they count in evaluation only
    assert data.splits["val"].groups.tolist() == [-1, 0, 1, 0]  # of None, ann, cat, ann
    assert "user" in data.spec.inputs


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (
            BINARY | {"metrics": ["aucroc"]},
            {},
            r"data.tasks.click: metrics=\[aucroc\]: a binary task has auroc, .*; not",
        ),
        (BINARY | {"metrics": "auroc"}, {}, r"data.tasks.click.metrics=auroc: must be a list"),
        (BINARY | {"metrics": ["ndcg@5"]}, {}, r"metrics: ndcg@5 ranks the rows of each group; name its column"),
        (BINARY | {"pos_weight": 0}, {}, r"data.tasks.click.pos_weight=0: must be a number"),
        (
            BINARY | {"pos_weight": "even"},
            {},
            r"data.tasks.click.pos_weight=even: must be a positive number, or balanced",
        ),
        (CLASSES | {"pos_weight": 2}, {}, r"pos_weight=2 is for kind=binary, not multiclass"),
        (BINARY | {"class_weights": {"yes": 2}}, {}, r"class_weights=.* is for kind=multiclass, not binary"),
        (CLASSES | {"class_weights": {"maybe": 2}}, {}, r"class_weights: maybe: the labels of .* are no, yes"),
        (CLASSES | {"class_weights": {"yes": -1}}, {}, r"class_weights.yes=-1: must be a number"),
        (CLASSES | {"class_weights": [1, 2]}, {}, r"class_weights=\[1,2\]: must be a mapping"),
        (BINARY | {"standardise": False}, {}, r"standardise=false is for kind=regression, not binary"),
        (BINARY, {"weight_column": "ww"}, r"data.weight_column: .* has no column ww|'ww' \(did you mean 'w'"),
        (BINARY, {"weight_column": "user"}, r"column 'user', row 1: 'ann' is not a number"),
        (
            BINARY,
            {"weight_column": "x", "numeric": ["x"]},
            r"data.weight_column=x: this column is also named as an input",
        ),
        (BINARY, {"group_column": 3}, r"data.group_column=3: must be the name of a column, or null"),
    ],
)
def test_bad_options(tmp_path: Path, task: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        table(tmp_path, {"click": task}, **options)


@pytest.mark.parametrize("weight", ["-1", "", "1e12"])
def test_bad_weights_name_the_cell(tmp_path: Path, weight: str) -> None:
    weights = ["1.5"] * 19 + [weight]
    with pytest.raises(InputError, match=r"column 'w', row 20: .* is not a weight; data.weight_column takes numbers"):
        table(tmp_path, {"click": BINARY}, {"w": weights}, weight_column="w")
    with pytest.raises(InputError, match=r"column 'w': all labels of task 'click' have weight 0"):
        table(tmp_path, {"click": BINARY}, {"w": [0.0] * 12 + [1.0] * 8}, weight_column="w")
