"""Numbers as text."""

from __future__ import annotations

import math

import pytest

from mtl.files.formatting import aligned, cell, duration, number, p_value, with_error, with_interval


@pytest.mark.parametrize(
    ("value", "digits", "sign", "text"),
    [
        (0.845, None, "", "0.8450"),
        (-0.00001, None, "", "0.0000"),
        (1234.5678, None, "", "1,235"),
        (None, None, "", "-"),
        (math.nan, None, "", "nan"),
        (0.845, 4, "", "0.845"),
        (0.012345, 3, "+", "+0.0123"),
        (1234.5678, 3, "+", "+1,235"),
        (None, 4, "", "-"),
        (math.nan, 4, "", "nan"),
        (math.inf, 4, "", "inf"),
        (1e30, 4, "", "1e+30"),
    ],
)
def test_number(value: float | None, digits: int | None, sign: str, text: str) -> None:
    assert number(value, digits, sign) == text


def test_cell() -> None:
    assert [*map(cell, (1700000007.132, 0.123456, 3, "a"))] == ["1700000007", "0.1235", "3", "a"]


def test_errors_and_intervals() -> None:
    assert with_error(0.53467, 0.00021) == "0.5347 ± 0.00021"
    assert with_error(0.53467, 0.0) == with_error(0.53467, None) == "0.5347"
    assert with_error(None, None) == "-"
    assert with_interval(2.5183, (1.8912, 3.1611), " %") == "+2.52 % [1.89, 3.16]"
    assert with_interval(2.5183, (1.8912, 3.1611), sign="") == "2.52 [1.89, 3.16]"
    assert with_interval(-0.0, None, " %") == "+0 %"


def test_a_column_has_equal_decimals() -> None:
    assert aligned([(0.5, 0.012), (12.3456, 0.011), (None, None), (1.0, None)]) == [
        "0.500 ± 0.012",
        "12.346 ± 0.011",
        "-",
        "1.000",
    ]
    assert aligned([(12345.6, None), (None, None)]) == ["12,346", "-"]


def test_p_values_and_times() -> None:
    assert [*map(p_value, (None, 0.0002, 0.0123, 0.345))] == ["-", "p<0.001", "p=0.012", "p=0.34"]
    assert [*map(duration, (7.5, 99, 720, 12240))] == ["7.5 seconds", "99 seconds", "12 minutes", "3.4 hours"]
