"""Write a report to files, and print the comparison of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl
from rich.console import Console
from rich.text import Text

from mtl.report.compare import Comparison
from mtl.report.page import Section, render, render_markdown
from mtl.report.runs import Runs
from mtl.report.tables import console_tables, explanation
from mtl.writing import write_text

CSV, MARKDOWN, PAGE = "summary.csv", "summary.md", "report.html"


def write_report(title: str, intro: str, sections: Sequence[Section], runs: Sequence[Runs], target: Path) -> None:
    """Write ``report.html``, ``summary.md`` and ``summary.csv``, with a row for each of ``runs``, into ``target``."""
    table = pl.concat([each.table for each in runs], how="diagonal_relaxed")
    write_text(target / CSV, table.write_csv())
    write_text(target / MARKDOWN, render_markdown(title, intro, sections))
    write_text(target / PAGE, render(title, intro, sections))


def show(comparison: Comparison, notes: Sequence[str], files: str) -> None:
    """Print the tables in the width of the console (80 if unknown), and ``notes`` below them.

    ``files``: the files with all results, for the last line.
    """
    console = Console(highlight=False)
    mark, best = ("", "in bold") if console.is_terminal else ("<", "with <")
    console.print()
    for table in console_tables(comparison, console.width, mark):
        console.print(table)
        console.print()
    for line in explanation(comparison, best):
        console.print(Text(line, style="dim"))
    for line in notes:
        console.print(Text(line), soft_wrap=True)
    console.print(Text(files, style="dim"), soft_wrap=True)
