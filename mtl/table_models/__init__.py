"""Models of the inputs of a table that are tested beside a network: a constant, a linear model, trees."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Literal

from mtl.checks import require_packages
from mtl.options import NonEmpty
from mtl.table_models.base import TableModel
from mtl.table_models.catboost import CatBoost
from mtl.table_models.lightgbm import LightGBM
from mtl.table_models.linear import Linear
from mtl.types import InputSpec, TaskSpec

log = logging.getLogger(__name__)

MAX_ROWS = 20_000  # training rows of a model
MAX_OUTPUTS = 32  # of all tasks together, up to which trees are grown without a time limit

MODELS: dict[str, type[TableModel]] = {"linear": Linear, "lightgbm": LightGBM, "catboost": CatBoost}
Name = Literal["linear", "lightgbm", "catboost"]
Choice = Literal["auto", "none"] | NonEmpty[Name]


def check_packages(choice: Choice) -> None:
    """Raise InputError if a model is named whose package is missing."""
    for name in () if choice in ("auto", "none") else choice:
        if name != "linear":
            require_packages(f"blend={name}", "trees", name)


def choose_models(
    choice: Choice, columns: Mapping[str, InputSpec], tasks: Sequence[TaskSpec], is_limited: bool = False
) -> list[str]:
    """Return the names of the models to fit.

    For "auto" linear, and lightgbm if it is installed, and outputs are few or their time ``is_limited``. Models
    without a column that they read are left out, with a warning if they were named.
    """
    if choice == "none":
        return []
    if choice == "auto":
        has_few_outputs = is_limited or sum(task.outputs for task in tasks) <= MAX_OUTPUTS
        choice = ["linear", "lightgbm"] if has_few_outputs and find_spec("lightgbm") is not None else ["linear"]
    else:
        for name in choice:
            if not _reads_any(name, columns):
                log.warning("blend: %s is left out, since it reads no column of this table", name)
    return [name for name in choice if _reads_any(name, columns)]


def _reads_any(name: str, columns: Mapping[str, InputSpec]) -> bool:
    return any(MODELS[name].can_read(column) for column in columns.values())
