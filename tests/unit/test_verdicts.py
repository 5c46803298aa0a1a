"""Verdicts on claims: cases made by hand, scipy's tests, and simulated runs whose truth is known."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_1samp, ttest_ind, ttest_rel

from mtl.paper.definition import Claim
from mtl.paper.verdicts import BINARY, RESAMPLES, ClaimStatus, judge, judge_search, required_seeds
from mtl.report.statistics import MIN_RUNS, POWER, SIGNIFICANCE
from tests.conftest import ROOT

HOLDS, NOT_RUN, UNDECIDED, CONTRADICTED = ClaimStatus
RULES = (ROOT / "benchmarks" / "accuracy" / "rules.md").read_text()
NAMES = {"a": "A", "b": "B", "c": "C"}


def verdict(values: dict[str, list[float | None]], paired: bool = True, **claim: Any) -> tuple[ClaimStatus, str]:
    """Judge a claim on the method a; unpaired methods have no seed in common."""
    than = claim.pop("than", ["b"])
    starts = range(0, 10_000 * len(values), 10_000) if not paired else [0] * len(values)
    by_seed = {key: dict(enumerate(row, start)) for (key, row), start in zip(values.items(), starts, strict=True)}
    found = judge(Claim(text="t", group="g", column="c", method="a", than=than, **claim), by_seed, NAMES)
    return found.verdict, found.reason


LOW, HIGH, OTHER = [1.0, 1.1, 0.9], [2.0, 2.15, 1.9], [1.02, 1.05, 0.97]
ENDS = -np.array(ttest_rel(LOW, HIGH).confidence_interval(0.95))[::-1] / np.mean(HIGH) * 100
THREE: list[float | None] = [1.0, 1.1, 1.2]
NAN = math.nan
UP: dict[str, Any] = {"higher": True}
BOTH = {"than": ["b", "c"]}


@pytest.mark.parametrize(
    ("values", "claim", "expected", "reason"),
    [
        # a significant difference of the right sign holds, also between two columns of the gate
        ({"a": HIGH, "x": LOW}, UP | {"than": [], "other": "x"}, HOLDS, None),
        ({"a": HIGH}, {"than": [], "other": "x"}, NOT_RUN, "3 runs against 0 runs of x"),
        (
            {"a": LOW, "b": HIGH},
            {},
            HOLDS,
            f"+50.4 [{ENDS[0]:.1f}, {ENDS[1]:.1f}] against B",
        ),
        ({"a": HIGH, "b": LOW}, UP, HOLDS, None),
        # the opposite, if significant, contradicts the claim
        ({"a": HIGH, "b": LOW}, {}, CONTRADICTED, None),
        ({"a": LOW, "b": HIGH}, UP, CONTRADICTED, None),
        # so does a difference that is significantly smaller than claimed
        ({"a": LOW, "b": HIGH}, {"by": 0.5}, HOLDS, None),
        ({"a": LOW, "b": HIGH}, {"by": 0.9}, CONTRADICTED, None),
        # worse by at most a share: tested against that share
        ({"a": [1.01, 1.02, 1.03], "b": [1.0, 1.01, 1.02]}, {"margin": 0.1}, HOLDS, None),
        ({"a": [1.01, 1.02, 1.03], "b": [1.0, 1.01, 1.02]}, {"margin": 0.001}, CONTRADICTED, None),
        ({"a": OTHER, "b": LOW}, {"margin": 0.02}, UNDECIDED, None),
        # anything else is undecided
        ({"a": LOW, "b": OTHER}, {}, UNDECIDED, None),
        ({"a": OTHER, "b": LOW}, {}, UNDECIDED, None),
        # runs that do not vary can be compared
        ({"a": [4.0] * 3, "b": [1.0] * 3}, UP, HOLDS, "+300 against B"),
        ({"a": [4.0] * 3, "b": [4.0] * 3}, UP, UNDECIDED, None),
        (
            {"a": [864_000.0, 866_000.0, 865_000.0], "b": [864_700.0] * 3},
            {},
            UNDECIDED,
            "-0.03 [-0.32, 0.25] against B; about 90 seeds would decide",
        ),
        # few or undefined runs
        ({"a": THREE, "b": HIGH[:2]}, {}, UNDECIDED, "3 runs against 2 runs of B"),
        ({"a": [None, 1.0, 1.1], "b": THREE}, {}, UNDECIDED, "2 runs against 3 runs of B"),
        ({"b": THREE}, {}, NOT_RUN, "0 runs against 3 runs of B"),
        ({"a": HIGH[:2]}, {"than": [], "at_least": 1}, UNDECIDED, "2 runs"),
        ({}, {"than": [], "at_least": 1}, NOT_RUN, "0 runs"),
        ({"a": [5.0] * 3}, {"than": [], "at_most": 4}, CONTRADICTED, "5, 3 runs"),
        # runs that never became binary do not support "after at most 5 epochs"
        (
            {"a": [*THREE, NAN]},
            {"than": [], "at_most": 5},
            UNDECIDED,
            "1.10 [0.85, 1.35] (1 run without a value), 3 runs",
        ),
        ({"a": [*THREE, NAN]}, {"than": [], "at_most": 0.1}, CONTRADICTED, None),
        # the runs that are left over of a gate are its better ones
        ({"a": [*LOW, NAN, None], "b": HIGH}, {}, UNDECIDED, None),
        ({"a": [*LOW, NAN], "b": HIGH}, {"by": 0.1}, UNDECIDED, None),
        ({"a": [*HIGH, NAN], "b": LOW}, {}, CONTRADICTED, None),
        ({"a": HIGH, "b": [*LOW, NAN]}, {}, UNDECIDED, None),
        ({"a": LOW, "b": [*HIGH, NAN]}, {}, HOLDS, None),
        # of several comparisons the weakest counts
        ({"a": LOW, "b": HIGH, "c": HIGH}, BOTH, HOLDS, None),
        ({"a": LOW, "b": HIGH, "c": OTHER}, BOTH, UNDECIDED, None),
        ({"a": LOW, "b": HIGH}, BOTH, NOT_RUN, None),
        ({"a": HIGH, "b": OTHER, "c": LOW}, BOTH, CONTRADICTED, None),
    ],
)
def test_verdicts(values: Any, claim: dict[str, Any], expected: ClaimStatus, reason: str | None) -> None:
    found = verdict(values, **claim)
    assert found == (expected, found[1] if reason is None else reason)


def test_runs_of_different_seeds_are_compared_as_samples() -> None:
    ends = ttest_ind(LOW, HIGH, equal_var=False).confidence_interval(0.95)
    low, high = (-100 * end / np.mean(HIGH) for end in (ends.high, ends.low))
    assert f"[{low:.0f}, {high:.0f}]" in verdict({"a": LOW, "b": HIGH}, paired=False)[1]
    assert f"[{ENDS[0]:.1f}, {ENDS[1]:.1f}]" in verdict({"a": LOW, "b": HIGH})[1]


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"at_least": 3.5}, HOLDS),
        ({"at_least": 3.9}, UNDECIDED),
        ({"at_least": 6.0}, CONTRADICTED),
        ({"at_most": 3.8}, HOLDS),
        ({"at_most": 3.6}, UNDECIDED),
        ({"at_most": 1.0}, CONTRADICTED),
        ({"at_least": 3.0, "at_most": 3.7}, HOLDS),
    ],
)
def test_a_number_is_within_its_bounds(bounds: dict[str, float], expected: ClaimStatus) -> None:
    found, reason = verdict({"a": [4.0, 4.0, 3.1]}, than=[], **bounds)
    assert found == expected
    assert reason.startswith("3.7 [2.4, 5.0], 3 runs")


def test_selections_of_soft_selectors_are_undecided() -> None:
    claim = Claim(text="t", group="g", column="c", method="a", than=["b"], binary=True)
    values = {"a": dict(enumerate(LOW)), "b": dict(enumerate(HIGH))}
    for share, expected in ((0.53, UNDECIDED), (0.995, HOLDS)):
        found = judge(claim, values, NAMES, {"a": [share, share], "b": []})  # b has no selectors
        assert found.verdict == expected
        assert found.reason.endswith(f"; {share:.0%} of the selectors of A are binary")
    assert judge(claim, {}, NAMES).verdict == NOT_RUN


def simulated(difference: float, seeds: int, by: float | None, paired: bool) -> Counter[ClaimStatus]:
    """Return the verdicts on 300 tables whose gate is better than the other by the true share ``difference``.

    A run is 1 (or 1 - ``difference``) plus noise: 0.1 of its seed, which pairs share, and 0.1 of its own.
    """
    random = np.random.default_rng(0)
    found: Counter[ClaimStatus] = Counter()
    for _ in range(300):
        common, own, other = 0.1 * random.standard_normal((3, seeds))
        noise = common if paired else 0.1 * random.standard_normal(seeds)
        values = {"a": (1 - difference + common + own).tolist(), "b": (1 + noise + other).tolist()}
        found[verdict(values, paired, by=by)[0]] += 1
    return found


@pytest.mark.parametrize("paired", [True, False])
def test_rules_on_simulated_runs(paired: bool) -> None:
    nothing = simulated(0.0, 5, None, paired)
    assert nothing[HOLDS] < 18
    assert nothing[CONTRADICTED] < 18
    assert nothing[UNDECIDED] > 270
    assert simulated(0.15, 30, 0.15, paired)[HOLDS] > 240
    assert simulated(0.15, 30, 0.5, paired)[CONTRADICTED] > 270  # not nearly as large as claimed


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_the_rules_state_the_error_on_skewed_values_against_constant_ones(seeds: int) -> None:
    random, claim = np.random.default_rng(0), Claim(text="t", group="g", column="c", method="a", than=["b"])
    wrong = 0
    for _ in range(3000):  # both gates have the same mean, so that "contradicted" is wrong
        skewed = random.lognormal(-0.5, 1.0, seeds)
        values = {"a": dict.fromkeys(range(seeds), 1.0), "b": dict(enumerate(skewed.tolist()))}
        wrong += judge(claim, values, NAMES).verdict == CONTRADICTED
    assert 0.15 < wrong / 3000 < 0.185
    assert "16 to 18 %\ncontradict a true claim" in RULES


def test_the_rules_state_the_numbers_that_count() -> None:
    text = " ".join(RULES.split())
    for number in (
        f"p < {SIGNIFICANCE:g}",
        f"a probability of {100 * POWER:.0f} %",
        f"fewer than {MIN_RUNS} runs",
        f"fewer than {100 * BINARY:.0f} % of the selectors",
        f"at least {100 - 50 * SIGNIFICANCE:g} % of {RESAMPLES:,} bootstrap samples",
        f"at most {50 * SIGNIFICANCE:g} %",
    ):
        assert number in text


def test_the_number_of_trials_by_hand() -> None:
    """The gate a finds in its first trial what b finds in 4: of b's trials, only one is as good."""
    claim = Claim(text="t", group="g", column="c", method="a", than=["b"], times=3, higher=True)
    trials = {"a": [(1.0, 7.0)] * 4, "b": [(1.0, 7.0), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0)]}
    found = judge_search(claim, trials, NAMES, True)
    assert found.verdict == HOLDS
    assert found.reason == "4 times fewer: 1 for the value of B with 4 (4 to 4 in 95% of the samples; 0: not reached)"
    assert judge_search(claim.model_copy(update={"times": 5}), trials, NAMES, True).verdict == CONTRADICTED


@pytest.mark.parametrize("apart", [0.5, 1.0, 2.0])
def test_the_number_of_seeds_that_decides_does_so(apart: float) -> None:
    """With as many pairs, the power is at least 80 %, and with one less it is below, whatever the spread."""
    count = int(required_seeds(apart, 1.0).split()[1])
    random = np.random.default_rng(1)
    for seeds, least, most in ((count, 0.79, 1.0), (count - 1, 0.0, 0.8)):
        rows = apart + random.standard_normal((4000, seeds))
        power = np.mean((ttest_1samp(rows, 0.0, axis=1).pvalue < 0.05) & (rows.mean(1) > 0))
        assert least <= power <= most
