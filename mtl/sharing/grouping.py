"""Choose groups of tasks by the gains that pairs of tasks predict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

MAX_CANDIDATE_GROUPS = 5_000  # all groups of 12 tasks, of more tasks those that are not too large
Group = tuple[int, ...]


def predicted(group: Sequence[int], gains: np.ndarray) -> list[float]:
    """Return for each task of a group the mean gain from its mates, 0 if it is alone (Standley et al. 2020, TAG).

    ``gains [T, T]``: the gain of the column's task from sharing with the row's; an undefined one counts 0.
    """
    within = np.nan_to_num(gains[np.ix_(group, group)])
    sums: list[float] = (within.sum(0) - within.diagonal()).tolist()
    return [total / max(len(group) - 1, 1) for total in sums]


def partition(gains: np.ndarray, max_groups: int | None = None) -> list[Group]:
    """Return the partition into at most ``max_groups`` groups with the largest sum of predicted gains of all tasks.

    An integer program chooses among the group of all tasks and all groups of up to m tasks, at least pairs, with m as
    large as ``MAX_CANDIDATE_GROUPS`` allows. Up to 12 tasks these are all groups, so that the partition is the best
    one.
    """
    count = len(gains)
    groups = [tuple(range(count))]
    for size in range(1, count):
        if size > 2 and len(groups) + math.comb(count, size) > MAX_CANDIDATE_GROUPS:
            break
        groups += combinations(range(count), size)
    covers = np.zeros((count + 1, len(groups)))  # the last row counts the chosen groups
    for column, group in enumerate(groups):
        covers[[*group, count], column] = 1
    value = np.array([sum(predicted(group, gains)) for group in groups])
    value /= max(np.abs(value).max(), 1e-300)  # the solver's tolerances are absolute
    limits = LinearConstraint(covers, [*[1] * count, 1], [*[1] * count, max_groups or count])
    solution = milp(-value, constraints=limits, integrality=1, bounds=Bounds(0, 1), options={"mip_rel_gap": 0.0})
    return sorted(groups[column] for column in np.flatnonzero(solution.x > 0.5))
