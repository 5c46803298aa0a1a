"""Write what the runs of ``mtl share`` show: answers on the console, a page, and JSON for programs."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from scipy.stats import spearmanr

from mtl.report.delta import DELTA
from mtl.report.grid import p_text
from mtl.report.heading import heading
from mtl.report.page import Listing, Picture, Section, picture_of
from mtl.report.runs import FINISHED, read_named_runs
from mtl.report.section import section_of
from mtl.report.summary import PAGE, write_report
from mtl.runs.commands import program
from mtl.sharing.answer import ALONE, CLOSE, GROUPS, TOGETHER, Gain, answer, recommended
from mtl.sharing.command import Measured, predicted_gain
from mtl.writing import write_json

JSON = "share.json"
RULE = (
    f"Gains are those of the main metric on test rows over training alone, in %, mean ± standard error over pairs of "
    f"runs of the same seed. Share and do not share: p < 0.05 by Student's paired t test, corrected by Holm's method "
    f"for all tasks and settings of a kind (sharing, gates, pairs); alone is as good: the 95 % interval of the gain "
    f"lies within ±{CLOSE:g} %; otherwise undecided. All numbers are of one split of the rows."
)


def write(found: Measured, words: Sequence[str]) -> dict[str, Any]:
    """Write ``report.html``, ``summary.md``, ``summary.csv`` and ``share.json``, print the answers, and return them.

    ``words``: those of ``mtl share``.
    """
    runs = read_named_runs(found.runs(found.settings))
    shared = {name: each for name, each in found.settings.items() if name in (TOGETHER, GROUPS)}
    gated = {name: each for name, each in found.settings.items() if name not in (ALONE, *shared)}
    settings = {"sharing": shared, "gates": gated, "pairs": found.pairs}
    kinds = {kind: found.gains_over_alone(each) for kind, each in settings.items()}
    sharing, many = [*kinds["sharing"], *kinds["pairs"]], len(found.tasks)
    answers = {task: answer(task, sharing, kinds["gates"], many) for task in found.tasks}
    done = runs.table.filter(state=FINISHED)
    deltas = {name: done.filter(setting=name)[DELTA].to_list() for name in found.settings if DELTA in done.columns}
    chosen, why = recommended(deltas)
    command = shlex.join([*program("train"), *found.settings[chosen].definition.words, f"seed={found.seeds.start}"])
    groups = [[found.tasks[task] for task in group] for group in found.groups]
    by = "the gains of pairs" if found.pairs else "the affinities"
    best = f"groups by {by}: {' | '.join(map(' + '.join, groups))} (mean {predicted_gain(found):.2g} %)"
    lines = [*answers.values(), *([best] if groups else []), f"recommended: {chosen} ({why})"]
    content = {
        "answers": answers,
        "recommended": {"setting": chosen, "command": command},
        "groups": groups,
        "predicted_gain": predicted_gain(found),
        "gains": [
            {"kind": kind, **asdict(each), "verdict": each.verdict, "advice": each.advice}
            for kind, own in kinds.items()
            for each in own
        ],
        "delta_m": {name: list(map(_number, values)) for name, values in deltas.items() if name != ALONE},
        "affinity": {"tasks": found.tasks, "percent": [list(map(_number, row)) for row in found.affinity]},
        "rank_correlation": rank_correlation(found),
    }
    write_json(found.folder / JSON, content)
    sections = [
        Section("Answers", "\n\n".join(f"{line}." for line in lines) + f"\n\n{command}", notes=[RULE]),
        Section("Gains", listings=[_gains(kind, own) for kind, own in kinds.items() if own]),
        Section("Affinities", listings=_matrices(found), figures=_pictures(found)),
        section_of(runs, "Settings"),
    ]
    intro = heading([Path(run) for run in runs.table["run"]], shlex.join(["mtl", "share", *words]))
    write_report(f"Should these tasks share? {found.folder.name}", intro, sections, [runs], found.folder)
    console = Console(highlight=False)
    console.print()
    for line in lines:
        console.print(line, markup=False)
    console.print(command, soft_wrap=True, markup=False)
    console.print(f"{len(found.seeds)} seeds: {found.folder / PAGE}, {JSON}", style="dim", soft_wrap=True)
    return content


def rank_correlation(found: Measured) -> float | None:
    """Return Spearman's correlation of the gains of trained pairs with the affinities; None if undefined."""
    both = np.isfinite(found.gains) & np.isfinite(found.affinity) & ~np.eye(len(found.tasks), dtype=bool)
    some = found.pairs and both.sum() > 2
    return _number(spearmanr(found.affinity[both], found.gains[both]).statistic) if some else None


def _matrices(found: Measured) -> list[Listing]:
    title = "Affinity: fall of the column's loss by a step for the row's task, %"
    note = "TAG's Z(i -> j) (Fifty et al. 2021) on validation rows, mean over the first half of the joint runs."
    if not np.isfinite(found.affinity).any():
        note += " None was measured: the joint runs have fewer steps than every_steps."
    listings = [_matrix(title, found.tasks, found.affinity, note)]
    if found.pairs:
        title = "Gain of the column's task in a pair with the row's, %"
        note = f"Spearman's rank correlation with the affinities: {_text(rank_correlation(found))}."
        listings.append(_matrix(title, found.tasks, found.gains, note))
    return listings


def _pictures(found: Measured) -> list[Picture]:
    paths = [path / "conflict.png" for path in found.runs({TOGETHER: found.settings[TOGETHER]})]
    return [picture_of(path, "Gradients of the tasks in the joint run", True) for path in paths if path.exists()][:1]


def _gains(kind: str, own: Sequence[Gain]) -> Listing:
    rows = []
    for each in own:
        ends = "[{:+.2g}, {:+.2g}]".format(*each.interval) if each.interval else "-"
        p = "-" if each.p is None else p_text(each.p)
        rows.append([each.task, each.setting, " + ".join(each.mates), str(each), ends, p, each.verdict])
    return Listing(kind.capitalize(), ["task", "setting", "with", "gain", "95 % interval", "p", "verdict"], rows)


def _matrix(title: str, tasks: list[str], values: np.ndarray, note: str) -> Listing:
    rows = [[task, *map(_text, row)] for task, row in zip(tasks, values, strict=True)]
    return Listing(title, ["", *tasks], rows, [note])


def _text(value: float | None) -> str:
    return "-" if _number(value) is None else f"{value:+.2g}"


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
