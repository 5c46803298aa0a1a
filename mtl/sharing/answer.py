"""Decide for each task whether sharing helps: paired differences, corrected for the number of comparisons."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mtl.files.formatting import number
from mtl.report.runs import Runs
from mtl.report.statistics import (
    MIN_RUNS,
    Difference,
    Value,
    Values,
    Verdict,
    difference,
    holm,
    percent_gain,
    required_runs,
)

EQUIVALENCE_MARGIN_PERCENT = 1.0  # a task is as good alone if the interval of its gain lies within plus or minus this
MIN_SEM_PERCENT = 1e-9  # gains with a smaller standard error differ by rounding alone
ALONE, TOGETHER, GROUPS = "alone", "together", "groups"


@dataclass(frozen=True)
class SharingGain:
    """The gain of ``task`` in ``setting`` over training alone, in percent of the mean alone; None if undefined.

    ``partners``: the tasks it shares with. ``p``: of the difference, corrected by Holm's method for the number of
    ``comparisons``. ``interval``: at 95 %, not corrected.
    """

    setting: str
    task: str
    partners: tuple[str, ...]
    difference: Difference | None
    p: Value = None
    comparisons: int = 1

    @property
    def mean(self) -> float:
        """The mean gain; -inf if it is undefined for any run."""
        return -math.inf if self.difference is None or self.difference.undefined else self.difference.mean

    @property
    def interval(self) -> tuple[float, float] | None:
        """The confidence interval of the mean; None if undefined."""
        return None if self.difference is None else self.difference.interval

    @property
    def _is_equal(self) -> bool:
        return self.difference is not None and (self.difference.sem or 0.0) < MIN_SEM_PERCENT

    @property
    def verdict(self) -> Verdict:
        """Whether sharing is better than training alone, worse or as good.

        Undecided are gains with a run without a value, gains of too few runs to tell, and gains that are equal in all
        runs, as those of metrics on few test rows: their spread says nothing about other seeds.
        """
        if self.difference is None or self.difference.undefined or self.difference.runs < MIN_RUNS or self._is_equal:
            return Verdict.UNDECIDED
        return self.difference.verdict(self.p, EQUIVALENCE_MARGIN_PERCENT)

    @property
    def advice(self) -> str:
        """A sentence on what would settle an undecided gain: how many seeds, if its true mean is the measured one."""
        if self.difference is None:
            return "the metric of the task alone is 0, or has no value."
        if self.difference.undefined:
            return f"Runs without a value: {self.difference.undefined}."
        if self.difference.runs < MIN_RUNS:
            return f"At least {MIN_RUNS} seeds are needed."
        if self._is_equal:
            return "All seeds give the same: more test rows would tell, not more seeds."
        if not self.difference.mean:
            return "More seeds would tell."
        needed = required_runs(self.mean, self.difference.std, self.comparisons, self.difference.overlap)
        seeds = max(needed, self.difference.runs + 1)
        if seeds <= 100:
            return f"With seeds={seeds} the answer would probably be clear."
        return "More rows would tell, not more seeds." if math.isinf(seeds) else "Over 100 seeds would be needed."

    def corrected(self, choices: int) -> SharingGain:
        """Return the gain of the best of some ``choices``, by Bonferroni's method."""
        p = None if self.p is None else min(1.0, choices * self.p)
        return replace(self, p=p, comparisons=choices * self.comparisons)

    def sentence(self, where: str = "") -> str:
        """Return the answer in words, with the 95 % interval of the gain; ``where``: as in " together with b"."""
        if self.difference is None:
            return f"not decided{where}: {self.advice}"
        interval = ""
        if self.interval:
            interval = f" (95 % interval {' to '.join(number(end, 2, '+') for end in self.interval)} %)"
        mean = self.difference.mean
        size, side = f"{number(abs(mean), 2)} %", "better" if mean > 0 else "worse"
        return {
            Verdict.BETTER: f"better{where} than alone, by {size}{interval}.",
            Verdict.WORSE: f"worse{where} than alone, by {size}{interval}.",
            Verdict.SAME: f"as good{where} as alone{interval}.",
            Verdict.UNDECIDED: f"not decided:{where} {size} {side} than alone, which may be chance{interval}. "
            + self.advice,
        }[self.verdict]

    def __str__(self) -> str:
        if self.difference is None:
            return "undefined"
        sem = "" if self.difference.sem is None else f" ± {number(self.difference.sem, 2)}"
        return f"{number(self.difference.mean, 2, '+')} %{sem}"


