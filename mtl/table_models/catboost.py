"""CatBoost's trees."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from mtl.table_models.forest import Condition, Split, Tree, number_condition
from mtl.table_models.trees import Rows, Trees
from mtl.types import TaskSpec

TREES, PATIENCE = 1000, 50  # at most; trees in a row that do not lower the loss of the held-out rows
ONE_HOT = 10  # ids of a column up to which each is a feature; else the mean label of each is
PRIOR = 1.0  # labels that the mean label of all rows counts for in that of an id
LOSSES = {"huber": "Huber:delta={delta}", "mae": "MAE", "poisson": "Poisson", "quantile": "Quantile:alpha={level}"}


@dataclass(frozen=True)
class Feature:
    """What a tree reads: the number of a ``column``; with ``values``, a number for its ids from 0, 0-d for others."""

    column: int
    values: Any = None
    other: float = 0.0

    def condition(self, border: float, nan: bool) -> Condition:
        if self.values is None:
            return number_condition(self.column, border, nan)
        return Condition(self.column, self.other > border, right=(self.values > np.float32(border)).tobytes())


class CatBoost(Trees):
    def grow(self, task: TaskSpec, rows: Rows) -> tuple[list[tuple[int, Tree]], Sequence[float]]:
        import catboost

        pairs = [(Feature(column), values) for column, values in enumerate(rows.numbers.T)]
        for column in range(rows.ids.shape[1]):
            pairs += _encode(column, task, rows)
        features, x = [feature for feature, _ in pairs], np.column_stack([values for _, values in pairs])
        if (x[~rows.held] == x[~rows.held][0]).all():  # which CatBoost refuses
            return [], task.constant
        train, valid = (
            catboost.Pool(x[part].astype(np.float32), rows.y[part], weight=rows.weight[part])
            for part in (~rows.held, rows.held)
        )
        name = {"binary": "Logloss", "multiclass": "MultiClass"}.get(task.kind, LOSSES.get(task.loss or "", "RMSE"))
        trees, bias = list[tuple[int, Tree]](), list(task.constant)
        for number, level in enumerate(task.quantiles or [0.5]):
            loss = name.format(delta=task.delta, level=level)
            options = {"loss_function": loss, "iterations": TREES, "early_stopping_rounds": PATIENCE}
            options |= {"random_seed": 0, "thread_count": torch.get_num_threads(), "allow_writing_files": False}
            model = catboost.CatBoost(options | {"logging_level": "Silent"})
            model.fit(train, eval_set=valid, callbacks=[self])
            with TemporaryDirectory() as folder:
                model.save_model(f"{folder}/model.json", format="json")
                read = json.loads(Path(folder, "model.json").read_text())
            scale, offsets = read["scale_and_bias"]
            outputs = [int(label) for label in model.classes_] if task.num_classes > 1 else [number]
            for output, offset in zip(outputs, offsets, strict=True):
                bias[output] = offset
            nan = [part["nan_value_treatment"] == "AsTrue" for part in read["features_info"]["float_features"]]
            for tree in read["oblivious_trees"]:
                splits = [(split["float_feature_index"], split["border"]) for split in tree["splits"] or ()]
                conditions = [features[index].condition(border, nan[index]) for index, border in splits]
                leaves = np.array(tree["leaf_values"]).reshape(-1, len(outputs)) * scale
                trees += [(output, _build(conditions, leaves[:, k])) for k, output in enumerate(outputs)]
        return trees, bias

    def after_iteration(self, state: Any) -> bool:
        """Return whether trees go on growing: CatBoost asks after each."""
        return time.monotonic() < self.deadline


def _build(conditions: Sequence[Condition], leaves: Any) -> Tree:
    """Return an ordinary tree: bit k of the index of a leaf is condition k."""
    if not conditions:
        return float(leaves[0])
    half = len(leaves) // 2
    return Split(conditions[-1], _build(conditions[:-1], leaves[:half]), _build(conditions[:-1], leaves[half:]))


def _encode(column: int, task: TaskSpec, rows: Rows) -> list[tuple[Feature, Any]]:
    """Return the features of a column of ids, with their values in the rows."""
    ids, distinct = rows.ids[:, column], np.unique(rows.ids[~rows.held, column])
    if len(distinct) <= ONE_HOT:  # of two ids, one is enough
        return [(Feature(column, np.arange(i + 1) == i), ids == i) for i in distinct[len(distinct) == 2 :]]
    classes = np.arange(task.num_classes)[:, None]
    labels = rows.y[None] if task.num_classes == 1 else (rows.y == classes).astype(float)
    return [target_statistic(column, ids, y, rows) for y in labels]


def target_statistic(column: int, ids: Any, y: Any, rows: Rows) -> tuple[Feature, Any]:
    """Return the mean label ``y`` of each of the ``ids [N]``, and its values in the rows, ``[N]``.

    In the rows that grow trees it is that of the rows before them, in random order: ordered target statistics
    (Prokhorenkova et al. 2018, equation 5). The mean of all labels counts as ``PRIOR`` more labels.
    """
    weight, size = rows.weight * ~rows.held, int(ids[~rows.held].max()) + 1
    prior = (weight * y).sum() / weight.sum()
    seen, labels = np.minimum(ids, size), np.stack([weight * (y - prior), weight])
    order = np.random.default_rng(0).permutation(len(ids))
    order = order[np.argsort(seen[order], kind="stable")]
    before = np.cumsum(labels[:, order], 1) - labels[:, order]
    before -= before[:, np.searchsorted(seen[order], seen[order])]  # what is before the first row of the id
    values = np.empty(len(ids))
    values[order] = prior + before[0] / (before[1] + PRIOR)
    total, count = (np.bincount(seen, part, size + 1)[:size] for part in labels)
    means = (prior + total / (count + PRIOR)).astype(np.float32)
    return Feature(column, means, float(np.float32(prior))), np.where(rows.held, np.append(means, prior)[seen], values)
