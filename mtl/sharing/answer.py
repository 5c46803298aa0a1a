"""Decide for each task whether sharing helps: paired differences, corrected for the number of comparisons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.stats import t as student

from mtl.report.delta import gain
from mtl.report.statistics import SIGNIFICANCE, Summary, Value, one_sample, runs_to_decide, summarise

CLOSE = 1.0  # percent: a gain whose interval lies within -CLOSE to CLOSE is none
MOST_SEEDS = 100
ALONE, TOGETHER, GROUPS = "alone", "together", "groups"
SHARE, NOT, NONE, UNDECIDED = "share", "do not share", "alone is as good", "undecided"


@dataclass(frozen=True)
class Gain:
    """The gain of ``task`` in ``setting`` over training alone, in percent, over pairs of runs of the same seed.

    ``mates``: the tasks it shares with. ``p``: of Student's paired t test, corrected by Holm's method for all gains of
    the same kind. ``interval``: at 95 %, not corrected.
    """

    setting: str
    task: str
    mates: tuple[str, ...]
    found: Summary
    p: Value = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Student's confidence interval of the mean; None if undefined."""
        if self.found.mean is None or self.found.error is None:
            return None
        reach = float(student.ppf(0.975, self.found.count - 1)) * self.found.error
        return self.found.mean - reach, self.found.mean + reach

    @property
    def verdict(self) -> str:
        """One of the four verdicts."""
        if self.p is not None and self.p < SIGNIFICANCE:
            return SHARE if (self.found.mean or 0) > 0 else NOT
        ends = self.interval
        return NONE if ends and ends[0] > -CLOSE and ends[1] < CLOSE else UNDECIDED

    @property
    def seeds_needed(self) -> int | None:
        """How many seeds would probably decide, if the true gain and deviation are those measured; None if too many."""
        if not self.found.mean or not self.found.error:
            return None
        wanted = runs_to_decide(self.found.mean, self.found.error * math.sqrt(self.found.count)) + 2  # 2: for Student's
        return max(wanted, self.found.count + 1) if wanted <= MOST_SEEDS else None

    @property
    def advice(self) -> str:
        """What would settle an undecided gain."""
        more = self.seeds_needed
        return f"{more} seeds would probably tell" if more else f"over {MOST_SEEDS} seeds needed"

    def text(self) -> str:
        """Return the gain and its standard error."""
        error = "" if self.found.error is None else f" ± {self.found.error:.2g}"
        return "undefined" if self.found.mean is None else f"{self.found.mean:+.2g} %{error}"


Values = Mapping[str, Mapping[int, Value]]  # of one setting: by task and seed


def gains(settings: Mapping[str, tuple[Values, Mapping[str, Sequence[str]]]], higher: Mapping[str, bool]) -> list[Gain]:
    """Return the gain of each task in each setting over the setting ``alone``, corrected together by Holm's method.

    ``settings``: of each, the values of the main metrics, and the mates of each task. ``higher``: of each task, whether
    higher values are better. Tasks that share with none in a setting are left out there.
    """
    alone, found = settings[ALONE][0], []
    for setting, (values, mates) in settings.items():
        for task, up in higher.items():
            if setting != ALONE and mates[task]:
                pairs = [(value, alone[task].get(seed)) for seed, value in sorted(values[task].items())]
                summary = summarise([gain(value, single, up) for value, single in pairs])
                found.append(Gain(setting, task, tuple(mates[task]), summary, one_sample(summary)))
    return holm(found)


def holm(found: Sequence[Gain]) -> list[Gain]:
    """Correct p-values for their number: Holm (1979)."""
    order = sorted((g.p, i) for i, g in enumerate(found) if g.p is not None)
    corrected, largest = {}, 0.0
    for rank, (p, index) in enumerate(order):
        largest = max(largest, min(1.0, p * (len(order) - rank)))
        corrected[index] = largest
    return [Gain(g.setting, g.task, g.mates, g.found, corrected.get(i)) for i, g in enumerate(found)]


def answer(task: str, shared: Sequence[Gain], gated: Sequence[Gain], pairs: Sequence[Gain], everyone: int) -> str:
    """Return the line of a task: with whom it should share and with whom not, what is undecided, what a gate gains."""

    def named(g: Gain) -> str:
        return "all" if len(g.mates) == everyone - 1 > 1 else " and ".join(g.mates)

    parts, own = [], [g for g in (*shared, *pairs) if g.task == task]
    best = sorted((g for g in own if g.verdict == SHARE), key=lambda g: -(g.found.mean or 0))
    worse = [g for g in own if g.verdict == NOT]
    parts += [f"share with {named(g)} ({g.text()})" for g in best[:1]]
    parts += [f"do not share with {named(g)} ({g.text()})" for g in worse]
    if not best:
        same = [g for g in own if g.verdict == NONE]
        parts += ["alone is as good" + "".join(f" as with {named(g)} ({g.text()})" for g in same[:1])] if same else []
        for g in [g for g in own if g.verdict == UNDECIDED][: 1 if same or worse else 2]:
            parts.append(f"undecided with {named(g)} ({g.text()}; {g.advice})")
    parts += [f"with the gate {g.setting} {g.text()}" for g in gated if g.task == task and g.verdict in (SHARE, NOT)]
    return f"{task}: {'; '.join(parts) or 'alone'}"


def recommended(deltas: Mapping[str, Sequence[Value]]) -> tuple[str, str]:
    """Return the setting with the largest mean delta-m among those whose delta-m is above 0, else ``alone``, and why.

    Above 0: by Student's t test over seeds, corrected by Holm's method for the number of settings.
    """
    summaries = {name: summarise(values) for name, values in deltas.items() if name != ALONE}
    found = holm([Gain(name, "", (), each, one_sample(each)) for name, each in summaries.items()])
    ordered = sorted(found, key=lambda g: -(g.found.mean if g.found.mean is not None else -math.inf))
    good = [g for g in ordered if g.verdict == SHARE]
    if good:
        return good[0].setting, f"delta-m {good[0].text()}"
    why = "no setting is better beyond doubt"
    if ordered and (ordered[0].found.mean or 0) > 0:
        why += f"; the best is {ordered[0].setting}, delta-m {ordered[0].text()}, {ordered[0].advice}"
    return ALONE, why
