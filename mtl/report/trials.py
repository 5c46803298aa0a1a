"""Report on the trials of a search: the best trials, and the expected result for each number of trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from mtl.report import budget
from mtl.report.page import Section, picture
from mtl.report.runs import FINISHED, Runs
from mtl.report.section import section_of
from mtl.report.tables import missing

SHARE = 0.05  # the share of the trials, the best by validation, that COMET's tables average
PRUNED = "pruned"  # state of a run


@dataclass(frozen=True)
class Trials:
    """The trials of the searches of some settings; in ``runs.table``, a state can also be "pruned".

    ``validation`` is the column by which a search chooses, ``test`` the column that it reports. ``higher``: whether
    higher values of both are better.
    """

    runs: Runs
    validation: str
    test: str
    higher: bool


def best_trials(trials: Trials, best: float = SHARE) -> tuple[Runs, list[str]]:
    """Return the ``best`` of each setting's trials by validation, best first, and a sentence on each setting.

    ``best``: their number, or a share below 1. The share is of all trials that have ended, with or without success,
    rounded down but at least one trial. A setting without any value keeps all its trials, so that the report shows it.
    """
    kept, notes = [], []
    for group in trials.runs.table.partition_by("setting", maintain_order=True):
        states = group["state"].to_list()
        known = group.filter((pl.col("state") == FINISHED) & pl.col(trials.validation).is_finite())
        ended = sum(state != "unfinished" for state in states)
        wanted = best if best >= 1 else max(1, math.floor(best * ended + 1e-9))  # 0.07 * 100 is less than 7
        count = min(len(known), int(wanted))
        ordered = known.sort(trials.validation, descending=trials.higher, maintain_order=True)
        kept.append(ordered.head(count) if count else group)
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
        notes.append(f"{group['setting'][0]}: the best {count} of {len(group)} trials ({counts}).")
    return replace(trials.runs, table=pl.concat(kept)), notes


def budgets_of(trials: Trials) -> list[budget.Budget]:
    """Return the budget of each setting that has a finished trial."""
    if trials.test not in trials.runs.table.columns:
        return []
    done = trials.runs.table.filter(state=FINISHED).select("setting", trials.validation, trials.test)
    groups = done.group_by("setting", maintain_order=True)
    found = [budget.budget(str(name), group.drop("setting").rows(), trials.higher) for (name,), group in groups]
    return [each for each in found if each]


def section_of_trials(
    trials: Trials, title: str, also: Sequence[str] = (), best: float = SHARE, **options: Any
) -> Section:
    """Return the section on a search: its best trials and, with two or more trials, its tuning budget.

    ``best``: as in ``best_trials``; ``also`` and ``options``: as in ``section_of``.
    """
    runs, notes = best_trials(trials, best)
    section = section_of(runs, title, also=[trials.validation, *also], unit="trials", **options)
    counted = f"{best:.0f} trials" if best >= 1 else f"{best:.0%} of its trials"
    rule = f"Of each setting the best {counted} by {_name(trials.validation)}{', at least one' if best < 1 else ''}:"
    others = [note for note in section.notes if note not in missing(runs)]
    section = replace(section, notes=[rule, *notes, *missing(trials.runs), *others])
    found = budgets_of(trials)
    if max((each.whole for each in found), default=0) < 2:
        return section
    names = _name(trials.validation), _name(trials.test)
    caption = (
        f"For each number of trials: the {names[0]} to expect, and that trial's {names[1]} (COMET, appendix F; exact "
        "expectations over draws with replacement instead of resamples). Behind each name: the finished trials that "
        "are drawn from."
    )
    figure = picture(budget.draw(found, *names), caption)
    columns = zip(("validation", "test"), names, strict=True) if len(found) > 1 else ()
    tables = [budget.ratios(found, attribute, name, trials.higher) for attribute, name in columns]
    return replace(section, listings=[*section.listings, *tables], figures=[figure, *section.figures])


def _name(column: str) -> str:
    """Return the name of a column for the reader."""
    return column.removeprefix("best ").replace("val_", "validation ").replace("_", " ")
