"""Lay out a comparison as tables for the console, of any width, and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import polars as pl
from rich import box
from rich.table import Table
from rich.text import Text

from mtl.files.literals import markdown, printable
from mtl.report.compare import Comparison
from mtl.report.grid import Entry, Listing, Published, grid
from mtl.report.runs import FINISHED, Runs
from mtl.report.statistics import FEWEST, SIGNIFICANCE

_MOST_NAMED = 10  # unfinished runs that are named; summary.csv has all
_LONGEST_REASON = 300  # characters
_MOST_COLUMNS = 9  # columns of a table in Markdown or HTML


def console_tables(comparison: Comparison, width: int, mark: str) -> list[Table]:
    """Return tables of at most ``width`` characters, with settings as rows, or as columns if that takes fewer tables.

    ``mark`` follows the best values, besides their bold type.
    """
    upright = grid(comparison)
    space = " " * len(mark)  # in place of the mark, so that numbers stay aligned

    def marked(entry: Entry) -> Entry:
        below = tuple(line + space for line in entry.below)
        return entry._replace(value=entry.value + (mark if entry.best else space), below=below)

    upright = replace(upright, rows=[[*row[:2], *map(marked, row[2:])] for row in upright.rows])
    choices = [each.blocks(width) for each in (upright, upright.transposed(f"{upright.header[0]} →"))]
    return [_table(block) for block in min(choices, key=len)]


def written(comparison: Comparison, published: Published | None = None) -> Listing:
    """Return the detailed table and its explanation, with settings as columns if there are many quantities."""
    upright = replace(grid(comparison, True, published), notes=explanation(comparison, "in bold"))
    return upright if len(upright.header) <= _MOST_COLUMNS else upright.transposed(upright.header[0])


def in_markdown(table: Listing) -> str:
    """Return a table in Markdown, with its title and notes, and the best values in bold."""

    def text(entry: Entry) -> str:
        value = f"**{markdown(entry.value)}**" if entry.best else markdown(entry.value)
        return "<br>".join([value, *(line.replace("*", "\\*") for line in entry.below)])

    rows = [[text(entry) for entry in row] for row in table.rows]
    lines = [list(map(markdown, table.header)), ["---"] * len(table.header), *rows]
    cells = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    title = f"### {markdown(table.title)}" if table.title else ""
    return "\n\n".join(part for part in (title, cells, bullets(table.notes)) if part)


def bullets(notes: Sequence[str]) -> str:
    """Return sentences as a list in Markdown."""
    return "\n".join(f"* {markdown(note)}" for note in notes)


def explanation(comparison: Comparison, best: str) -> list[str]:
    """Return the sentences that belong below a table; ``best`` says how the best values are marked."""
    first, means = next(iter(comparison.runs)), [mean for each in comparison.quantities for mean in each.means.values()]
    lines = [
        f"Test of the checkpoint that the run chose: mean ± standard error over {comparison.unit}"
        + (f"; best {best}." if len(comparison.runs) > 1 else ".")
    ]
    if apart := [each for quantity in comparison.quantities for each in quantity.differences.values() if each]:
        paired = {bool(each.pairs) for each in apart}
        how = "over runs of the same seeds" if any(paired) else "of the means"
        how += f" where there are {FEWEST}" if len(paired) > 1 else ""
        names = {True: "Student's paired t test", False: "Welch's t test"}
        tests = {names[bool(each.pairs)] for each in apart if each.p is not None and not each.undefined}
        line = f"Second line: difference to {first}, {how}"
        if tests:
            line += f"; p: {' or '.join(sorted(tests))}, two-sided; *: p < {SIGNIFICANCE:g}, not corrected for the "
            line += "number of settings and columns"
        lines.append(f"{line}.")
    if any(mean.undefined for mean in means):
        lines.append(
            "(m/n): only m of n runs have a defined value, which the mean is of; such a setting is never best and "
            "not tested."
        )
    return [*lines, *comparison.notes]


def missing(runs: Runs) -> list[str]:
    """Return a line for each unfinished run: its folder, its state, and its last message."""
    rows = runs.table.filter(pl.col("state") != FINISHED).select("run", "state", "reason").rows()
    lines = [f"{Path(run).name} {state}: {reason or 'no message'}" for run, state, reason in rows]
    if not lines:
        return []
    more = [f"... and {len(lines) - _MOST_NAMED} more, in summary.csv"] if len(lines) > _MOST_NAMED else []
    head = f"{len(lines)} of {len(runs.table)} runs have not finished:"
    return [head, *(line[:_LONGEST_REASON] for line in lines[:_MOST_NAMED]), *more]


def _table(block: Listing) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, (name, width) in enumerate(zip(block.header, block.widths(), strict=True)):
        table.add_column(Text(printable(name)), width=width, justify="right" if number else "left", overflow="fold")
    for row in block.rows:
        texts = []
        for entry in row:
            text = Text(printable(entry.value), style="bold" if entry.best else "")
            texts.append(text.append("".join(f"\n{line}" for line in entry.below), style="not bold dim"))
        table.add_row(*texts)
    return table
