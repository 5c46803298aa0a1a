"""LightGBM's trees of ids and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from mtl.table_models.base import Constant, TableModel, Tensors, join_columns
from mtl.types import Categorical, Numeric, TaskSpec, has_label

TREES = 100  # for each output, at most
# Trees in a row that do not lower the loss of the held-out rows: no more are grown, and these are dropped
EARLY_STOPPING_ROUNDS = 10
HELD_OUT = 5  # every fifth row stops the trees
OBJECTIVES = {"huber": "huber", "mae": "regression_l1", "poisson": "poisson", "quantile": "quantile"}  # of LightGBM


class LightGBM(TableModel):
    """Trees for each task by itself, and for each of its quantiles; a task without a label is predicted as constant."""

    reads = (Categorical, Numeric)

    ids: dict[str, list[Tensor]]  # by task, those of each column in the rows that grew the trees, ascending
    boosters: dict[str, list[Any]]  # by task, one for each quantile, else one

    def fit(self, inputs: Tensors, targets: Tensors, weights: Tensors | None = None) -> Self:
        self.ids, self.boosters = {}, {}
        ids, numbers = join_columns(self.columns, inputs)
        for task in self.tasks:
            mask = has_label(task, targets[task.name])
            weight = weights[task.name][mask].numpy() if weights else None
            if mask.any():
                self._grow(task, ids[mask], numbers[mask], targets[task.name][mask], weight)
        return self

    def predict(self, inputs: Tensors) -> dict[str, Tensor]:
        ids, numbers = join_columns(self.columns, inputs)
        options = {"raw_score": True, "num_threads": torch.get_num_threads()}
        outputs = Constant(self.tasks, {}).predict(inputs)
        for name, boosters in self.boosters.items():
            matrix = _matrix(ids, numbers, self.ids[name])
            values = [torch.from_numpy(np.asarray(booster.predict(matrix, **options))).float() for booster in boosters]
            outputs[name] = values[0] if len(values) == 1 else torch.stack(values, 1)
        return outputs

    def state_dict(self) -> dict[str, Any]:
        texts = {name: [booster.model_to_string() for booster in boosters] for name, boosters in self.boosters.items()}
        return {"ids": self.ids, "boosters": texts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        import lightgbm

        self.ids, texts_by_task = state["ids"], state["boosters"]
        self.boosters = {name: [lightgbm.Booster(model_str=text) for text in texts_by_task[name]] for name in self.ids}

    def _grow(self, task: TaskSpec, ids: Tensor, numbers: Tensor, y: Tensor, weight: Any) -> None:
        """Learn a task from its labelled rows."""
        import lightgbm

        common = {"verbosity": -1, "num_threads": torch.get_num_threads()}
        common |= {"deterministic": True, "force_row_wise": True}
        if task.kind == "regression":  # of a Poisson loss, the rate in units of the mean
            y = y / np.exp(task.mean) if task.loss == "poisson" else task.standardize(y)
            options: dict[str, Any] = {"objective": OBJECTIVES.get(task.loss or "", "regression")}
        else:
            options = {"objective": task.kind} | ({"num_class": task.num_classes} if task.num_classes > 1 else {})
        held_out = np.arange(len(y)) % HELD_OUT == 0 if len(y) > HELD_OUT**2 else np.zeros(len(y), dtype=bool)
        self.ids[task.name] = [column.unique() for column in ids[torch.from_numpy(~held_out)].T]
        x = _matrix(ids, numbers, self.ids[task.name])
        train, valid = (
            lightgbm.Dataset(
                x[part],
                y.numpy()[part],
                weight=None if weight is None else weight[part],
                categorical_feature=list(range(ids.shape[1])),
                params=common,
            )
            for part in (~held_out, held_out)
        )
        stop: list[Any] = [lightgbm.early_stopping(EARLY_STOPPING_ROUNDS, verbose=False)] if held_out.any() else []
        others = [valid] if held_out.any() else []  # without them, nothing stops the trees
        self.boosters[task.name] = [
            lightgbm.train({**common, **options, **alpha}, train, TREES, valid_sets=others, callbacks=stop)
            for alpha in [{"alpha": level} for level in task.quantiles] or [{}]
        ]


def _matrix(ids: Tensor, numbers: Tensor, ids_by_column: Sequence[Tensor]) -> Any:
    """Number the ids of each column that are in ``ids_by_column`` from 0; all others have the next number.

    LightGBM warns of gaps, and its verbosity does not silence its threads.
    """
    columns = []
    for values, column in zip(ids_by_column, ids.T.contiguous(), strict=True):
        place = torch.searchsorted(values, column)
        place[~torch.isin(column, values)] = len(values)
        columns.append(place[:, None].double())
    return torch.cat([*columns, numbers.double()], 1).numpy()
