"""Lay out a comparison as a grid of texts, for tables on the console, in Markdown and in HTML pages."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mtl.report.compare import Comparison, Quantity
from mtl.report.statistics import Difference, Outcome, Summary

Published = Mapping[str, Mapping[str, tuple[float, float | None]]]  # see ``grid``
_GAP = 3  # characters between columns
_WIDEST_NAME = 28  # characters of the first column; longer names take several lines
_WHOLE_HEADER = 14  # other headers take one line up to this width
_WIDEST_HEADER = 20  # wider headers are broken inside words, unless the cells are wider
_DIGITS = 4  # significant digits of a mean whose error is not known
_MOST_DECIMALS = 6
_ARROWS: Mapping[bool | None, str] = {True: "↑", False: "↓", None: ""}


class Entry(NamedTuple):
    """A cell of a table: its value, the lines below it, and how it is marked."""

    value: str
    below: tuple[str, ...] = ()
    best: bool = False
    published: bool = False


@dataclass(frozen=True)
class Listing:
    """A table whose first column names the rows; ``notes``: sentences below it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Entry]]
    notes: Sequence[str] = ()

    def transposed(self, corner: str) -> Listing:
        """Return the table with columns as rows."""
        names, *columns = zip(*self.rows, strict=True)
        rows = [[Entry(name), *column] for name, column in zip(self.header[1:], columns, strict=True)]
        return replace(self, header=[corner, *(name.value for name in names)], rows=rows)

    def widths(self) -> list[int]:
        """Return the widths of the columns in characters, the first one first."""
        names, *columns = zip(*self.rows, strict=True)
        widths = [min(_WIDEST_NAME, max(map(len, (self.header[0], *(name.value for name in names)))))]
        for header, column in zip(self.header[1:], columns, strict=True):
            texts = [text for entry in column for text in (entry.value, *entry.below)]
            words = [header] if len(header) <= _WHOLE_HEADER else header.split(" ")
            widths.append(max([min(_WIDEST_HEADER, max(map(len, words))), *map(len, texts)]))
        return widths

    def blocks(self, width: int) -> list[Listing]:
        """Return tables that fit into ``width`` characters, each with the first column and some of the others."""
        first, *others = self.widths()
        starts, used = [1], first
        for index, other in enumerate(others, 1):
            if index > starts[-1] and used + _GAP + other > width:
                starts.append(index)
                used = first
            used += _GAP + other
        parts = [slice(start, end) for start, end in zip(starts, [*starts[1:], None], strict=True)]
        return [
            replace(self, header=[self.header[0], *self.header[part]], rows=[[row[0], *row[part]] for row in self.rows])
            for part in parts
        ]


def listing(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str] = ()) -> Listing:
    """Return a table of plain texts."""
    return Listing(title, header, [[Entry(text) for text in row] for row in rows], notes)


def grid(comparison: Comparison, detailed: bool = False, published: Published | None = None) -> Listing:
    """Return the comparison with a row for each setting, followed by a row of its ``published`` values, if any.

    ``detailed``: with the errors of differences.
    ``published``: (mean, standard error or None) in our units, by setting and column of the table of runs.
    """
    published, quantities, rows = published or {}, comparison.quantities, list[list[Entry]]()
    names = [quantity.name + _ARROWS[quantity.higher] for quantity in quantities]
    places = {quantity.name: decimals(quantity) for quantity in quantities}
    for setting in dict.fromkeys((*comparison.runs, *published)):
        if setting in comparison.runs:
            done, every = comparison.runs[setting]
            count = Entry(str(done) if done == every else f"{done} of {every}")
            row = [_entry(each, setting, places[each.name], detailed) for each in quantities]
            rows.append([Entry(setting), count, *row])
        if setting in published:
            values = [published[setting].get(quantity.column) for quantity in quantities]
            texts = ["-" if value is None else rounded(*value) for value in values]
            rows.append([Entry(text, published=True) for text in (f"{setting}, published", "", *texts)])
    return Listing("", [comparison.heading, comparison.unit, *names], rows)


def _entry(quantity: Quantity, setting: str, places: int, detailed: bool) -> Entry:
    apart = quantity.differences.get(setting)
    below = (difference_text(apart, places, detailed),) if apart else ()
    return Entry(value_text(quantity.means[setting], places), below, setting in quantity.best)


def decimals(quantity: Quantity) -> int:
    """Return the decimals that show two digits of the typical standard error, or four of the largest mean."""
    if errors := [value.error for value in quantity.means.values() if value.error]:
        last = 1 - math.floor(math.log10(statistics.median(errors)))
    else:
        largest = max((abs(value.mean) for value in quantity.means.values() if value.mean), default=1.0)
        last = _DIGITS - 1 - math.floor(math.log10(largest))
    return min(max(last, 0), _MOST_DECIMALS)


def value_text(value: Summary, places: int) -> str:
    """Return ``mean ± standard error``, followed by (m/n) if only m of n runs have a value; "-" if none has one."""
    missing = f" ({value.count}/{value.count + value.undefined})" if value.undefined else ""
    if value.mean is None:
        return f"-{missing}"
    error = "" if value.error is None else f" ± {value.error:,.{places}f}"
    return f"{value.mean:,.{places}f}{error}{missing}"


def difference_text(found: Difference, places: int, detailed: bool) -> str:
    """Return a difference to the first setting with its p-value, and an asterisk if it is significant.

    ``detailed``: with its standard error. The runs that have a value, where others have none, are no random ones, so
    there is no p-value.
    """
    error = f" ± {found.error:,.{places}f}" if detailed and found.error is not None else ""
    significant = found.outcome() in (Outcome.BETTER, Outcome.WORSE)
    tested = "" if found.p is None or found.undefined else f" {p_text(found.p)}{'*' * significant}"
    return f"{found.mean:+,.{places}f}{error}{tested}"


def number_text(value: float, digits: int) -> str:
    """Return a number with ``digits`` significant digits, or more before the decimal point."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def rounded(mean: float, error: float | None) -> str:
    """Return a mean with four digits and its standard error, if there is one, with two."""
    return number_text(mean, _DIGITS) + ("" if error is None else f" ± {number_text(error, 2)}")


def p_text(p: float) -> str:
    """Return a p-value as text with suitable digits."""
    return "p<0.001" if p < 0.001 else f"p={p:.3f}" if p < 0.1 else f"p={p:.2f}"
