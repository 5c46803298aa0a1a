"""Lay out a comparison as tables for the console, of any width, and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl
from rich import box
from rich.table import Table
from rich.text import Text

from mtl.report.compare import Comparison
from mtl.report.grid import Entry, Grid, Published, grid, written_grid
from mtl.report.runs import FINISHED, Runs
from mtl.report.statistics import LEVEL, RESAMPLES, SIGNIFICANCE

_MOST_NAMED = 10  # runs that have not finished; summary.csv has all
_LONGEST_REASON = 300  # characters


def console_tables(comparison: Comparison, width: int, mark: str) -> list[Table]:
    """Return tables of at most ``width`` characters, with settings as rows, or as columns if that takes fewer tables.

    ``mark`` follows the best values, besides their bold type.
    """
    upright = grid(comparison)
    space = " " * len(mark)  # where other cells have the mark, so that numbers are aligned

    def marked(entry: Entry) -> Entry:
        value = entry.value + (mark if entry.best else space)
        return entry._replace(value=value, below=entry.below and entry.below + space)

    upright.cells[:] = [[row[0], *map(marked, row[1:])] for row in upright.cells]
    choices = [each.blocks(width) for each in (upright, upright.transposed(f"{upright.corner} →"))]
    return [_table(block) for block in min(choices, key=len)]


def markdown(comparison: Comparison, published: Sequence[Published] = ()) -> str:
    """Return the comparison as one Markdown table, with the best values in bold, and what explains it."""
    shown = written_grid(comparison, published)

    def text(entry: Entry) -> str:
        value = f"**{entry.value}**" if entry.best else entry.value
        return "<br>".join([value + ("\\*" if entry.significant else ""), *filter(None, entry.below.split("\n"))])

    rows = [[name, *map(text, row)] for name, row in zip(shown.rows, shown.cells, strict=True)]
    table = markdown_table([shown.corner, *shown.columns], rows)
    return "\n".join([table, "", *explanation(comparison, "in bold", True, published), ""])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines)


def explanation(
    comparison: Comparison, best: str, detailed: bool = False, published: Sequence[Published] = ()
) -> list[str]:
    """Return the sentences that belong below a table; ``best`` says how the best values are marked."""
    lines = [
        f"Test of the checkpoint that the run chose: mean ± standard error over {comparison.unit}"
        + (f"; best {best}." if len(comparison.settings) > 1 else ".")
    ]
    cells = comparison.cells.values()
    differences = [cell.difference for cell in cells if cell.difference]
    if differences:
        paired = {bool(each.pairs) for each in differences}
        how = "over runs of the same seed" if any(paired) else "of the means"
        how += " where there are any" if len(paired) > 1 else ""
        test = "; p: Welch's t test, two-sided" if any(each.p is not None for each in differences) else ""
        lines.append(f"Second line: difference to {comparison.settings[0]}, {how}{test}.")
    if detailed and any(cell.interval for cell in cells):
        lines.append(
            f"In brackets: {LEVEL:.0%} percentile bootstrap interval of the mean, of {RESAMPLES} resamples of the "
            f"{comparison.unit} (seed 0); it is too narrow for a few of them."
        )
    if detailed and comparison.contests:
        lines.append(
            f"Last line: p-value of the best mean being better than the next best, by Welch's t test, one-sided and "
            f"unpaired; an asterisk marks p < {SIGNIFICANCE:g}, not corrected for the number of settings and columns."
        )
    if any(cell.value.undefined for cell in cells):
        lines.append(
            "(m/n): only m of n runs have a defined value, which the mean is of; such a setting is never best."
        )
    lines += [f"{each.setting}, published: {each.note}" for each in published if each.note]
    return [*lines, *comparison.notes]


def missing(runs: Runs) -> list[str]:
    """Return a line for each run that has not finished: its folder, what became of it, and its last message."""
    rows = runs.table.filter(pl.col("state") != FINISHED)
    lines = [f"{Path(row['run']).name} {row['state']}: {row['reason'] or 'no message'}" for row in rows.to_dicts()]
    if not lines:
        return []
    more = [f"... and {len(lines) - _MOST_NAMED} more, in summary.csv"] if len(lines) > _MOST_NAMED else []
    head = f"{len(lines)} of {len(runs.table)} runs have not finished:"
    return [head, *(line[:_LONGEST_REASON] for line in lines[:_MOST_NAMED]), *more]


def _table(block: Grid) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    widths = block.widths()
    table.add_column(Text(block.corner), width=widths[0], overflow="fold")
    for name, width in zip(block.columns, widths[1:], strict=True):
        table.add_column(Text(name), width=width, justify="right", overflow="fold")
    for name, row in zip(block.rows, block.cells, strict=True):
        texts = []
        for entry in row:
            text = Text(entry.value, style="bold" if entry.best else "")
            texts.append(text.append(f"\n{entry.below}", style="not bold dim") if entry.below else text)
        table.add_row(Text(name), *texts)
    return table
