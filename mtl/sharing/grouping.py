"""Choose groups of tasks by the gains that pairs predict, and rounds of pairs that measure all pairs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

EXACT = 12  # tasks up to which all partitions are compared
MOST = 5_000  # candidate groups of a larger number of tasks
Group = tuple[int, ...]


def predicted(group: Iterable[int], gains: np.ndarray) -> dict[int, float]:
    """Return for each task of a group the mean gain from its mates, 0 if it is alone (Standley et al. 2020, TAG).

    ``gains [T, T]``: the gain of the column's task from sharing with the row's; an undefined one counts 0.
    """
    members = list(group)
    mates = {task: [np.nan_to_num(gains[other, task]) for other in members if other != task] for task in members}
    return {task: float(np.mean(values)) if values else 0.0 for task, values in mates.items()}


def partition(gains: np.ndarray, most: int | None = None) -> list[Group]:
    """Return the partition into at most ``most`` groups with the largest sum of predicted gains of all tasks.

    Up to 12 tasks, all partitions count. Beyond, an integer program chooses among all groups of up to m tasks, m as
    large as ``MOST`` such groups allow, and the group of all.
    """
    count = len(gains)
    most = min(most or count, count)
    if count > EXACT:
        return _by_program(gains, most)
    values = [0.0] * (1 << count)
    for mask in range(1, 1 << count):
        values[mask] = sum(predicted(_members(mask), gains).values())
    best: dict[tuple[int, int], tuple[float, Group]] = {(0, groups): (0.0, ()) for groups in range(most + 1)}
    for mask in range(1, 1 << count):
        first, rest = mask & -mask, mask & (mask - 1)
        parts = [rest]  # all subsets of the other tasks: the mates of the first task
        while parts[-1]:
            parts.append((parts[-1] - 1) & rest)
        for groups in range(1, most + 1):
            before = [(part, best[mask ^ first ^ part, groups - 1]) for part in parts if groups > 1 or part == rest]
            chosen = [(value + values[first | part], (*others, first | part)) for part, (value, others) in before]
            best[mask, groups] = max(chosen, key=lambda each: each[0])
    return sorted(_members(mask) for mask in best[(1 << count) - 1, most][1])


def _members(mask: int) -> Group:
    return tuple(task for task in range(mask.bit_length()) if mask >> task & 1)


def _by_program(gains: np.ndarray, most: int) -> list[Group]:
    count, candidates = len(gains), [tuple(range(len(gains)))]
    for size in range(1, count):
        if len(candidates) + math.comb(count, size) > MOST and size > 2:
            break
        candidates += combinations(range(count), size)
    covers = np.zeros((count + 1, len(candidates)))
    for column, group in enumerate(candidates):
        covers[[*group, count], column] = 1
    value = [-sum(predicted(group, gains).values()) for group in candidates]
    limits = LinearConstraint(covers, [*[1] * count, 1], [*[1] * count, most])
    found = milp(value, constraints=limits, integrality=np.ones(len(value)), bounds=Bounds(0, 1))
    return sorted(candidates[column] for column in np.flatnonzero(found.x > 0.5))


def rounds_of_pairs(affinity: np.ndarray) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs such that each pair of the T tasks is in one round.

    One run trains all pairs of a round. By the circle method T tasks take T - 1 rounds, or T if T is odd. The rounds
    whose pairs have the largest mean ``affinity [T, T]`` come first.
    """
    tasks, weight = len(affinity), np.nan_to_num(affinity + affinity.T)
    ring = [*range(tasks), *([-1] if tasks % 2 else [])]
    rounds = []
    for _ in range(len(ring) - 1):
        pairs = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return sorted(rounds, key=lambda pairs: -np.mean([weight[pair] for pair in pairs]))
