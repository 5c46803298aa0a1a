"""Models of the inputs of a table that are tested beside a network: a constant, a linear model, trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Literal

from mtl.table_models.base import TableModel
from mtl.table_models.linear import Linear
from mtl.table_models.trees import LightGBM
from mtl.types import InputSpec, TaskSpec

MAX_ROWS = 20_000  # training rows of a model
MAX_OUTPUTS = 32  # of all tasks together, up to which trees are grown

ModelChoice = Literal["auto", "lightgbm", "linear", "none"]
MODELS: dict[str, type[TableModel]] = {"lightgbm": LightGBM, "linear": Linear}


def choose_model(choice: ModelChoice, columns: Mapping[str, InputSpec], tasks: Sequence[TaskSpec]) -> str:
    """Return the name of the model to fit, or "none": for "auto", trees if LightGBM is installed and outputs are few.

    Without ids and numbers, which trees read, it is a linear model.
    """
    if choice == "none":
        return choice
    has_few_outputs = sum(task.outputs for task in tasks) <= MAX_OUTPUTS
    wants_trees = choice == "lightgbm" or (choice == "auto" and has_few_outputs and find_spec("lightgbm") is not None)
    is_readable = any(isinstance(column, LightGBM.reads) for column in columns.values())
    return "lightgbm" if wants_trees and is_readable else "linear"
