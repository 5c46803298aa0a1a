"""Report on the trials of a search: the best trials, and the expected result for each number of trials.

The latter is drawn with one curve for each gate (COMET, appendix F).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from mtl.analysis.figures import look
from mtl.files.escaping import escape_mathtext
from mtl.files.formatting import number
from mtl.files.tables import Table
from mtl.report.page import Section, picture
from mtl.report.runs import FINISHED, Runs, numbers, read_results
from mtl.report.section import missing, section_of
from mtl.report.statistics import Value, defined, gain

BEST_TRIALS_FRACTION = 0.05  # the share of the trials, the best by validation, that COMET's tables average
PRUNED = "pruned"  # state of a run
SIZES = (1, 2, *range(5, 251, 5))  # numbers of trials, as in COMET
_SIZE = (5.2, 3.6)  # inches, without the legend
_WIDE = 10  # the scale is logarithmic if the largest value is more than this many times the smallest
_LABELLED = (1, 2, 5, 10, 20, 50, 100, 200)  # of SIZES, on the axis


@dataclass(frozen=True)
class Trials:
    """The trials of the searches of some settings; in ``runs.table``, a state can also be "pruned".

    ``validation`` is the column by which a search chooses, ``test`` the column that it reports. ``higher``: whether
    higher values of both are better. ``importances``: by setting, of each option, the largest first. ``defaults``: by
    setting, the folder of the run without drawn options.
    """

    runs: Runs
    validation: str
    test: str
    higher: bool
    importances: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    defaults: Mapping[str, Path] = field(default_factory=dict)


def gains_over_defaults(trials: Trials) -> list[str]:
    """Say for each setting whose defaults were tried what its search gained over them, and how far that is certain."""
    lines = []
    for setting, folder in trials.defaults.items():
        results = read_results(folder)[0]
        table = trials.runs.table.filter(setting=setting).with_row_index("trial")
        done = table.filter((pl.col("state") == FINISHED) & pl.col(trials.validation).is_finite())
        if results is None or results.best is None or done.is_empty():
            which = "no trial has finished" if done.is_empty() else "the run with the defaults has not finished"
            lines.append(f"{setting}: {which}, so it is unknown what the search gained.")
            continue
        best = done.sort(trials.validation, descending=trials.higher, maintain_order=True).row(0, named=True)
        defaults = {trials.validation: results.best, trials.test: numbers(results).get(trials.test)}
        chosen, tested = (
            f"{_name(column)} {_against(best.get(column), value, trials.higher)}" for column, value in defaults.items()
        )
        lines.append(
            f"{setting}: trial {best['trial']} is the best of {len(done)}. Against the defaults: {chosen}, which is "
            f"optimistic, since these rows chose it among {len(done)}; {tested}. One run of each: other seeds change "
            "both."
        )
    return lines


def _against(value: Value, default: Value, higher: bool) -> str:
    sizes = [number(next(iter(defined([size])), None)) for size in (value, default)]
    change = gain(value, default, higher)
    percent = "undefined" if math.isnan(change) else f"{number(abs(change), 2)} % {'worse' if change < 0 else 'better'}"
    return f"{sizes[0]} against {sizes[1]}, {percent if change else 'equal'}"


def importance_of(trials: Trials) -> Table | None:
    """Return the importance of the options of each search that has enough trials; None if there is none."""
    columns = {setting: shares for setting, shares in trials.importances.items() if shares}
    names = dict.fromkeys(name for shares in columns.values() for name in shares)
    note = (
        "Share of each option in what sets the best tenth of the trials apart from all, by validation rows (Optuna's "
        "PED-ANOVA; Watanabe et al. 2023). Rough with fewer than a hundred trials; options that act together share it."
    )
    rows = [[name, *(f"{shares[name]:.0%}" if name in shares else "" for shares in columns.values())] for name in names]
    return Table(["option", *columns], rows, "Importance of the options", [note]) if rows else None


def best_trials(trials: Trials, best: float = BEST_TRIALS_FRACTION) -> tuple[Runs, list[str]]:
    """Return the ``best`` of each setting's trials by validation, best first, and a sentence on each setting.

    ``best``: their number, or a share below 1. The share is of all trials that have ended, with or without success,
    rounded down but at least one trial. A setting without any value keeps all its trials, so that the report shows it.
    """
    kept, notes = [], []
    for group in trials.runs.table.partition_by("setting", maintain_order=True):
        states = group["state"].to_list()
        usable = group.filter((pl.col("state") == FINISHED) & pl.col(trials.validation).is_finite())
        ended = sum(state != "unfinished" for state in states)
        wanted = best if best >= 1 else max(1, math.floor(best * ended + 1e-9))  # 0.07 * 100 is less than 7
        count = min(len(usable), int(wanted))
        ordered = usable.sort(trials.validation, descending=trials.higher, maintain_order=True)
        kept.append(ordered.head(count) if count else group)
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
        notes.append(f"{group['setting'][0]}: the best {count} of {len(group)} trials ({counts}).")
    return replace(trials.runs, table=pl.concat(kept)), notes


def budgets_of(trials: Trials) -> list[Budget]:
    """Return the budget of each setting that has a finished trial."""
    if trials.test not in trials.runs.table.columns:
        return []
    done = trials.runs.table.filter(state=FINISHED).select("setting", trials.validation, trials.test)
    groups = done.group_by("setting", maintain_order=True)
    budgets = [budget(str(name), group.drop("setting").rows(), trials.higher) for (name,), group in groups]
    return [budget for budget in budgets if budget]


def section_of_trials(
    trials: Trials, title: str, also: Sequence[str] = (), best: float = BEST_TRIALS_FRACTION, **options: Any
) -> Section:
    """Return the section on a search: its best trials and, with two or more trials, its tuning budget.

    ``best``: as in ``best_trials``; ``also`` and ``options``: as in ``section_of``.
    """
    runs, notes = best_trials(trials, best)
    section = section_of(runs, title, also=[trials.validation, *also], unit="trials", **options)
    counted = f"{best:.0f} trials" if best >= 1 else f"{best:.0%} of its trials"
    rule = f"Of each setting the best {counted} by {_name(trials.validation)}{', at least one' if best < 1 else ''}:"
    others = [note for note in section.notes if note not in missing(runs)]
    tables = [*section.tables, *filter(None, [importance_of(trials)])]
    notes = [rule, *notes, *missing(trials.runs), *others]
    section = replace(section, lines=gains_over_defaults(trials), tables=tables, notes=notes)
    budgets = budgets_of(trials)
    if max((budget.whole for budget in budgets), default=0) < 2:
        return section
    names = _name(trials.validation), _name(trials.test)
    caption = (
        f"For each number of trials: the {names[0]} to expect, and that trial's {names[1]} (COMET, appendix F; exact "
        "expectations over draws with replacement instead of resamples). Behind each name: the finished trials that "
        "are drawn from."
    )
    titles = f"{names[0]} to expect", f"{names[1]} of that trial"
    columns = [*zip(("validation", "test"), names, titles, (caption, ""), strict=True)]
    drawn = [picture(draw(budgets, attribute, title), text, title) for attribute, _, title, text in columns]
    further = [ratios(budgets, column, name, trials.higher) for column, name, *_ in columns if len(budgets) > 1]
    return replace(section, tables=[*section.tables, *further], figures=[*drawn, *section.figures])


def _name(column: str) -> str:
    """Return the name of a column for the reader, such as "validation loss"."""
    return column.replace("val/", "validation ", 1).replace("/", " ").replace("_", " ")


@dataclass(frozen=True)
class Budget:
    """Expected values of the best trial of a search with 1, 2, ... trials, up to its whole budget.

    The best trial is the one with the best ``validation`` value; ``test`` is the test value of the same trial.
    """

    setting: str
    validation: list[float]
    test: list[float]

    @property
    def whole(self) -> int:
        """The number of trials of the whole budget."""
        return len(self.validation)


@cache
def chances(trials: int) -> np.ndarray:
    """Return the probabilities ``[drawn, trials]`` that the best of 1, 2, ... drawn is the best, second, ... of all.

    With replacement, the rank of the best exceeds i with probability (1 - i / trials) ** drawn. COMET estimates these
    probabilities by 1000 resamples. At most the largest of ``SIZES`` are drawn.
    """
    drawn = np.arange(1, min(trials, SIZES[-1]) + 1)[:, None]
    above = (1 - np.arange(trials + 1) / trials) ** drawn
    return np.asarray(above[:, :-1] - above[:, 1:])


def budget(setting: str, pairs: Sequence[tuple[Value, Value]], higher: bool) -> Budget | None:
    """Return the budget of a search among trials with these (validation, test) values; None without any.

    ``higher``: whether higher validation values are better. Trials that lack a value are left out. The whole budget is
    the number of trials, at most the largest of ``SIZES``.
    """
    if not len(finite := both_known(pairs)):
        return None
    validation, test = finite[np.argsort(finite[:, 0] * (-1 if higher else 1), stable=True)].T
    weights = chances(len(finite))
    return Budget(setting, (weights @ validation).tolist(), (weights @ test).tolist())


def both_known(pairs: Sequence[tuple[Value, Value]]) -> np.ndarray:
    """Return the pairs whose values are both finite, ``[N, 2]``."""
    finite = [(a, b) for a, b in pairs if a is not None and b is not None and math.isfinite(a) and math.isfinite(b)]
    return np.array(finite).reshape(-1, 2)


def resampled(pairs: np.ndarray, higher: bool, random: np.random.Generator, resamples: int) -> np.ndarray:
    """Return the expected test values of ``resamples`` bootstrap samples of a search's trials, by number of trials.

    ``pairs [N, 2]``: validation and test values; ``higher``: whether higher validation values are better. The result
    is ``[resamples, N]``, or with as many columns as the largest of ``SIZES``.
    """
    drawn = pairs[random.integers(len(pairs), size=(resamples, len(pairs)))]  # [resamples, N, 2]
    order = np.argsort(drawn[..., 0] * (-1 if higher else 1), 1)
    return np.asarray(np.take_along_axis(drawn[..., 1], order, 1) @ chances(len(pairs)).T)


def required_trials(values: Sequence[float], target: float, higher: bool) -> int | None:
    """Return the least number of trials whose expected value reaches ``target``; None if none does."""
    reached = (size for size, value in enumerate(values, 1) if (value >= target if higher else value <= target))
    return next(reached, None)


def ratios(budgets: Sequence[Budget], attribute: str, name: str, higher: bool) -> Table:
    """Return how many trials each setting needs to reach the result of each other setting with its whole budget.

    ``attribute``: "validation" or "test"; ``name``: the name of this value for the reader.
    """
    rows = []
    for budget in budgets:
        cells = []
        for other in budgets:
            needed = required_trials(getattr(budget, attribute), getattr(other, attribute)[-1], higher)
            share = "" if needed is None else f"{needed} ({number(other.whole / needed, 3)}x fewer)"
            cells.append("-" if budget is other else share or f"not with {budget.whole}")
        rows.append([budget.setting, *cells])
    header = ["trials of", *(f"for {other.setting} with {other.whole}" for other in budgets)]
    note = f"The least number of trials with which the row's expected {name} is at least as good as the column's."
    return Table(header, rows, f"Tuning budget: {name}", [note])


def draw(budgets: Sequence[Budget], attribute: str, title: str) -> Figure:
    """Draw the ``attribute`` of ``budgets``, "validation" or "test", over the number of trials, a line for each."""
    figure = Figure(figsize=_SIZE, layout="tight")
    axes = figure.add_subplot()
    most = max(budget.whole for budget in budgets)
    all_values = [value for budget in budgets for value in getattr(budget, attribute)]
    for index, budget in enumerate(budgets):
        sizes = [size for size in SIZES if size <= budget.whole]
        values = [getattr(budget, attribute)[size - 1] for size in sizes]
        label = escape_mathtext(f"{budget.setting} ({budget.whole})")
        axes.plot(sizes, values, marker=".", label=label, **look(index))
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([size for size in _LABELLED if size <= most]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set(xlabel="number of trials of the search", title=escape_mathtext(title))
    if min(all_values) > 0 and max(all_values) > _WIDE * min(all_values):  # runs that diverged would flatten all else
        axes.set_yscale("log")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, title="gate (trials)", title_fontsize=8)
    return figure
