"""Write what the runs of ``mtl share`` show: answers on the console, a page, and JSON for programs."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mtl.report.delta import DELTA
from mtl.report.grid import p_text
from mtl.report.heading import heading
from mtl.report.page import Listing, Section, picture_of
from mtl.report.runs import FINISHED, Runs, read_named_runs
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


def write(found: Measured) -> dict[str, Any]:
    """Write ``report.html``, ``summary.md``, ``summary.csv`` and ``share.json``, print the answers, and return them."""
    runs = read_named_runs({p: (n, s) for n, setting in found.settings.items() for s, p in found.runs(setting).items()})
    shared = {name: each for name, each in found.settings.items() if name in (TOGETHER, GROUPS)}
    gated = {name: each for name, each in found.settings.items() if name not in (ALONE, TOGETHER, GROUPS)}
    settings = {"sharing": shared, "gates": gated, "pairs": found.pairs}
    kinds = {kind: found.gains_over_alone(each) for kind, each in settings.items()}
    answers = {
        task: answer(task, kinds["sharing"], kinds["gates"], kinds["pairs"], len(found.tasks)) for task in found.tasks
    }
    deltas = {name: delta_of(runs, name) for name in found.settings}
    chosen, why = recommended(deltas)
    setting = found.settings[chosen]
    command = shlex.join([*program("train"), *setting.definition.words, f"seed={found.seeds.start}"])
    named = [[found.tasks[task] for task in group] for group in found.groups]
    best = f"{chosen}{': ' + in_words(setting.groups) if chosen == GROUPS else ''}"
    minutes = _minutes(runs)
    lines = [*answers.values(), f"recommended: {best} ({why})", command]
    content = {
        "answers": answers,
        "recommended": {"setting": chosen, "command": command, "groups": setting.groups},
        "groups": named,
        "predicted_gain": _number(predicted_gain(found)) if found.groups else None,
        "gains": [_gain_record(kind, each) for kind, own in kinds.items() for each in own],
        "delta_m": {name: [_number(v) for v in values] for name, values in deltas.items() if name != ALONE},
        "affinity": {"tasks": found.tasks, "percent": [[_number(v) for v in row] for row in found.affinity]},
        "minutes": minutes,
    }
    write_json(found.folder / JSON, content)
    sections = [
        Section("Answers", "\n\n".join(f"{line}." for line in lines[:-1]) + f"\n\n{command}", notes=[RULE]),
        Section("Gains", listings=[_gains_listing(kind, own) for kind, own in kinds.items() if own]),
        Section("Affinities and groups", listings=_listings(found, named), figures=_pictures(found)),
        section_of(runs, "Settings"),
    ]
    intro = heading([Path(run) for run in runs.table["run"]])
    write_report(f"Should these tasks share? {found.title}", intro, sections, [runs], found.folder)
    console = Console(highlight=False)
    console.print()
    for line in lines:
        console.print(line, soft_wrap=line == command, markup=False)
    console.print(
        f"{len(found.seeds)} seeds, {minutes:.1f} minutes of training: {found.folder / PAGE}, {JSON}", style="dim"
    )
    return content


def delta_of(runs: Runs, setting: str) -> list[float | None]:
    """Return delta-m of the finished runs of a setting; [] without any."""
    own = runs.table.filter(setting=setting, state=FINISHED)
    return own[DELTA].to_list() if DELTA in own.columns else []


def in_words(groups: Sequence[Sequence[str]]) -> str:
    """Return groups of tasks as text."""
    return " | ".join(" + ".join(group) for group in groups)


def _listings(found: Measured, named: list[list[str]]) -> list[Listing]:
    title = "Affinity: fall of the column's loss by a step for the row's task, %"
    note = "TAG's Z(i -> j) (Fifty et al. 2021) on validation rows, mean over the joint runs and their training."
    if not np.isfinite(found.affinity).any():
        note += " None was measured: the joint runs have fewer steps than every_steps."
    listings = [_matrix(title, found.tasks, found.affinity, note)]
    if found.pairs:
        listings.append(_matrix("Gain of the column's task in a pair with the row's, %", found.tasks, found.gains))
    if named:
        by = "the gains of pairs" if found.pairs else "the affinities"
        note = (
            f"The partition whose tasks have the largest mean of {by} with their mates, {predicted_gain(found):.3g} %."
        )
        if GROUPS not in found.settings:
            note += f" It is the setting {ALONE if len(named) > 1 else TOGETHER}."
        listings.append(Listing("Groups", ["group"], [[" + ".join(group)] for group in named], [note]))
    return listings


def _pictures(found: Measured) -> list[Any]:
    paths = [path / "conflict.png" for path in found.runs(found.settings[TOGETHER]).values()]
    return [picture_of(path, "Gradients of the tasks in the joint run", True) for path in paths if path.exists()][:1]


def _gains_listing(kind: str, own: Sequence[Gain]) -> Listing:
    rows = []
    for each in own:
        ends = each.interval
        shown = f"[{ends[0]:+.2g}, {ends[1]:+.2g}]" if ends else "-"
        p = "-" if each.p is None else p_text(each.p)
        rows.append(
            [each.task, each.setting.partition("_")[0], " + ".join(each.mates), each.text(), shown, p, each.verdict]
        )
    return Listing(kind.capitalize(), ["task", "setting", "with", "gain", "95 % interval", "p", "verdict"], rows)


def _gain_record(kind: str, each: Gain) -> dict[str, Any]:
    record = {"kind": kind, "setting": each.setting, "task": each.task, "with": list(each.mates)}
    numbers = {"percent": each.found.mean, "standard_error": each.found.error, "p": each.p, "runs": each.found.count}
    return record | numbers | {"interval": each.interval, "verdict": each.verdict, "seeds_needed": each.seeds_needed}


def _minutes(runs: Runs) -> float:
    done = runs.table.filter(state=FINISHED)
    return float((done["epochs"] * done["seconds_per_epoch"]).sum()) / 60 if "epochs" in done.columns else 0.0


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _matrix(title: str, tasks: list[str], values: np.ndarray, *notes: str) -> Listing:
    cells = [[f"{value:+.2g}" if np.isfinite(value) else "-" for value in row] for row in values]
    return Listing(title, ["", *tasks], [[task, *row] for task, row in zip(tasks, cells, strict=True)], notes)