def measure_gains(runs: Runs, partners: Mapping[str, Mapping[str, Sequence[str]]], split: str) -> list[SharingGain]:
    """Return the gain of each task in its main metric over the setting ``alone``, corrected together by Holm's method.

    ``partners``: for each other setting, the tasks that each task shares with; a task without any is left out there.
    ``split``: "val" or "test", whose rows are looked at.
    """
    gains = []
    for setting, partners_by_task in partners.items():
        for task, others in partners_by_task.items():
            column = f"{split}/{task}/{runs.main.get(task)}"
            if others:
                higher = runs.is_higher_better(column) is not False
                gain = percent_gain(runs.values(setting, column), runs.values(ALONE, column), higher, runs.overlap)
                gains.append(SharingGain(setting, task, tuple(others), gain, gain.p if gain else None))
    return correct_p_values(gains)


def correct_p_values(gains: Sequence[SharingGain]) -> list[SharingGain]:
    """Correct the p-values of gains for their number, by Holm's method."""
    corrected = holm([gain.p for gain in gains if gain.p is not None])
    p_values, count = iter(corrected), max(len(corrected), 1)
    return [replace(gain, p=None if gain.p is None else next(p_values), comparisons=count) for gain in gains]


def choose_settings(gains: Sequence[SharingGain]) -> dict[str, dict[str, Sequence[str]]]:
    """Return the setting with the largest defined gain of each task, as ``partners`` of ``measure_gains``."""
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
    return [gain.corrected(choices[gain.task]) for gain in measure_gains(runs, choose_settings(validation), "test")]


def describe_task(task: str, shared: Sequence[SharingGain], gated: Sequence[SharingGain], num_tasks: int) -> str:
    """Return the line of a task: whether it is better together with the tasks chosen for it, and what a gate gains.

    ``shared``: the gains on test rows of the settings chosen among all tasks together and groups; ``gated``: among
    gates.
    """
    parts = []
    for gain in (gain for gain in shared if gain.task == task):
        partners = "all others" if len(gain.partners) == num_tasks - 1 > 1 else " and ".join(gain.partners)
        parts.append(gain.sentence(f" together with {partners}"))
    decided = (Verdict.BETTER, Verdict.WORSE)
    gates = [gain for gain in gated if gain.task == task and gain.verdict in decided]
    parts += [gain.sentence(f" {in_words(gain.setting)}") for gain in gates]
    return f"{task}: {' Also '.join(parts) or 'alone; it has no gain in another setting.'}"


def in_words(setting: str) -> str:
    """Return how the tasks are trained in a setting; a gate has its name."""
    names = {ALONE: "each task alone", TOGETHER: "all tasks together", GROUPS: "the tasks in groups"}
    return names.get(setting, f"with the gate {setting}")


def recommend(validation: Mapping[str, Values], test: Mapping[str, Values], overlap: float) -> tuple[str, str]:
    """Return the setting with the largest mean delta-m on ``validation`` rows, if ``test`` rows confirm it, and why.

    They do if it is better than ``alone`` by the t test; otherwise, return ``alone``. Both rows are of the same runs,
    whose luck chooses too, so p is corrected for the number of settings (Bonferroni).
    """
    others = {name: values for name, values in validation.items() if name != ALONE}
    deltas = {name: difference(values, validation[ALONE], 1.0, overlap) for name, values in others.items()}
    candidates = [SharingGain(name, "", (), delta) for name, delta in deltas.items()]
    best = max(candidates, key=lambda gain: gain.mean, default=None)
    if best is None or best.mean <= 0:
        undefined = best is not None and math.isinf(best.mean)
        why = "has a mean over the tasks" if undefined else "is better on validation rows"
        return ALONE, f"No other setting {why}."
    delta = difference(test[best.setting], test[ALONE], 1.0, overlap)
    confirmed = replace(best, difference=delta, p=delta.p if delta else None).corrected(len(candidates))
    why = f"the mean over the tasks is {confirmed.sentence()}"
    if confirmed.verdict == Verdict.BETTER:
        return best.setting, f"On test rows, {why}"
    return ALONE, f"Best on validation rows: {in_words(best.setting)}; but on test rows, {why}"
