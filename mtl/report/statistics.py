"""Means, standard errors and differences of a few numbers, one per run; an undefined number is None or NaN.

Also delta-m, the mean relative gain of a multi-task network over single-task ones (Maninis et al. 2019).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import polars as pl
import scipy  # imports its parts at their first use

from mtl.files.formatting import with_interval
from mtl.training.metrics import higher_is_better

Value = float | None
Values = Mapping[Any, Value]  # of the runs of a setting; runs of two settings with the same key are a pair
SIGNIFICANCE = 0.05  # a difference with a smaller p-value is significant
MIN_RUNS = 3  # pairs of runs of a paired test, and runs of a setting that a verdict needs
POWER = 0.8  # the probability that the difference of `required_runs` runs is significant
DELTA = "delta_m"  # a metric of test and validation, in percent
TITLE = "delta-m, %"
SEEDS = ("seed", "data_seed")  # columns of the table of runs
NOTE = (
    "delta-m: the mean over tasks of the gain in the main metric relative to single_task, in % (Maninis et al. 2019): "
    "to its run of the same seed if every run has one, else to its mean; undefined if its value is 0 or missing."
)


@dataclass(frozen=True)
class Summary:
    """The mean of ``count`` defined values and its standard error; ``undefined`` counts the undefined values.

    ``mean`` is None without defined values, ``sem`` is None with fewer than two. ``overlap``: see ``summarise``.
    """

    mean: Value
    sem: Value
    count: int
    undefined: int = 0
    overlap: float = 0.0

    @property
    def std(self) -> float:
        """The sample deviation; 0 with fewer than two values."""
        return self.sem / math.sqrt(1 / self.count + self.overlap) if self.sem else 0.0


class Verdict(StrEnum):
    """What a difference tells: the first setting is better, worse or as good, or more runs are needed."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "as good"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Difference:
    """How much larger the values of one setting are than those of another.

    ``runs``: of each setting. ``pairs``: of runs, of which the difference is the mean; 0: it is that of the two means.
    ``df``: the degrees of freedom of Student's t test of the pairs, or of Welch's t test without pairs.
    ``std``: of one pair, or of one run of each setting. ``undefined``: the undefined values of both settings.
    ``overlap``: see ``summarise``.
    """

    mean: float
    sem: Value
    runs: int
    pairs: int
    df: float = 0.0
    std: float = 0.0
    undefined: int = 0
    overlap: float = 0.0

    @property
    def p(self) -> Value:
        """The two-sided p-value that the true difference is 0; None if undefined, as for values that do not vary."""
        return float(2 * scipy.stats.t.sf(abs(self.mean) / self.sem, self.df)) if self.sem else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the mean; None if undefined."""
        if self.sem is None:
            return None
        reach = float(scipy.stats.t.isf(SIGNIFICANCE / 2, self.df)) * self.sem if self.sem else 0.0
        return self.mean - reach, self.mean + reach

    def verdict(self, p: Value = None, margin: float = 0.0) -> Verdict:
        """Return the verdict, where positive differences are better; the one rule of tables, claims and ``mtl share``.

        A difference is significant if ``p``, by default its own p-value, is below ``SIGNIFICANCE``, or if ``MIN_RUNS``
        runs do not vary at all, such as a number of parameters. Else, both are as good if the interval lies within
        +-``margin``.
        """
        p, constant = self.p if p is None else p, self.sem == 0 and self.runs >= MIN_RUNS
        if self.mean and (constant if p is None else p < SIGNIFICANCE):
            return Verdict.BETTER if self.mean > 0 else Verdict.WORSE
        ends = self.interval
        return Verdict.SAME if ends and -margin < ends[0] and ends[1] < margin else Verdict.UNDECIDED

    def scaled(self, factor: float) -> Difference:
        """Return the difference in another unit, or of the opposite sign."""
        sem = None if self.sem is None else self.sem * abs(factor)
        return replace(self, mean=self.mean * factor, sem=sem, std=self.std * abs(factor))

    def text(self, unit: str = "", sign: str = "+") -> str:
        """Return the difference with its interval as text; without it if some runs have no value."""
        return with_interval(self.mean, None if self.undefined else self.interval, unit, sign)


def pairing_keys(runs: pl.DataFrame) -> list[tuple[Any, Any]]:
    """Return a key for each row of a table of runs; runs of two settings with the same key are a pair.

    It consists of the seeds of the run and of its data. A run whose seed is unknown, or whose seeds another run of its
    setting and state has too, has no pair, so its key names the setting.
    """
    seeds = [pl.col(name) if name in runs.columns else pl.lit(None).alias(name) for name in SEEDS]
    rows = runs.select("setting", "state", *seeds).rows()
    counts = Counter(rows)
    return [row[2:] if row[2] is not None and counts[row] == 1 else (row[0], number) for number, row in enumerate(rows)]


def defined(values: Iterable[Value]) -> list[float]:
    """Return the finite values."""
    return [float(value) for value in values if value is not None and math.isfinite(value)]


def summarise(values: Sequence[Value], factor: float = 1.0, overlap: float = 0.0) -> Summary:
    """Return the mean of the defined values times ``factor``, and its standard error.

    Its square is the sample variance times 1 / count + ``overlap``: the number of test rows over that of training rows,
    if each value is from a random split of its own, else 0. Such values are not independent, since the splits have most
    training rows in common (Nadeau and Bengio 2003).
    """
    numbers = [factor * value for value in defined(values)]
    mean, count = statistics.fmean(numbers) if numbers else None, len(numbers)
    sem = statistics.stdev(numbers) * math.sqrt(1 / count + overlap) if count > 1 else None
    return Summary(mean, sem, count, len(values) - count, overlap)


def one_sample(values: Summary, mean: float = 0.0) -> Difference | None:
    """Return the difference of values to ``mean``, with Student's t test; None without values.

    The p-value is undefined for fewer than two values, and if they are all equal. ``scipy.stats.ttest_1samp`` warns if
    they are nearly so.
    """
    if values.mean is None:
        return None
    spread = values.sem, values.count, values.count, values.count - 1, values.std
    return Difference(values.mean - mean, *spread, values.undefined, values.overlap)


def required_runs(mean: float, std: float, comparisons: int = 1, overlap: float = 0.0) -> float:
    """Return how many runs make a true difference ``mean`` significant with probability ``POWER``; inf if none do.

    ``std``: of one run, or of one pair of runs; if it is 0, the least number of a test, 2. ``comparisons``: the
    number of p-values that are corrected together. ``overlap``: as in ``summarise``. The t statistic has a noncentral t
    distribution; for samples of unequal variances this is a bound from above.
    """
    level = SIGNIFICANCE / comparisons / 2
    # With a known deviation; Student's t needs z^2 / 2 more (Guenther 1981), which is exact enough from 1,000 on
    runs = ((scipy.stats.norm.isf(level) + scipy.stats.norm.ppf(POWER)) * std / mean) ** 2
    if runs * overlap >= 1:
        return math.inf
    runs /= 1 - runs * overlap
    if runs > 1000:
        return math.ceil(runs + scipy.stats.norm.isf(level) ** 2 / 2)
    count = max(2, math.ceil(runs))
    while std and _power(abs(mean) / std / math.sqrt(1 / count + overlap), count, level) < POWER:
        count += 1
    return count


def _power(effect: float, runs: int, level: float) -> float:
    """Return the probability that Student's test is significant with the sign of ``effect``, in standard errors."""
    return float(scipy.stats.nct.sf(scipy.stats.t.isf(level, runs - 1), runs - 1, effect))


