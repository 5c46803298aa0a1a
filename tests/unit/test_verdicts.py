"""Verdicts on claims, against cases made by hand and scipy."""

from __future__ import annotations

from typing import Any

import pytest
from scipy.stats import ttest_ind

from mtl.paper.definition import Claim
from mtl.paper.verdicts import Verdict, judge

HOLDS, IN_SIGN, FEW, FAILS = Verdict
NAMES = {"a": "A", "b": "B", "c": "C"}


def verdict(values: dict[str, list[float | None]], **claim: Any) -> tuple[Verdict, str]:
    than = claim.pop("than", ["b"])
    found = judge(Claim(text="t", group="g", column="c", gate="a", than=than, **claim), values, NAMES)
    return found.verdict, found.reason


LOW, HIGH, OTHER = [1.0, 1.1, 0.9], [2.0, 2.1, 1.9], [1.02, 1.12, 0.92]
P = ttest_ind(LOW, HIGH, equal_var=False, alternative="less").pvalue
THREE: list[float | None] = [1.0, 1.1, 1.2]
UP: dict[str, Any] = {"higher": True}
BOTH = {"than": ["b", "c"]}


@pytest.mark.parametrize(
    ("values", "claim", "expected", "reason"),
    [
        # a significant difference of the right sign holds
        ({"a": LOW, "b": HIGH}, {}, HOLDS, f"1 ± 0.058 against 2 ± 0.058 of B, 50.0% better, p={P:.2g}"),
        ({"a": HIGH, "b": LOW}, UP, HOLDS, None),
        ({"a": HIGH, "b": LOW}, {}, FAILS, None),
        ({"a": LOW, "b": HIGH}, UP, FAILS, f"1 ± 0.058 against 2 ± 0.058 of B, 50.0% worse, p={1 - P:.2g}"),
        # a smaller or an insignificant one holds in sign
        ({"a": LOW, "b": HIGH}, {"by": 0.5}, HOLDS, None),
        ({"a": LOW, "b": HIGH}, {"by": 0.51}, IN_SIGN, None),
        ({"a": [1.0, 2.0, 3.0], "b": [1.1, 2.0, 3.1]}, {}, IN_SIGN, None),
        # runs that do not vary can be compared
        ({"a": [4.0] * 3, "b": [1.0] * 3}, UP, HOLDS, "4 ± 0 against 1 ± 0 of B, 300.0% better"),
        ({"a": [4.0] * 3, "b": [4.0] * 3}, UP, FAILS, None),
        # few or undefined runs are not judged
        ({"a": THREE, "b": HIGH[:2]}, {}, FEW, "3 runs against 2 runs of B"),
        ({"a": [None, 1.0, 1.1], "b": THREE}, {}, FEW, "2 runs against 3 runs of B"),
        ({"b": THREE}, {}, FEW, None),
        ({"a": HIGH[:2]}, {"than": [], "at_least": 1}, FEW, "2 runs"),
        # of several comparisons the weakest counts
        ({"a": LOW, "b": HIGH, "c": HIGH}, BOTH, HOLDS, None),
        ({"a": LOW, "b": HIGH, "c": OTHER}, BOTH, IN_SIGN, None),
        ({"a": LOW, "b": HIGH, "c": HIGH[:2]}, BOTH, FEW, None),
        ({"a": OTHER, "b": HIGH[:2], "c": LOW}, BOTH, FAILS, None),
    ],
)
def test_verdicts(values: Any, claim: dict[str, Any], expected: Verdict, reason: str | None) -> None:
    found = verdict(values, **claim)
    assert found == (expected, found[1] if reason is None else reason)


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"at_least": 3.5}, HOLDS),
        ({"at_least": 3.9}, FAILS),
        ({"at_most": 3.8}, HOLDS),
        ({"at_most": 3.6}, FAILS),
        ({"at_least": 3.0, "at_most": 3.7}, HOLDS),
    ],
)
def test_a_number_is_within_its_bounds(bounds: dict[str, float], expected: Verdict) -> None:
    assert verdict({"a": [4.0, 4.0, 3.1]}, than=[], **bounds) == (expected, "3.7 ± 0.3, 3 runs")


def test_numbers_are_readable() -> None:
    assert "(1 runs without a value)" in verdict({"a": [*THREE, float("nan")], "b": [2.0, 2.1, 2.2]})[1]
    values: dict[str, list[float | None]] = {"a": [864_000.0, 866_000.0, 865_000.0], "b": [864_700.0] * 3}
    assert verdict(values)[1].startswith("865,000 ± 577 against 864,700 ± 0 of B, 0.03% worse")
