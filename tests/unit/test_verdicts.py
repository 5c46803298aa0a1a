"""Verdicts on claims, against cases made by hand and scipy."""

from __future__ import annotations

from typing import Any

import pytest
from scipy.stats import ttest_ind

from mtl.paper.definition import Claim
from mtl.paper.verdicts import Verdict, judge

NAMES = {"a": "A", "b": "B", "c": "C"}


def verdict(values: dict[str, list[float | None]], **claim: Any) -> tuple[Verdict, str]:
    than = claim.pop("than", ["b"])
    found = judge(Claim(text="t", group="g", column="c", gate="a", than=than, **claim), values, NAMES)
    return found.verdict, found.reason


def test_a_significant_difference_of_the_right_sign_holds() -> None:
    a, b = [1.0, 1.1, 0.9], [2.0, 2.1, 1.9]
    p = ttest_ind(a, b, equal_var=False, alternative="less").pvalue
    assert verdict({"a": a, "b": b}) == (
        Verdict.HOLDS,
        f"1 ± 0.058 against 2 ± 0.058 of B, 50.0% better, p={p:.2g}",
    )
    assert verdict({"a": b, "b": a}, higher=True)[0] == Verdict.HOLDS
    assert verdict({"a": b, "b": a})[0] == Verdict.FAILS
    assert verdict({"a": a, "b": b}, higher=True) == (
        Verdict.FAILS,
        f"1 ± 0.058 against 2 ± 0.058 of B, 50.0% worse, p={1 - p:.2g}",
    )


def test_a_smaller_or_insignificant_difference_holds_in_sign() -> None:
    a, b = [1.0, 1.1, 0.9], [2.0, 2.1, 1.9]
    assert verdict({"a": a, "b": b}, by=0.5)[0] == Verdict.HOLDS
    assert verdict({"a": a, "b": b}, by=0.51)[0] == Verdict.IN_SIGN
    assert verdict({"a": [1.0, 2.0, 3.0], "b": [1.1, 2.0, 3.1]})[0] == Verdict.IN_SIGN


def test_runs_that_do_not_vary_can_be_compared() -> None:
    assert verdict({"a": [4.0] * 3, "b": [1.0] * 3}, higher=True) == (
        Verdict.HOLDS,
        "4 ± 0 against 1 ± 0 of B, 300.0% better",
    )
    assert verdict({"a": [4.0] * 3, "b": [4.0] * 3}, higher=True)[0] == Verdict.FAILS


def test_few_or_undefined_runs_are_not_judged() -> None:
    three, two = [1.0, 1.1, 1.2], [2.0, 2.1]
    assert verdict({"a": three, "b": two}) == (Verdict.FEW, "3 runs against 2 runs of B")
    assert verdict({"a": [None, 1.0, 1.1], "b": three}) == (Verdict.FEW, "2 runs against 3 runs of B")
    assert verdict({"b": three})[0] == Verdict.FEW
    assert verdict({"a": two}, than=[], at_least=1) == (Verdict.FEW, "2 runs")
    assert "(1 runs without a value)" in verdict({"a": [*three, float("nan")], "b": [2.0, 2.1, 2.2]})[1]


def test_the_weakest_of_several_comparisons_counts() -> None:
    low, high, other = [1.0, 1.1, 0.9], [2.0, 2.1, 1.9], [1.02, 1.12, 0.92]
    than = ["b", "c"]
    assert verdict({"a": low, "b": high, "c": high}, than=than)[0] == Verdict.HOLDS
    assert verdict({"a": low, "b": high, "c": other}, than=than)[0] == Verdict.IN_SIGN
    assert verdict({"a": low, "b": high, "c": high[:2]}, than=than)[0] == Verdict.FEW
    assert verdict({"a": other, "b": high[:2], "c": low}, than=than)[0] == Verdict.FAILS


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"at_least": 3.5}, Verdict.HOLDS),
        ({"at_least": 3.9}, Verdict.FAILS),
        ({"at_most": 3.8}, Verdict.HOLDS),
        ({"at_most": 3.6}, Verdict.FAILS),
        ({"at_least": 3.0, "at_most": 3.7}, Verdict.HOLDS),
    ],
)
def test_a_number_is_within_its_bounds(bounds: dict[str, float], expected: Verdict) -> None:
    assert verdict({"a": [4.0, 4.0, 3.1]}, than=[], **bounds) == (expected, "3.7 ± 0.3, 3 runs")


def test_large_numbers_and_small_differences_are_readable() -> None:
    values: dict[str, list[float | None]] = {"a": [864_000.0, 866_000.0, 865_000.0], "b": [864_700.0] * 3}
    assert verdict(values)[1].startswith("865,000 ± 577 against 864,700 ± 0 of B, 0.03% worse")