def difference(values: Values, others: Values, factor: float = 1.0, overlap: float = 0.0) -> Difference | None:
    """Compare ``values`` with ``others`` times ``factor``; None if a setting has no value.

    ``overlap``: as in ``summarise``. If at least ``MIN_RUNS`` runs are pairs, the difference is that of the pairs,
    since both runs of a pair start from the same state and see the same rows in the same order. Otherwise it is the
    difference of the two means.
    """
    mine, theirs = (summarise(list(sample.values()), by, overlap) for sample, by in ((values, 1.0), (others, factor)))
    if mine.mean is None or theirs.mean is None:
        return None
    undefined = mine.undefined + theirs.undefined
    pairs = [(value, others[run]) for run, value in values.items() if run in others]
    paired = summarise([a - factor * b for a, b in pairs if a is not None and b is not None], 1.0, overlap)
    if paired.count >= MIN_RUNS:
        return one_sample(replace(paired, undefined=undefined))
    mean, std = mine.mean - theirs.mean, math.hypot(mine.std, theirs.std)
    runs = min(mine.count, theirs.count)
    if mine.sem is None or theirs.sem is None:
        return Difference(mean, None, runs, 0, 0.0, std, undefined, overlap)
    sem = math.hypot(mine.sem, theirs.sem)
    fractions = [(summary.sem or 0.0) / sem for summary in (mine, theirs)] if sem else [1.0, 1.0]
    # Welch (1947), since the variances may differ
    df = 1 / sum(part**4 / (summary.count - 1) for part, summary in zip(fractions, (mine, theirs), strict=True))
    return Difference(mean, sem, runs, 0, df, std, undefined, overlap)


