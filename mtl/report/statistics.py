"""Means, standard errors and differences of a few numbers, one per run; an undefined number is None or NaN.

Also delta-m, the mean relative gain of a multi-task network over single-task ones (Maninis et al. 2019).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import polars as pl
from scipy.stats import nct as noncentral
from scipy.stats import norm, ttest_ind_from_stats
from scipy.stats import t as student

Value = float | None
SIGNIFICANCE = 0.05  # a difference with a smaller p-value gets an asterisk
POWER = 0.8  # the probability that the difference of `runs_to_decide` runs is significant
DELTA = "delta_m"  # column of the table of runs, in percent
TITLE = "delta-m, %"
NOTE = (
    "delta-m: the mean over tasks of the gain in the main metric relative to single_task, in % (Maninis et al. 2019), "
    "by runs of the same seed where there are any; undefined if a value of single_task is 0 or missing."
)


@dataclass(frozen=True)
class Summary:
    """The mean of ``count`` defined values and its standard error; ``undefined`` counts the undefined values.

    ``mean`` is None without defined values, ``error`` is None with fewer than two.
    """

    mean: Value
    error: Value
    count: int
    undefined: int = 0

    @property
    def deviation(self) -> float:
        """The sample deviation; 0 with fewer than two values."""
        return (self.error or 0.0) * math.sqrt(self.count)


@dataclass(frozen=True)
class Difference:
    """How much larger the values of one setting are than those of another.

    ``pairs``: the number of pairs of runs with the same seed that the difference is a mean of; 0 if it is the
    difference of the two means. ``p``: the two-sided p-value of Student's t test of the pairs, or of Welch's t test
    without pairs; None if undefined. ``deviation``: of one pair, or of one run of each setting.
    """

    mean: float
    error: Value
    pairs: int
    p: Value
    deviation: float = 0.0


def defined(values: Iterable[Value]) -> list[float]:
    """Return the finite values."""
    return [float(value) for value in values if value is not None and math.isfinite(value)]


def summarise(values: Sequence[Value]) -> Summary:
    """Return the mean of the defined values, and its standard error, the sample deviation over sqrt(count)."""
    numbers = defined(values)
    mean = statistics.fmean(numbers) if numbers else None
    error = statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else None
    return Summary(mean, error, len(numbers), len(values) - len(numbers))


def welch(values: Sequence[Value], others: Sequence[Value]) -> Value:
    """Return the two-sided p-value of Welch's t test, which does not assume equal variances, that the means are equal.

    None if a sample has fewer than two values, or if neither varies.
    """
    first, second = defined(values), defined(others)
    if min(len(first), len(second)) < 2 or (len(set(first)) == 1 and len(set(second)) == 1):
        return None
    # ttest_ind computes the deviations itself, and warns if one of them is 0
    sizes = [(statistics.fmean(each), statistics.stdev(each), len(each)) for each in (first, second)]
    return float(ttest_ind_from_stats(*sizes[0], *sizes[1], equal_var=False).pvalue)


def one_sample(values: Summary, mean: float = 0.0) -> Value:
    """Return the two-sided p-value of Student's t test that the true mean is ``mean``; None if undefined.

    It is undefined for fewer than two values, and if they are all equal. ``scipy.stats.ttest_1samp`` warns if they are
    nearly so.
    """
    if values.mean is None or not values.error:
        return None
    return float(2 * student.sf(abs(values.mean - mean) / values.error, values.count - 1))


def runs_to_decide(mean: float, deviation: float, comparisons: int = 1) -> int:
    """Return how many runs make a true difference ``mean`` significant with probability ``POWER``.

    ``deviation``: of one run, or of one pair of runs; if it is 0, the least number of a test, 2. ``comparisons``: the
    number of p-values that are corrected together. The t statistic has a noncentral t distribution; for samples of
    unequal variances this is a bound from above.
    """
    level = SIGNIFICANCE / comparisons / 2
    # With a known deviation; Student's t needs z^2 / 2 more (Guenther 1981), which is exact enough from 1,000 on
    runs = ((norm.isf(level) + norm.ppf(POWER)) * deviation / mean) ** 2
    if runs > 1000:
        return math.ceil(runs + norm.isf(level) ** 2 / 2)
    count = max(2, math.ceil(runs))
    while deviation and _power(abs(mean) / deviation, count, level) < POWER:
        count += 1
    return count


def _power(effect: float, runs: int, level: float) -> float:
    """Return the probability that Student's test of ``runs`` is significant with the sign of the true ``effect``."""
    return float(noncentral.sf(student.isf(level, runs - 1), runs - 1, effect * math.sqrt(runs)))


def difference(values: Mapping[int, Value], others: Mapping[int, Value], fewest: int = 1) -> Difference | None:
    """Compare two settings, given the values of their runs by seed; None if one of them has no value.

    If at least ``fewest`` runs share seeds, the difference and its standard error are those of pairs of equal seed,
    since both runs of a pair start from the same state and see rows in the same order. Otherwise it is the difference
    of the two means.
    """
    mine, theirs = summarise(list(values.values())), summarise(list(others.values()))
    if mine.mean is None or theirs.mean is None:
        return None
    pairs = [(value, others[seed]) for seed, value in values.items() if seed in others]
    apart = defined(a - b for a, b in pairs if a is not None and b is not None)
    paired = summarise(apart)
    if paired.mean is not None and paired.count >= fewest:
        return Difference(paired.mean, paired.error, paired.count, one_sample(paired), paired.deviation)
    errors = mine.error, theirs.error
    error = None if None in errors else math.hypot(*(e for e in errors if e is not None))
    p, deviation = welch(list(values.values()), list(others.values())), math.hypot(mine.deviation, theirs.deviation)
    return Difference(mine.mean - theirs.mean, error, 0, p, deviation)


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
    table: pl.DataFrame,
    data: Sequence[str],
    single: Sequence[bool],
    main: Mapping[str, str],
    higher: Mapping[str, bool],
) -> pl.DataFrame:
    """Add the column ``delta_m`` if there is a finished single-task run; null for data without one.

    ``data``, ``single``: of each row, the name of its data and whether its network is single_task. If several
    settings are single_task, runs are compared with the first.
    """
    columns = {f"test {task}/{metric}": higher[metric] for task, metric in main.items() if metric in higher}
    columns = {name: up for name, up in columns.items() if name in table.columns}
    done = table.with_columns(pl.Series("data", data), pl.Series("single", single)).filter(state="finished")
    found: dict[str, float] = {}
    for rows in done.partition_by("data"):
        alone = rows.filter("single")
        bases = alone.filter(pl.col("setting") == pl.first("setting"))
        for row in rows.iter_rows(named=True) if len(bases) else ():
            known = {name: up for name, up in columns.items() if row[name] is not None}
            same = bases.filter(pl.col("seed") == pl.lit(row["seed"]))
            singles = [summarise((same if len(same) else bases)[name].to_list()).mean for name in known]
            if known:
                found[row["run"]] = delta_m([row[name] for name in known], singles, list(known.values()))
    if not found:
        return table
    return table.with_columns(pl.Series(DELTA, [found.get(run) for run in table["run"]], pl.Float64))
