"""Decide for each task whether sharing helps: paired differences, corrected for the number of comparisons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mtl.report.runs import Runs
from mtl.report.statistics import SIGNIFICANCE, Difference, Value, Values, difference, runs_to_decide, summarise

CLOSE = 1.0  # percent: a gain whose interval lies within -CLOSE to CLOSE is none
ALONE, TOGETHER, GROUPS = "alone", "together", "groups"
SHARE, NOT, NONE, UNDECIDED = "share", "do not share", "alone is as good", "undecided"


@dataclass(frozen=True)
class Gain:
    """The gain of ``task`` in ``setting`` over training alone, in percent of the mean alone; None if undefined.

    ``mates``: the tasks it shares with. ``p``: of the difference, corrected by Holm's method for the number of
    ``comparisons``. ``interval``: at 95 %, not corrected.
    """

    setting: str
    task: str
    mates: tuple[str, ...]
    found: Difference | None
    p: Value = None
    comparisons: int = 1

    @property
    def mean(self) -> float:
        """The mean gain; -inf if it is undefined for any run."""
        return -math.inf if self.found is None or self.found.undefined else self.found.mean

    @property
    def interval(self) -> tuple[float, float] | None:
        """The confidence interval of the mean; None if undefined."""
        return None if self.found is None else self.found.interval

    @property
    def verdict(self) -> str:
        """One of the four verdicts; runs without a value leave a gain undecided."""
        if self.found is None or self.found.undefined:
            return UNDECIDED
        if self.p is not None and self.p < SIGNIFICANCE:
            return SHARE if self.mean > 0 else NOT
        ends = self.interval
        return NONE if ends and ends[0] > -CLOSE and ends[1] < CLOSE else UNDECIDED

    @property
    def advice(self) -> str:
        """What would settle an undecided gain: how many seeds, if the true gain and deviation are those measured."""
        if self.found is None:
            return "alone has a metric of 0, or no value"
        if self.found.undefined or not self.found.mean or not self.found.error:
            return f"{self.found.undefined} runs have no value" if self.found.undefined else "more seeds would tell"
        seeds = max(runs_to_decide(self.mean, self.found.deviation, self.comparisons), self.found.runs + 1)
        return f"{seeds} seeds would probably tell" if seeds <= 100 else "over 100 seeds needed"

    def __str__(self) -> str:
        if self.found is None:
            return "undefined"
        return f"{self.found.mean:+.2g} %" + ("" if self.found.error is None else f" ± {self.found.error:.2g}")


def gains(runs: Runs, mates: Mapping[str, Mapping[str, Sequence[str]]]) -> list[Gain]:
    """Return the gain of each task in its main metric over the setting ``alone``, corrected together by Holm's method.

    ``mates``: for each other setting the mates of each task. A task without mates in a setting is left out there.
    """
    found = []
    for setting, of_tasks in mates.items():
        for task, others in of_tasks.items():
            column = f"test {task}/{runs.main.get(task)}"
            if others:
                up = runs.is_higher_better(column) is not False
                apart = percent(runs.values(setting, column), runs.values(ALONE, column), up)
                found.append(Gain(setting, task, tuple(others), apart, apart.p if apart else None))
    return holm(found)


def percent(values: Values, alone: Values, higher: bool) -> Difference | None:
    """Return by how much ``values`` are better, in percent of the mean of ``alone``; None if undefined."""
    base, found = summarise(list(alone.values())).mean, difference(values, alone)
    return found.times((100 if higher else -100) / abs(base)) if found and base else None


def holm(found: Sequence[Gain]) -> list[Gain]:
    """Correct p-values for their number: Holm (1979)."""
    order = sorted((g.p, i) for i, g in enumerate(found) if g.p is not None)
    corrected, largest = {}, 0.0
    for rank, (p, index) in enumerate(order):
        largest = max(largest, min(1.0, p * (len(order) - rank)))
        corrected[index] = largest
    return [replace(g, p=corrected.get(i), comparisons=max(len(order), 1)) for i, g in enumerate(found)]


def answer(task: str, shared: Sequence[Gain], gated: Sequence[Gain], everyone: int) -> str:
    """Return the line of a task: with whom it should share and with whom not, what is undecided, what a gate gains.

    ``shared``: the gains of all tasks together, in groups and in pairs; ``gated``: with gates.
    """

    def of(verdict: str, own: Sequence[Gain] = shared) -> list[Gain]:
        return sorted((g for g in own if g.task == task and g.verdict == verdict), key=lambda g: -g.mean)

    def with_mates(g: Gain) -> str:
        return f"with {'all' if len(g.mates) == everyone - 1 > 1 else ' and '.join(g.mates)} ({g}"

    best, worse, same = of(SHARE)[:1], of(NOT), of(NONE)[:1]
    parts = [f"share {with_mates(g)})" for g in best] + [f"do not share {with_mates(g)})" for g in worse]
    if not best:
        parts += [f"alone is as good as {with_mates(g)})" for g in same]
        parts += [f"undecided {with_mates(g)}; {g.advice})" for g in of(UNDECIDED)[: 1 if same or worse else 2]]
    parts += [f"with the gate {g.setting} {g}" for g in of(SHARE, gated) + of(NOT, gated)]
    return f"{task}: {'; '.join(parts) or 'alone'}"


def recommended(deltas: Mapping[str, Values]) -> tuple[str, str]:
    """Return the setting with the largest mean delta-m among those whose delta-m is above that of ``alone``, and why.

    Above: by the t test, corrected by Holm's method for the number of settings. If none is, ``alone``.
    """
    apart = {name: difference(values, deltas[ALONE]) for name, values in deltas.items() if name != ALONE}
    found = holm([Gain(name, "", (), each, each.p if each else None) for name, each in apart.items()])
    ordered = sorted(found, key=lambda g: -g.mean)
    for best in ordered:
        if best.verdict == SHARE:
            return best.setting, f"delta-m {best}"
    why = "no setting is better beyond doubt"
    if ordered and ordered[0].mean > 0:
        why += f"; the best is {ordered[0].setting}, delta-m {ordered[0]}, {ordered[0].advice}"
    return ALONE, why