def percent_gain(values: Values, reference: Values, higher: bool, overlap: float = 0.0) -> Difference | None:
    """Return by how much ``values`` are better than those of ``reference``, in percent of the mean of the latter.

    None if a setting has no value, or if that mean is 0. ``higher``: whether higher values are better.
    """
    base, delta = summarise(list(reference.values())).mean, difference(values, reference, 1.0, overlap)
    return delta.scaled((100 if higher else -100) / abs(base)) if delta and base else None


def gain(value: Value, single: Value, higher: bool) -> float:
    """Return by how much ``value`` is better than ``single``, in percent of it; NaN if undefined."""
    if len(defined((value, single))) < 2 or not single or value is None:
        return math.nan
    return 100 * (1 if higher else -1) * (value - single) / abs(single)


def delta_m(values: Sequence[Value], singles: Sequence[Value], higher: Sequence[bool]) -> float:
    """Return the mean over tasks of ``gain``, equation 3 of Maninis et al. 2019; NaN if undefined for any task."""
    gains = [gain(*task) for task in zip(values, singles, higher, strict=True)]
    return sum(gains) / len(gains) if gains else math.nan


def with_delta(
    table: pl.DataFrame, data: Sequence[str], single: Sequence[bool], main: Mapping[str, str], split: str = "test"
) -> pl.DataFrame:
    """Add the column ``SPLIT/delta_m`` if there is a finished single-task run; null for data without one.

    ``split``: "test" or "val". ``data``, ``single``: of each row, the name of its data and whether its network is
    single_task. If several settings are single_task, runs are compared with the first. If it has a pair for every run,
    each run is compared with its pair, and the values include the spread of both. Otherwise all runs, those of
    single_task too, are compared with its mean, and its spread appears in its own values.
    """
    directions = {f"{split}/{task}/{metric}": higher_is_better(metric) for task, metric in main.items()}
    columns = {name: up for name, up in directions.items() if name in table.columns and up is not None}
    done = table.with_columns(pl.Series("data", data), pl.Series("single", single)).filter(state="finished")
    deltas: dict[str, float] = {}
    for rows in done.partition_by("data"):
        alone = rows.filter("single")
        bases = alone.filter(pl.col("setting") == pl.first("setting"))
        base, runs = dict(zip(pairing_keys(bases), bases.iter_rows(named=True), strict=True)), pairing_keys(rows)
        means = {name: summarise(bases[name].to_list()).mean for name in columns}
        for key, row in zip(runs, rows.iter_rows(named=True), strict=True) if base else ():
            recorded = {name: up for name, up in columns.items() if row[name] is not None}
            singles = base[key] if base.keys() >= set(runs) else means
            if recorded:
                values, others = ([source[name] for name in recorded] for source in (row, singles))
                deltas[row["run"]] = delta_m(values, others, list(recorded.values()))
    if not deltas:
        return table
    return table.with_columns(pl.Series(f"{split}/{DELTA}", [deltas.get(run) for run in table["run"]], pl.Float64))


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values, in the order given, corrected for their number (Holm 1979)."""
    corrected, largest = [0.0] * len(values), 0.0
    for rank, (p, index) in enumerate(sorted(zip(values, range(len(values)), strict=True))):
        largest = corrected[index] = max(largest, min(1.0, p * (len(values) - rank)))
    return corrected
