"""Write what the runs of ``mtl share`` show: answers on the console, a page, and JSON for programs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mtl.report.grid import Listing, listing, p_text
from mtl.report.page import Section, picture_of
from mtl.report.runs import FINISHED, read_named_runs
from mtl.report.section import section_of
from mtl.report.statistics import DELTA
from mtl.report.summary import PAGE, heading, write_report
from mtl.sharing.answer import ALONE, CLOSE, GROUPS, TOGETHER, Gain, answer, recommended
from mtl.sharing.settings import Comparison
from mtl.writing import write_json

RULE = (
    f"Gains of the main metric on test rows over training alone, in %: mean ± standard error over pairs of runs on "
    f"one split of the rows. Share, do not share: p < 0.05 by Student's paired t test with Holm's correction for all "
    f"tasks together and in groups, with gates, or in pairs; alone is as good: 95 % interval within ±{CLOSE:g} %."
)


def write(found: Comparison, words: Sequence[str]) -> dict[str, Any]:
    """Write ``report.html``, ``summary.md``, ``summary.csv`` and ``share.json``, print the answers, and return them.

    ``words``: those of ``mtl share``.
    """
    runs = read_named_runs(found.runs(found.settings))
    shared = {name: each for name, each in found.settings.items() if name in (TOGETHER, GROUPS)}
    gated = {name: each for name, each in found.settings.items() if name not in (ALONE, *shared)}
    sharing, gates, pairs = (found.gains_over_alone(settings) for settings in (shared, gated, found.pairs))
    answers = {task: answer(task, [*sharing, *pairs], gates, len(found.tasks)) for task in found.tasks}
    gains = [*sharing, *gates, *pairs]
    done = runs.table.filter(state=FINISHED)
    deltas = {name: runs.values(name, DELTA) for name in found.settings}
    chosen, why = recommended(deltas)
    command = shlex.join(["mtl", "train", *found.settings[chosen].definition.words, f"seed={found.seeds.start}"])
    affinity = found.affinity()
    groups = [[found.tasks[task] for task in group] for group in found.groups]
    by = "the gains of pairs" if found.pairs else "the affinities"
    best = f"groups by {by}: {' | '.join(map(' + '.join, groups))} (mean {found.predicted_gain():.2g} %)"
    lines = [*answers.values(), *([best] if groups else []), f"recommended: {chosen} ({why})"]
    content = {
        "answers": answers,
        "recommended": {"setting": chosen, "command": command},
        "groups": groups,
        "predicted_gain": found.predicted_gain(),
        "gains": [asdict(each) | {"verdict": each.verdict, "advice": each.advice} for each in gains],
        "delta_m": {name: _json([*values.values()]) for name, values in deltas.items() if name != ALONE},
        "affinity": {"tasks": found.tasks, "percent": _json(affinity)},
    }
    write_json(found.folder / "share.json", content)
    text = "\n\n".join([*(f"{line}." for line in lines), command])
    paths = [path / "conflict.png" for path in found.runs({TOGETHER: found.settings[TOGETHER]})]
    figures = [picture_of(path, "Gradients of the tasks in a joint run", True) for path in paths if path.exists()][:1]
    sections = [
        Section("Answers", text, listings=[_table(gains)]),
        Section("Affinities", listings=_matrices(found, affinity), figures=figures),
        section_of(runs, "Settings"),
    ]
    intro = heading([Path(run) for run in runs.table["run"]], shlex.join(["mtl", "share", *words]))
    write_report(f"Should these tasks share? {found.folder.name}", intro, sections, [runs], found.folder)
    console = Console(highlight=False)
    console.print("\n".join(["", *lines]), markup=False)
    console.print(command, soft_wrap=True, markup=False)
    console.print(f"{len(done)} of {len(runs.table)} runs finished: {found.folder / PAGE}", style="dim", soft_wrap=True)
    return content


def _matrices(found: Comparison, affinity: np.ndarray) -> list[Listing]:
    title = "Affinity: fall of the column's loss by a step for the row's task, %"
    note = "TAG's Z(i -> j) (Fifty et al. 2021) on validation rows, mean over the first half of the joint runs."
    if not np.isfinite(affinity).any():
        note += " None was measured: the joint runs have fewer steps than every_steps."
    listings = [_matrix(title, found.tasks, affinity, note)]
    if found.pairs:
        listings.append(_matrix("Gain of the column's task paired with the row's, %", found.tasks, found.gains))
    return listings


def _table(gains: Sequence[Gain]) -> Listing:
    rows = []
    for each in gains:
        ends = "[{:+.2g}, {:+.2g}]".format(*each.interval) if each.interval else "-"
        p = "-" if each.p is None else p_text(each.p)
        rows.append([each.task, each.setting, " + ".join(each.mates), str(each), ends, p, each.verdict])
    return listing("Gains", ["task", "setting", "with", "gain", "95 % interval", "p", "verdict"], rows, [RULE])


def _matrix(title: str, tasks: list[str], values: np.ndarray, *notes: str) -> Listing:
    cells = [[f"{value:+.2g}" if np.isfinite(value) else "-" for value in row] for row in values]
    return listing(title, ["", *tasks], [[task, *row] for task, row in zip(tasks, cells, strict=True)], notes)


def _json(values: Any) -> Any:
    """Return numbers as lists, with None for NaN."""
    numbers = np.array(values, float)
    return np.where(np.isfinite(numbers), numbers, np.array(None)).tolist()
