"""Print what a section of a page shows, and say where the numbers of runs come from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from mtl.checks import join_some
from mtl.files.escaping import escape_control
from mtl.files.formatting import duration
from mtl.report.page import Section
from mtl.report.runs import Results, command, read_results


def show(section: Section, files: str) -> None:
    """Print what a section shows, in the width of the console (80 if unknown).

    ``files``: the files with all results, for the last line.
    """
    console = Console(highlight=False)
    console.print()
    if section.comparison and (sentence := section.comparison.sentence()):
        console.print(Text(escape_control(sentence), style="bold"), "", sep="\n")
    if section.lines:
        console.print(*(Text(escape_control(line)) for line in section.lines), "", sep="\n")
    for table in section.tables[:1]:
        fitted = table.fitting(console.width)
        console.print(fitted, "", *(Text(escape_control(line), style="dim") for line in fitted.notes), sep="\n")
    for line in section.notes:
        console.print(Text(escape_control(line)), soft_wrap=True)
    console.print(Text(escape_control(files), style="dim"), soft_wrap=True)


def describe_runs(runs: Sequence[Path], made_by: str = "") -> list[str]:
    """Return lines for the provenance of a page, on the finished ones of these run folders; none without any.

    ``made_by``: the command that started all of them, if there is one, in place of their own commands.
    """
    finished = [(path, results) for path in runs if (results := read_results(path)[0])]
    if not finished:
        return []
    days = sorted(results.finished[:16].replace("T", " ") for _, results in finished if results.finished)
    when = "" if not days else f", {days[0]}" if days[0] == days[-1] else f", {days[0]} to {days[-1]}"
    lines = {
        "Runs": f"{len(finished)} of {len(runs)} finished{when}.",
        "Budget": _budget([results for _, results in finished]),
        "Data": join_some(_data(path, results) for path, results in finished),
        "Code": join_some(_code(results) for _, results in finished),
        "Command": made_by or join_some(results.command for _, results in finished),
    }
    return [f"{name}: {escape_control(text)}" for name, text in lines.items() if text]


def _budget(results: Sequence[Results]) -> str:
    """Return the epochs that the runs trained and the time they took; validation counts, reading data does not."""
    epochs = [int(result.epochs) for result in results if result.epochs]
    if not epochs:
        return ""
    seconds = sum((result.epochs or 0) * (result.seconds_per_epoch or 0) for result in results)
    span = f"{min(epochs)}" if min(epochs) == max(epochs) else f"{min(epochs)} to {max(epochs)}"
    return f"{span} epochs a run, {duration(seconds)} of training in all."


def _data(run: Path, results: Results) -> str:
    name = command(run).choices.get("data", "unnamed")
    rows = {split: sum(n.values()) if isinstance(n, dict) else n for split, n in results.data.rows.items()}
    counts = ", ".join(f"{count:,} {split}" for split, count in rows.items())
    files = ", ".join(results.data.files)
    return f"{name}{f' ({files})' if files else ''}{f', rows: {counts}' if counts else ''}"


def _code(results: Results) -> str:
    commit, _, dirty = (results.versions.get("commit") or "").partition("-")
    names = {"mtl": "mtl", "python": "Python", "torch": "torch", "pytorch_lightning": "Lightning"}
    programs = [f"{name} {results.versions[key]}" for key, name in names.items() if results.versions.get(key)]
    changed = " with local changes" if dirty else ""
    return ", ".join([*programs[:1], *([f"commit {commit[:12]}{changed}"] if commit else []), *programs[1:]])
