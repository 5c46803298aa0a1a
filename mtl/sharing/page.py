"""Write what the runs of ``mtl share`` show: answers on the console, a page, and JSON for programs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mtl.analysis.conflicts import EARLY, draw
from mtl.files.formatting import number, p_value
from mtl.files.tables import Table
from mtl.files.writing import write_json
from mtl.report.page import PAGE, Page, Section, picture
from mtl.report.runs import FINISHED, Runs, read_named_runs
from mtl.report.section import section_of
from mtl.report.statistics import DELTA
from mtl.report.summary import describe_runs
from mtl.runs.commands import run_command
from mtl.sharing.answer import (
    ALONE,
    EQUIVALENCE_MARGIN_PERCENT,
    GROUPS,
    TOGETHER,
    SharingGain,
    confirm,
    describe_task,
    in_words,
    recommend,
)
from mtl.sharing.grouping import predicted
from mtl.sharing.many import RULE as RULE_OF_MANY
from mtl.sharing.many import gains_of_many, recommend_joint, tables_of_many
from mtl.sharing.settings import Comparison

RULE = (
    "Gain: by how many percent the main metric is better than if the task is trained alone: mean ± standard error over "
    "pairs of runs of one seed. Validation rows choose one way of sharing and one gate for each task; only these "
    "are compared on test rows. Better, worse: p < 0.05 by Student's paired t test, corrected for the number of tasks "
    f"and choices; as good: the 95 % interval is within ±{EQUIVALENCE_MARGIN_PERCENT:g} %."
)
SPLIT = {
    True: "Each seed splits the rows anew, so the answers hold for other splits of these rows too (corrected as by "
    "Nadeau and Bengio, 2003).",
    False: "All seeds have the same split, so the answers hold for other seeds, not for other rows.",
}


def write(comparison: Comparison, overrides: Sequence[str]) -> dict[str, Any]:
    """Write ``report.html``, ``summary.md``, ``summary.csv`` and ``share.json``, print the answers, and return them.

    ``overrides``: those of ``mtl share``.
    """
    runs = read_named_runs(comparison.runs(comparison.settings))
    if comparison.are_many:
        best, recommendation = recommend_joint(runs)
        tables, command = tables_of_many(runs, comparison.labels), _command(comparison, best)
        recommended = {"setting": best, "command": command}
        gains = gains_of_many(runs, "test")
        content = {"gains_percent": gains, "recommended": recommended, "labels": comparison.labels}
        lines = [recommendation, *filter(None, [comparison.budget_note]), RULE_OF_MANY]
        _write(comparison, runs, content, [Section("Answers", lines, command, tables=tables)], overrides, tables)
        return content
    shared = {name: setting for name, setting in comparison.settings.items() if name in (TOGETHER, GROUPS)}
    gated = {name: setting for name, setting in comparison.settings.items() if name not in (ALONE, *shared)}
    sharing, gates = (comparison.gains_over_alone(settings) for settings in (shared, gated))
    of_sharing, of_gates = (confirm(runs, validation) for validation in (sharing, gates))
    answers = {task: describe_task(task, of_sharing, of_gates, len(comparison.tasks)) for task in comparison.tasks}
    deltas, on_validation = (
        {name: runs.values(name, f"{split}/{DELTA}") for name in comparison.settings} for split in ("test", "val")
    )
    best, why = recommend(on_validation, deltas, runs.overlap)
    command = _command(comparison, best)
    affinity = comparison.affinity()
    groups = [[comparison.tasks[task] for task in group] for group in comparison.groups]
    line = f"Groups of tasks that help each other most in training: {' | '.join(map(' + '.join, groups))}."
    lines = [
        *answers.values(),
        *([line] if groups else []),
        f"Recommended: {in_words(best)}. {why}",
        *filter(None, [comparison.budget_note]),
        SPLIT[comparison.own_splits],
    ]
    content = {
        "answers": answers,
        "recommended": {"setting": best, "command": command},
        "own_splits": comparison.own_splits,
        "groups": groups,
        "predicted_gain": sum(sum(predicted(group, affinity)) for group in comparison.groups) / len(comparison.tasks),
        "gains": [asdict(g) | {"verdict": g.verdict, "advice": g.advice} for g in (*of_sharing, *of_gates)],
        "validation_gains": [asdict(g) for g in (*sharing, *gates)],
        "delta_m": {name: _json([*values.values()]) for name, values in deltas.items() if name != ALONE},
        "affinity": {"tasks": comparison.tasks, "percent": _json(affinity)},
    }
    conflicts = comparison.conflicts()
    figures = [picture(draw(conflicts), "Gradients of the tasks, means over the joint runs")] if conflicts else []
    sections = [
        Section("Answers", lines, command, tables=_tables([*of_sharing, *of_gates], [*sharing, *gates])),
        Section("Affinities", tables=[_affinities(comparison.tasks, affinity)], figures=figures),
    ]
    _write(comparison, runs, content, sections, overrides)
    return content


def _command(comparison: Comparison, setting: str) -> str:
    """Return the command that trains a setting."""
    internal = ("callbacks.", "data.seed=")  # what the comparison measures, and on which splits
    overrides, typed = comparison.settings[setting].overrides, comparison.run_overrides
    kept = [override for override in overrides if override in typed or not override.startswith(internal)]
    return run_command([*kept, f"seed={comparison.seeds.start}"])


def _write(
    comparison: Comparison,
    runs: Runs,
    content: dict[str, Any],
    sections: list[Section],
    overrides: Sequence[str],
    tables: Sequence[Table] = (),
) -> None:
    """Write share.json and the page, and print the first of its ``sections``, the answers, with ``tables``."""
    write_json(comparison.folder / "share.json", content)
    of_all = section_of(runs, "All settings on test rows, which chose nothing", curves={})
    sections.append(replace(of_all, comparison=None))
    provenance = describe_runs([Path(run) for run in runs.table["run"]], shlex.join(["mtl", "share", *overrides]))
    title = f"Should these tasks share? {comparison.folder.name}"
    Page(title, sections, runs.table, provenance).write(comparison.folder)
    console = Console(highlight=False)
    console.print(*tables, "\n".join(["", *sections[0].lines]), sep="\n", markup=False)
    console.print(content["recommended"]["command"], soft_wrap=True, markup=False)
    done = runs.table["state"].to_list().count(FINISHED)
    console.print(f"{done} of {len(runs.table)} runs finished: {comparison.folder / PAGE}", style="dim", soft_wrap=True)


def _affinities(tasks: list[str], affinity: np.ndarray) -> Table:
    note = f"TAG's affinity (Fifty et al. 2021) on validation rows, mean over the first {EARLY:.0%} of the joint runs."
    if not np.isfinite(affinity).any():
        note += " None was measured: the joint runs have fewer steps than every_n_steps."
    others = np.where(np.eye(len(tasks), dtype=bool), np.nan, affinity)  # of a task to itself says nothing here
    cells = [[number(value, 2, "+") if np.isfinite(value) else "-" for value in row] for row in others]
    rows = [[task, *row] for task, row in zip(tasks, cells, strict=True)]
    title = "Affinity: by how many % a training step for the row's task lowers the column's loss"
    return Table(["", *tasks], rows, title, [note])


def _tables(tested: Sequence[SharingGain], validation: Sequence[SharingGain]) -> list[Table]:
    header = ["task", "setting", "with", "gain"]
    rows, choices = ([[g.task, g.setting, " + ".join(g.partners), str(g)] for g in x] for x in (tested, validation))
    for row, gain in zip(rows, tested, strict=True):
        ends = f"[{', '.join(number(end, 2, '+') for end in gain.interval)}]" if gain.interval else "-"
        row += [ends, p_value(gain.p), gain.verdict]
    return [
        Table([*header, "95 % interval", "p", "verdict"], rows, "Gains on test rows", [RULE]),
        Table(header, choices, "Gains on validation rows, which choose"),
    ]


def _json(values: Any) -> Any:
    """Return numbers as lists, with None for NaN."""
    numbers = np.array(values, float)
    return np.where(np.isfinite(numbers), numbers, np.array(None)).tolist()
