"""Lay out a comparison as a grid of texts, which the tables of the console, of Markdown and of pages show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mtl.report.compare import Cell, Comparison, Quantity
from mtl.report.statistics import SIGNIFICANCE, Difference, Summary

_GAP = 3  # characters between columns
_WIDEST_NAME = 28  # of the first column; longer names take several lines
_WHOLE_HEADER = 14  # a header of another column takes one line up to this width
_WIDEST_HEADER = 20  # and is broken inside a word above this one, unless the cells are wider
_MOST_COLUMNS = 8  # of a table in Markdown or HTML
_DIGITS = 4  # significant ones of a mean whose error is not known
_MOST_DECIMALS = 6


@dataclass(frozen=True)
class Published:
    """What a publication reports of a setting, in our units.

    ``values``: by column of the table of runs, as "test loss", a number or (mean, standard error). ``note``: what
    differs from our runs, as their number or rows.
    """

    setting: str
    values: Mapping[str, float | tuple[float, float | None]]
    note: str = ""


class Entry(NamedTuple):
    """A cell of a table: its value, the lines below it, and how it is marked."""

    value: str
    below: str = ""
    best: bool = False
    significant: bool = False
    published: bool = False


@dataclass(frozen=True)
class Grid:
    """A table of texts."""

    corner: str
    rows: list[str]
    columns: list[str]
    cells: list[list[Entry]]  # by row and column

    def part(self, start: int, end: int) -> Grid:
        """Return the grid of the columns from ``start`` to ``end``."""
        return Grid(self.corner, self.rows, self.columns[start:end], [row[start:end] for row in self.cells])

    def transposed(self, corner: str) -> Grid:
        """Return the grid with columns as rows."""
        return Grid(corner, self.columns, self.rows, [list(row) for row in zip(*self.cells, strict=True)])

    def widths(self) -> list[int]:
        """Return the width of the first column, and of each other one, in characters."""
        first = min(_WIDEST_NAME, max(len(name) for name in (self.corner, *self.rows)))
        widths = [first]
        for index, header in enumerate(self.columns):
            texts = [text for row in self.cells for text in (row[index].value, *row[index].below.split("\n"))]
            inside = max(map(len, texts), default=0)
            words = [header] if len(header) <= _WHOLE_HEADER else header.split(" ")
            widths.append(max(inside, min(_WIDEST_HEADER, max(map(len, words)))))
        return widths

    def blocks(self, width: int) -> list[Grid]:
        """Return grids that fit into ``width`` characters, each with the first column and some of the others."""
        first, *others = self.widths()
        blocks, start, used = [], 0, first
        for index, other in enumerate(others):
            if index > start and used + _GAP + other > width:
                blocks.append(self.part(start, index))
                start, used = index, first
            used += _GAP + other
        return [*blocks, self.part(start, len(others))]


def grid(comparison: Comparison, detailed: bool = False, published: Sequence[Published] = ()) -> Grid:
    """Return the comparison with a row for each setting, and after it what is ``published`` of that setting.

    ``detailed``: with the errors of differences, bootstrap intervals, and a last row of the tests of the best settings.
    """
    columns = [comparison.unit, *(_with_arrow(quantity) for quantity in comparison.quantities)]
    names, rows = [], []
    places = {
        quantity.name: decimals([cell.value for cell in _column(comparison, quantity)])
        for quantity in comparison.quantities
    }
    for setting in dict.fromkeys((*comparison.settings, *(each.setting for each in published))):
        if setting in comparison.runs:
            done, every = comparison.runs[setting]
            row = [Entry(str(done) if done == every else f"{done} of {every}")]
            for quantity in comparison.quantities:
                row.append(_entry(comparison, setting, quantity, places[quantity.name], detailed))
            names.append(setting)
            rows.append(row)
        for each in published:
            if each.setting == setting:
                names.append(f"{setting}, published")
                rows.append(
                    [Entry("", published=True), *(_published(each, quantity) for quantity in comparison.quantities)]
                )
    if detailed and comparison.contests:
        names.append("best against the next")
        rows.append([Entry(""), *(_contest(comparison, quantity) for quantity in comparison.quantities)])
    return Grid(comparison.heading, names, columns, rows)


def written_grid(comparison: Comparison, published: Sequence[Published] = ()) -> Grid:
    """Return the detailed grid, with settings as columns if there are many quantities."""
    upright = grid(comparison, True, published)
    return upright if len(upright.columns) <= _MOST_COLUMNS else upright.transposed(upright.corner)


def _column(comparison: Comparison, quantity: Quantity) -> list[Cell]:
    return [comparison.cells[setting, quantity.name] for setting in comparison.settings]


def _entry(comparison: Comparison, setting: str, quantity: Quantity, places: int, detailed: bool) -> Entry:
    cell, found = comparison.cells[setting, quantity.name], comparison.contests.get(quantity.name)
    below = [difference_text(cell.difference, places, detailed)] if cell.difference else []
    if detailed and cell.interval:
        below.append(f"[{cell.interval[0]:,.{places}f}, {cell.interval[1]:,.{places}f}]")
    significant = found is not None and found.best == setting and found.p < SIGNIFICANCE
    return Entry(value_text(cell.value, places), "\n".join(below), cell.best, significant)


def _published(row: Published, quantity: Quantity) -> Entry:
    """Return a published number with all of its digits: ours say nothing about its error."""
    value = row.values.get(quantity.column)
    mean, error = value if isinstance(value, tuple) else (value, None)
    if mean is None:
        return Entry("-", published=True)
    return Entry(number_text(mean, _DIGITS) + ("" if error is None else f" ± {number_text(error, 2)}"), published=True)


def _contest(comparison: Comparison, quantity: Quantity) -> Entry:
    found = comparison.contests.get(quantity.name)
    return Entry("-") if found is None else Entry(p_text(found.p), f"{found.best} against {found.other}")


def decimals(values: Sequence[Summary]) -> int:
    """Return the decimals of a quantity: two digits of its typical standard error, or four of its largest mean."""
    errors = [value.error for value in values if value.error]
    if errors:
        last = 1 - math.floor(math.log10(statistics.median(errors)))
    else:
        largest = max((abs(value.mean) for value in values if value.mean), default=1.0)
        last = _DIGITS - 1 - math.floor(math.log10(largest))
    return min(max(last, 0), _MOST_DECIMALS)


def value_text(value: Summary, places: int) -> str:
    """Return ``mean ± standard error``, followed by (m/n) if only m of n runs have a value; "-" if none has one."""
    if value.mean is None:
        return "-" if not value.undefined else f"- (0/{value.undefined})"
    error = "" if value.error is None else f" ± {value.error:,.{places}f}"
    missing = f" ({value.count}/{value.count + value.undefined})" if value.undefined else ""
    return f"{value.mean:,.{places}f}{error}{missing}"


def difference_text(found: Difference, places: int, detailed: bool) -> str:
    """Return a difference to the first setting with its p-value; ``detailed``: with its standard error."""
    error = f" ± {found.error:,.{places}f}" if detailed and found.error is not None else ""
    return f"{found.mean:+,.{places}f}{error}{'' if found.p is None else f' {p_text(found.p)}'}"


def number_text(value: float, digits: int) -> str:
    """Return a number with ``digits`` significant digits, or more before the decimal point."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def p_text(p: float) -> str:
    """Return a p-value with the digits that it is read with."""
    return "p<0.001" if p < 0.001 else f"p={p:.3f}" if p < 0.1 else f"p={p:.2f}"


def _with_arrow(quantity: Quantity) -> str:
    arrows: dict[bool | None, str] = {True: "↑", False: "↓", None: ""}
    return quantity.name + arrows[quantity.higher]
