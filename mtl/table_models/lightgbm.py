"""LightGBM's trees."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mtl.table_models.forest import Condition, Split, Tree, number_condition
from mtl.table_models.trees import TREES, Rows, Trees
from mtl.types import Bag, TaskSpec

COLUMNS = 50  # that a tree reads of a wide table, within limits
PATIENCE = 100  # trees in a row that do not lower the loss of the held-out rows: no more are grown, these are dropped
# Chosen on ten tables, see benchmarks/accuracy/blend_candidates.md
OPTIONS = {
    **{"learning_rate": 0.03, "num_leaves": 15, "min_child_samples": 10},
    **{"subsample": 0.8, "bagging_freq": 1, "reg_lambda": 3.0, "max_bin": 63},
    **{"seed": 0, "deterministic": True, "force_row_wise": True, "verbosity": -1},
}
# With lists, chosen on the validation rows of Tox21 (2,048 bits): AUROC .824, with the options above .820
OF_LISTS = {"num_leaves": 63, "min_child_samples": 3, "reg_lambda": 1.0}
OBJECTIVES = {"huber": "huber", "mae": "regression_l1", "poisson": "poisson", "quantile": "quantile"}


class LightGBM(Trees):
    def grow(self, task: TaskSpec, rows: Rows) -> tuple[list[tuple[int, Tree]], Sequence[float]]:
        import lightgbm

        width = rows.ids.shape[1] + rows.numbers.shape[1]
        options: dict[str, Any] = OPTIONS | {"num_threads": torch.get_num_threads()}
        options |= OF_LISTS if any(isinstance(column, Bag) for column in self.columns.values()) else {}
        options["colsample_bytree"] = min(max(COLUMNS / width, 0.1), 0.5)
        if task.kind == "regression":
            options["objective"] = OBJECTIVES.get(task.loss or "", "regression")
        else:
            options |= {"objective": task.kind} | ({"num_class": task.num_classes} if task.num_classes > 1 else {})
        # The ids of the rows that grow trees are numbered from 0 in each column, all others have the next number:
        # LightGBM warns of gaps, and its verbosity does not silence its threads
        vocabularies = [np.unique(column) for column in rows.ids[~rows.held].T]
        codes = [
            np.where(np.isin(column, ids), np.searchsorted(ids, column), len(ids)).astype(np.float32)
            for ids, column in zip(vocabularies, rows.ids.T, strict=True)
        ]
        x = np.column_stack([*codes, rows.numbers])
        train, valid = (
            lightgbm.Dataset(
                x[part],
                rows.y[part],
                weight=rows.weight[part],
                categorical_feature=list(range(len(codes))),
                params=options,
            )
            for part in (~rows.held, rows.held)
        )
        trees = list[tuple[int, Tree]]()
        for index, alpha in enumerate([{"alpha": level} for level in task.quantiles] or [{"alpha": task.delta}]):
            stop: list[Any] = [lightgbm.early_stopping(PATIENCE, verbose=False), self._end]
            booster = lightgbm.train(options | alpha, train, TREES, valid_sets=[valid], callbacks=stop)
            for number, tree in enumerate(_read_trees(booster.model_to_string(), vocabularies)):
                trees.append((index + number % task.num_classes, tree))
        return trees, [0.0] * task.outputs

    def _end(self, state: Any) -> None:
        """End the growth of trees at the deadline."""
        import lightgbm

        if time.monotonic() > self.deadline:
            raise lightgbm.callback.EarlyStopException(state.iteration, state.evaluation_result_list)


def _read_trees(text: str, vocabularies: Sequence[Any]) -> Iterator[Tree]:
    """Yield the trees of a model that LightGBM wrote, a line for each field; its JSON takes twice as long."""
    for block in text.partition("\nend of trees")[0].split("\nTree=")[1:]:
        fields = {name: values.split() for name, _, values in (line.partition("=") for line in block.splitlines())}
        yield _read_node(0 if fields["split_feature"] else -1, fields, vocabularies)


def _read_node(index: int, fields: Mapping[str, Sequence[str]], vocabularies: Sequence[Any]) -> Tree:
    if index < 0:
        return float(fields["leaf_value"][~index])
    column, threshold = int(fields["split_feature"][index]), float(fields["threshold"][index])
    kind = int(fields["decision_type"][index])
    if kind & 1:  # on the left, one of the ids whose bits are set
        start, end = map(int, fields["cat_boundaries"][int(threshold) : int(threshold) + 2])
        bits = np.array([*map(int, fields["cat_threshold"][start:end])], dtype="<u4").view(np.uint8)
        ids = vocabularies[column][np.flatnonzero(np.unpackbits(bits, bitorder="little"))]
        is_right = np.isin(np.arange(ids.min(), ids.max() + 1), ids, invert=True)
        condition = Condition(column, True, first=int(ids.min()), right=is_right.tobytes())
    else:
        other = not kind & 2 if kind >> 2 == 2 else threshold < 0  # NaN has a side of its own, or goes where 0 goes
        condition = number_condition(column - len(vocabularies), threshold, other)
    left, right = int(fields["left_child"][index]), int(fields["right_child"][index])
    return Split(condition, _read_node(left, fields, vocabularies), _read_node(right, fields, vocabularies))
