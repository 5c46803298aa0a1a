"""Lay out a comparison as tables for the console, of any width, and for Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from mtl.report.compare import Cell, Comparison, Quantity
from mtl.report.statistics import Summary

_GAP = 3  # characters between columns
_WIDEST_NAME = 28  # of the first column; longer names take several lines
_WHOLE_HEADER = 14  # a header of another column takes one line up to this width
_WIDEST_HEADER = 20  # and is broken inside a word above this one, unless the cells are wider
_MOST_COLUMNS = 8  # of a table in Markdown
_DIGITS = 4  # significant ones of a mean whose error is not known
_MOST_DECIMALS = 6


@dataclass(frozen=True)
class Grid:
    """A table of texts. A cell is (value, what stands below it or "", whether it is the best)."""

    corner: str
    rows: list[str]
    columns: list[str]
    cells: list[list[tuple[str, str, bool]]]  # by row and column

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
            inside = max((len(text) for row in self.cells for text in row[index][:2]), default=0)
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


def grid(comparison: Comparison, detailed: bool = False) -> Grid:
    """Return the comparison with a row for each setting; ``detailed``: with the errors of the differences."""
    columns = ["seeds", *(_with_arrow(quantity) for quantity in comparison.quantities)]
    rows = []
    for setting in comparison.settings:
        done, every = comparison.runs[setting]
        row = [(str(done) if done == every else f"{done} of {every}", "", False)]
        for quantity in comparison.quantities:
            cells = [comparison.cells[other, quantity.name] for other in comparison.settings]
            places = decimals([each.value for each in cells])
            cell = comparison.cells[setting, quantity.name]
            row.append((value_text(cell.value, places), difference_text(cell, places, detailed), cell.best))
        rows.append(row)
    return Grid(comparison.heading, comparison.settings, columns, rows)


def console_tables(comparison: Comparison, width: int, mark: str) -> list[Table]:
    """Return tables of at most ``width`` characters, with settings as rows, or as columns if that takes fewer tables.

    ``mark`` follows the best values, besides their bold type.
    """
    upright = grid(comparison)
    space = " " * len(mark)  # where other cells have the mark, so that numbers are aligned

    def marked(value: str, below: str, best: bool) -> tuple[str, str, bool]:
        return value + (mark if best else space), below and below + space, best

    upright.cells[:] = [[row[0], *(marked(*cell) for cell in row[1:])] for row in upright.cells]
    choices = [each.blocks(width) for each in (upright, upright.transposed(f"{upright.corner} →"))]
    return [_table(block) for block in min(choices, key=len)]


def markdown(comparison: Comparison) -> str:
    """Return the comparison as one Markdown table, with the best values in bold."""
    upright = grid(comparison, detailed=True)
    shown = upright if len(upright.columns) <= _MOST_COLUMNS else upright.transposed(upright.corner)

    def line(texts: Sequence[str]) -> str:
        return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"

    lines = [line([shown.corner, *shown.columns]), "|" + "---|" * (1 + len(shown.columns))]
    for name, row in zip(shown.rows, shown.cells, strict=True):
        texts = [f"**{value}**" if best else value for value, _, best in row]
        lines.append(
            line(
                [
                    name,
                    *(f"{text}<br>{below}" if below else text for text, (_, below, _) in zip(texts, row, strict=True)),
                ]
            )
        )
    return "\n".join([*lines, "", *explanation(comparison, "in bold"), ""])


def explanation(comparison: Comparison, best: str) -> list[str]:
    """Return the sentences that belong below a table; ``best`` says how the best values are marked."""
    lines = [
        "Test of the checkpoint that the run chose: mean ± standard error over seeds"
        + (f"; best {best}." if len(comparison.settings) > 1 else ".")
    ]
    cells = comparison.cells.values()
    differences = [cell.difference for cell in cells if cell.difference]
    if differences:
        paired = all(each.pairs for each in differences)
        how = "over runs of the same seed" if paired else "over runs of the same seed where there are any"
        test = "; p: Welch's t test, two-sided" if any(each.p is not None for each in differences) else ""
        lines.append(f"Second line: difference to {comparison.settings[0]}, {how}{test}.")
    if any(cell.value.undefined for cell in cells):
        lines.append(
            "(m/n): only m of n runs have a defined value, which the mean is of; such a setting is never best."
        )
    return [*lines, *comparison.notes]


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
    error = "" if value.error is None else f" ± {value.error:.{places}f}"
    missing = f" ({value.count}/{value.count + value.undefined})" if value.undefined else ""
    return f"{value.mean:,.{places}f}{error}{missing}"


def difference_text(cell: Cell, places: int, detailed: bool) -> str:
    """Return the difference to the first setting with its p-value; "" for the first setting, or without any."""
    found = cell.difference
    if found is None:
        return ""
    error = f" ± {found.error:.{places}f}" if detailed and found.error is not None else ""
    p = (
        ""
        if found.p is None
        else " p<0.001"
        if found.p < 0.001
        else f" p={found.p:.3f}"
        if found.p < 0.1
        else f" p={found.p:.2f}"
    )
    return f"{found.mean:+,.{places}f}{error}{p}"


def _with_arrow(quantity: Quantity) -> str:
    arrows: dict[bool | None, str] = {True: "↑", False: "↓", None: ""}
    return quantity.name + arrows[quantity.higher]


def _table(block: Grid) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    widths = block.widths()
    table.add_column(Text(block.corner), width=widths[0], overflow="fold")
    for name, width in zip(block.columns, widths[1:], strict=True):
        table.add_column(Text(name), width=width, justify="right", overflow="fold")
    for name, row in zip(block.rows, block.cells, strict=True):
        texts = []
        for value, below, best in row:
            text = Text(value, style="bold" if best else "")
            texts.append(text.append(f"\n{below}", style="not bold dim") if below else text)
        table.add_row(Text(name), *texts)
    return table
