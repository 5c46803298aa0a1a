"""Decide for each task whether sharing helps: paired differences, corrected for the number of comparisons."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mtl.files.formatting import number
from mtl.report.runs import Runs
from mtl.report.statistics import (
    FEWEST,
    Difference,
    Outcome,
    Value,
    Values,
    difference,
    holm,
    required_runs,
    summarise,
)

CLOSE = 1.0  # percent: a gain whose interval lies within -CLOSE to CLOSE is none
EQUAL = 1e-9  # percent: gains with a smaller standard error differ by rounding alone
ALONE, TOGETHER, GROUPS = "alone", "together", "groups"
SHARE, NOT, NONE, UNDECIDED = "share", "do not share", "alone is as good", "undecided"
VERDICTS = {Outcome.BETTER: SHARE, Outcome.WORSE: NOT, Outcome.SAME: NONE, Outcome.OPEN: UNDECIDED}


@dataclass(frozen=True)
class SharingGain:
    """The gain of ``task`` in ``setting`` over training alone, in percent of the mean alone; None if undefined.

    ``partners``: the tasks it shares with. ``p``: of the difference, corrected by Holm's method for the number of
    ``comparisons``. ``interval``: at 95 %, not corrected.
    """

    setting: str
    task: str
    partners: tuple[str, ...]
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
    def _is_equal(self) -> bool:
        return self.found is not None and (self.found.error or 0.0) < EQUAL

    @property
    def verdict(self) -> str:
        """One of the four verdicts.

        Undecided are gains with a run without a value, gains of too few runs to tell, and gains that are equal in all
        runs, as those of metrics on few test rows: their spread says nothing about other seeds.
        """
        if self.found is None or self.found.undefined or self.found.runs < FEWEST or self._is_equal:
            return UNDECIDED
        return VERDICTS[self.found.outcome(self.p, CLOSE)]

    @property
    def advice(self) -> str:
        """What would settle an undecided gain: how many seeds, if the true gain and deviation are those measured."""
        if self.found is None:
            return "alone has a metric of 0, or no value"
        if self.found.undefined:
            return f"{self.found.undefined} runs have no value"
        if self.found.runs < FEWEST:
            return f"at least {FEWEST} seeds are needed"
        if self._is_equal:
            return "equal in all seeds: more test rows would tell, not more seeds"
        if not self.found.mean:
            return "more seeds would tell"
        needed = required_runs(self.mean, self.found.std, self.comparisons, self.found.overlap)
        seeds = max(needed, self.found.runs + 1)
        few = "more rows would tell, not more seeds" if math.isinf(seeds) else "over 100 seeds needed"
        return f"{seeds} seeds would probably tell" if seeds <= 100 else few

    def __str__(self) -> str:
        if self.found is None:
            return "undefined"
        error = "" if self.found.error is None else f" ± {number(self.found.error, 2)}"
        return f"{number(self.found.mean, 2, '+')} %{error}"


def gains(runs: Runs, partners: Mapping[str, Mapping[str, Sequence[str]]], split: str) -> list[SharingGain]:
    """Return the gain of each task in its main metric over the setting ``alone``, corrected together by Holm's method.

    ``partners``: for each other setting, the tasks that each task shares with; a task without any is left out there.
    ``split``: "val" or "test", whose rows are looked at.
    """
    uncorrected = []
    for setting, of_tasks in partners.items():
        for task, others in of_tasks.items():
            column = f"{split}/{task}/{runs.main.get(task)}"
            if others:
                up = runs.is_higher_better(column) is not False
                apart = percent(runs.values(setting, column), runs.values(ALONE, column), up, runs.overlap)
                uncorrected.append(SharingGain(setting, task, tuple(others), apart, apart.p if apart else None))
    return corrected(uncorrected)


def corrected(gains: Sequence[SharingGain]) -> list[SharingGain]:
    """Correct the p-values of gains for their number."""
    p_values = holm([gain.p for gain in gains if gain.p is not None])
    values, count = iter(p_values), max(len(p_values), 1)
    return [replace(gain, p=None if gain.p is None else next(values), comparisons=count) for gain in gains]


def chosen(gains: Sequence[SharingGain]) -> dict[str, dict[str, Sequence[str]]]:
    """Return, as ``partners`` of ``gains``, the setting with the largest gain of each task, if one is defined."""
    best: dict[str, SharingGain] = {}
    for gain in gains:
        if gain.mean > (best[gain.task].mean if gain.task in best else -math.inf):
            best[gain.task] = gain
    partners: dict[str, dict[str, Sequence[str]]] = {}
    for gain in best.values():
        partners.setdefault(gain.setting, {})[gain.task] = gain.partners
    return partners


def confirm(runs: Runs, validation: Sequence[SharingGain]) -> list[SharingGain]:
    """Return the gains on test rows of the settings that the gains on ``validation`` rows choose.

    Both rows are of the same runs, whose luck chooses too, so each p-value is multiplied by the number of settings that
    its task could choose from (Bonferroni).
    """
    choices = Counter(gain.task for gain in validation)
    return [
        replace(
            gain,
            p=None if gain.p is None else min(1.0, choices[gain.task] * gain.p),
            comparisons=choices[gain.task] * gain.comparisons,
        )
        for gain in gains(runs, chosen(validation), "test")
    ]


def percent(values: Values, alone: Values, higher: bool, overlap: float) -> Difference | None:
    """Return by how much ``values`` are better, in percent of the mean of ``alone``; None if undefined."""
    base, delta = summarise(list(alone.values())).mean, difference(values, alone, 1.0, overlap)
    return delta.times((100 if higher else -100) / abs(base)) if delta and base else None


def answer(task: str, shared: Sequence[SharingGain], gated: Sequence[SharingGain], everyone: int) -> str:
    """Return the line of a task: whether it should share with the tasks that were chosen for it, what a gate gains.

    ``shared``: the gains on test rows of the settings chosen among all tasks together, groups and pairs; ``gated``:
    among gates.
    """
    parts = []
    for gain in (gain for gain in shared if gain.task == task):
        partners = "all" if len(gain.partners) == everyone - 1 > 1 else " and ".join(gain.partners)
        advice = f"; {gain.advice}" if gain.verdict == UNDECIDED else ""
        word = "alone is as good as" if gain.verdict == NONE else gain.verdict
        parts.append(f"{word} with {partners} ({gain}{advice})")
    parts += [f"with the gate {g.setting} {g}" for g in gated if g.task == task and g.verdict in (SHARE, NOT)]
    return f"{task}: {'; '.join(parts) or 'alone'}"


def recommended(validation: Mapping[str, Values], test: Mapping[str, Values], overlap: float) -> tuple[str, str]:
    """Return the setting with the largest mean delta-m on ``validation`` rows, if ``test`` rows confirm it, and why.

    They do if it is better than ``alone`` by the t test; otherwise, return ``alone``. Both rows are of the same runs,
    whose luck chooses too, so p is corrected for the number of settings (Bonferroni).
    """
    candidates = [
        SharingGain(name, "", (), difference(values, validation[ALONE], 1.0, overlap))
        for name, values in validation.items()
        if name != ALONE
    ]
    best = max(candidates, key=lambda gain: gain.mean, default=None)
    if best is None or best.mean <= 0:
        undefined = best is not None and math.isinf(best.mean)
        return ALONE, "delta-m is undefined" if undefined else "no setting is better on validation rows"
    apart = difference(test[best.setting], test[ALONE], 1.0, overlap)
    p = None if apart is None or apart.p is None else min(1.0, apart.p * len(candidates))
    confirmed = replace(best, found=apart, p=p, comparisons=len(candidates))
    if confirmed.verdict == SHARE:
        return best.setting, f"delta-m {confirmed}"
    why = f"; {confirmed.advice}" if confirmed.verdict == UNDECIDED else ""
    return ALONE, f"{best.setting}, the best on validation rows: {confirmed.verdict}, delta-m {confirmed}{why}"
