"""A sampler that goes through every combination of values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from mtl.checks import InputError
from mtl.tune.space import distributions


class GridSampler(BaseSampler):
    """Give trial ``number`` the combination ``number`` of all lists of values; after the last one, start again.

    The last list varies fastest. Optuna's own grid sampler stops the study after the last combination, which does not
    work when workers ask for trials. ``seed`` has no effect; all samplers have one. Raises InputError if an option of
    the study's space is not a list.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return distributions(study.user_attrs["definition"]["space"])

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        lists = {}
        for name, distribution in search_space.items():
            if not isinstance(distribution, CategoricalDistribution):
                raise InputError(f"sampler=grid: space: {name} must be a list of values; it has {distribution}")
            lists[name] = distribution.choices
        sizes = [len(choices) for choices in lists.values()]
        indices = np.unravel_index(trial.number % math.prod(sizes), sizes)  # the last one changes fastest
        return {name: choices[index] for (name, choices), index in zip(lists.items(), indices, strict=True)}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise AssertionError(f"{param_name} is not in the space")
