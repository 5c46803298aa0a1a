"""Numbers as text, for the console, pages and logs. Imports nothing slow."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

MOST_DECIMALS = 6
MAX_WITHOUT_EXPONENT = 1e16  # larger numbers have an exponent


def number(value: float | None, digits: int | None = None, sign: str = "") -> str:
    """Return ``value`` with four decimals, or with none if it is 1000 or more; "-" if it is undefined (None).

    ``digits``: with so many significant digits instead, or more before the decimal point, up to
    ``MAX_WITHOUT_EXPONENT``. ``sign``: "+" to show it.
    """
    if value is None:
        return "-"
    if digits is None:
        return f"{value:{sign}z.4f}" if abs(value) < 1000 else f"{value:{sign},.0f}"
    is_whole = 10 ** (digits - 1) <= abs(value) < MAX_WITHOUT_EXPONENT
    return f"{value:{sign},.0f}" if is_whole else f"{value:{sign}.{digits}g}"


def cell(value: object) -> str:
    """Return a cell of a table: numbers with four digits, or ten if they are 1000 or more, as Unix times are."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.10g}"


def with_error(value: float | None, error: float | None) -> str:
    """Return a mean with four digits and its standard error, if there is one, with two: 0.5347 ± 0.0002."""
    return number(value, 4) + (f" ± {number(error, 2)}" if error else "")


def with_interval(value: float, ends: tuple[float, float] | None, unit: str = "", sign: str = "+") -> str:
    """Return ``value`` with its interval, such as +2.52 % [1.89, 3.16].

    The decimals show two digits of the interval's half, and at most four digits of ``value``. ``sign``: "+", or "" for
    a size. Without an interval, ``value`` has two digits.
    """
    value += 0.0  # so that 0 has a plus sign
    if ends is None or ends[0] == ends[1]:
        return f"{number(value, 2, sign)}{unit}"
    half, most = (math.floor(math.log10(size)) for size in ((ends[1] - ends[0]) / 2, abs(value) or 1e-9))
    form = f",.{min(max(min(1 - half, 3 - most), 0), MOST_DECIMALS)}f"
    return f"{value:{sign}{form}}{unit} [{ends[0]:{form}}, {ends[1]:{form}}]"


def aligned(values: Sequence[tuple[float | None, float | None]]) -> list[str]:
    """Return a column of means and standard errors with equal decimals, "-" for an undefined mean.

    The decimals show two digits of the typical standard error, or four of the largest mean.
    """
    errors = [error for _, error in values if error]
    largest = max((abs(mean) for mean, _ in values if mean), default=1.0)
    last = math.floor(math.log10(statistics.median(errors))) - 1 if errors else math.floor(math.log10(largest)) - 3
    form, texts = f",.{min(max(-last, 0), MOST_DECIMALS)}f", []
    for mean, error in values:
        error_text = "" if error is None else f"{error:{form}}"
        error_part = f" ± {error_text}" if error_text.strip("0.") else ""
        texts.append("-" if mean is None else f"{mean:{form}}{error_part}")
    return texts


def p_value(p: float | None) -> str:
    """Return a p-value with suitable digits: p=0.012, p=0.35, p<0.001; "-" if it is undefined."""
    return "-" if p is None else "p<0.001" if p < 0.001 else f"p={p:.3f}" if p < 0.1 else f"p={p:.2f}"


def duration(seconds: float) -> str:
    """Return a time in its natural unit: 7.5 seconds, 12 minutes, 3.4 hours."""
    for unit, size, least in (("hours", 3600, 120 * 60), ("minutes", 60, 100)):
        if seconds >= least:
            return f"{seconds / size:.2g} {unit}" if seconds < 10 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.2g} seconds"
