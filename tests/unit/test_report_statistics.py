"""Means, errors, differences and p-values, against values by hand and scipy's."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
from scipy.stats import sem, ttest_ind, ttest_rel

from mtl.report.statistics import Difference, Summary, difference, interval, summarise, welch

SAMPLES = [([0.2, 0.5, 0.9], [1.0, 0.7, 1.4]), ([3.0, 3.5], [3.1, 9.0, 2.0, 2.5]), ([1.0, 1.0], [2.0, 3.0])]


@pytest.mark.parametrize(("values", "others"), SAMPLES)
def test_agreement_with_scipy(values: list[float], others: list[float]) -> None:
    found = summarise(others)
    assert found.mean == pytest.approx(sum(others) / len(others))
    assert found.error == pytest.approx(sem(others))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a sample that does not vary
        expected = ttest_ind(values, others, equal_var=False).pvalue
    assert welch(values, others) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("values", "summary"),
    [
        ([], Summary(None, None, 0)),
        ([2.0], Summary(2.0, None, 1)),
        ([2.0, 2.0], Summary(2.0, 0.0, 2)),
        ([1.0, None, 3.0], Summary(2.0, 1.0, 2, undefined=1)),
        ([math.nan, math.inf, 5.0], Summary(5.0, None, 1, undefined=2)),
        ([None], Summary(None, None, 0, undefined=1)),
    ],
)
def test_summary_counts_what_is_undefined(values: list[float | None], summary: Summary) -> None:
    assert summarise(values) == summary


@pytest.mark.parametrize("others", [[], [1.0], [2.0, 2.0], [None, 1.0]])
def test_no_test_without_spread(others: list[float | None]) -> None:
    assert welch([3.0, 3.0], others) is None


def test_differences_are_between_runs_of_one_seed() -> None:
    mine, theirs = {1: 3.0, 2: 5.0, 3: None, 4: 9.0}, {1: 1.0, 2: 4.0, 3: 7.0, 5: 0.0}
    p = ttest_rel([3.0, 5.0], [1.0, 4.0]).pvalue
    assert difference(mine, theirs) == Difference(1.5, 0.5, 2, pytest.approx(p), pytest.approx(0.5**0.5))  # of 2 and 1
    assert difference({1: 3.0, 2: 5.0}, {1: 2.0, 2: 4.0}) == Difference(1.0, 0.0, 2, None)  # equal differences
    assert difference({1: 3.0, 2: 5.0}, {1: 2.0, 3: 4.0}) == Difference(1.0, None, 1, None)  # one pair


def test_difference_without_common_seeds_is_that_of_the_means() -> None:
    found = difference({1: 3.0, 2: 5.0}, {3: 1.0, 4: 4.0})
    assert found is not None
    assert (found.mean, found.pairs) == (1.5, 0)
    assert found.error == pytest.approx(math.sqrt(1.0 + 2.25))
    assert found.p == pytest.approx(ttest_ind([3.0, 5.0], [1.0, 4.0], equal_var=False).pvalue)
    assert difference({1: 3.0}, {3: 1.0}) == Difference(2.0, None, 0, None)
    assert difference({1: None}, {1: 1.0}) is None
    assert difference({1: 1.0}, {}) is None


def test_bootstrap_interval_against_all_resamples() -> None:
    values = [1.0, 2.0, 4.0, 8.0]
    means = [sum(each) / 4 for each in itertools.product(values, repeat=4)]  # the distribution that resamples draw from
    low, high = np.quantile(means, [0.05, 0.95])
    found = interval(values, level=0.9, resamples=20000)
    assert found == pytest.approx((low, high), abs=0.26)  # means are quarters: at most one step
