"""Write the comparison of runs to files, and print it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from mtl.records import write_text
from mtl.report.compare import Comparison, compare
from mtl.report.runs import Runs, read_runs
from mtl.report.tables import console_tables, explanation, markdown, missing


def write(folders: Sequence[Path], target: Path, also: Sequence[str] = ()) -> tuple[Runs, Comparison]:
    """Compare the runs in ``folders``; write ``summary.csv`` with a row for each run, and the table as ``summary.md``.

    ``also``: further columns of the table. Raises InputError if there is no run, or no such column.
    """
    runs = read_runs(folders)
    comparison = compare(runs, also)
    write_text(target / "summary.csv", runs.table.write_csv())
    write_text(target / "summary.md", "\n".join([markdown(comparison), *(f"* {line}" for line in missing(runs)), ""]))
    return runs, comparison


def show(runs: Runs, comparison: Comparison, target: Path) -> None:
    """Print the tables for the width of the console, which is 80 where it is not known, and what has not finished."""
    console = Console(highlight=False)
    mark, best = ("", "in bold") if console.is_terminal else ("*", "with *")
    console.print()
    for table in console_tables(comparison, console.width, mark):
        console.print(table)
        console.print()
    for line in explanation(comparison, best):
        console.print(Text(line, style="dim"))
    for line in missing(runs):
        console.print(Text(line))
    console.print(f"[dim]{target / 'summary.csv'}, summary.md[/dim]", soft_wrap=True)
