"""Compare settings: the quantities shown, their means over seeds, and the differences to the first setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from mtl.checks import InputError
from mtl.report.runs import FINISHED, Runs
from mtl.report.statistics import DELTA, FEWEST, NOTE, TITLE, Difference, Summary, Values, difference, summarise

MOST_TASKS = 8  # up to this many, each task is shown; otherwise the mean over tasks
SPLITS = (
    "Each data.seed is a random split of the same rows: errors and p-values have Nadeau and Bengio's correction (2003) "
    "for training rows in common."
)
AVERAGES = ("test average", "test small_average")


@dataclass(frozen=True)
class Quantity:
    """A column of the table of runs: its name for the reader, and whether higher values are better (None: unknown).

    ``values``: by setting, as ``Runs.values`` returns them. ``overlap``: as in ``summarise``.
    """

    name: str
    column: str
    higher: bool | None
    values: Mapping[str, Values] = field(default_factory=dict)
    overlap: float = 0.0

    @cached_property
    def means(self) -> dict[str, Summary]:
        """The mean of each setting."""
        return {name: summarise(list(own.values()), 1.0, self.overlap) for name, own in self.values.items()}

    @cached_property
    def differences(self) -> dict[str, Difference | None]:
        """The difference of each other setting to the first one."""
        first, *others = self.values
        return {name: difference(self.values[name], self.values[first], 1.0, self.overlap) for name in others}

    @cached_property
    def best(self) -> set[str]:
        """The settings with the best mean; none if the direction is unknown or all means are equal.

        A setting with an undefined value, such as the loss of a run that diverged, is never the best.
        """
        known = {name: v.mean for name, v in self.means.items() if v.mean is not None and not v.undefined}
        if self.higher is None or not known:
            return set()
        best = (max if self.higher else min)(known.values())
        found = {name for name, mean in known.items() if mean == best}
        return found if len(found) < len(self.values) else set()


@dataclass(frozen=True)
class Comparison:
    """Settings side by side, in the order of their runs; differences are to the first setting.

    ``runs``: for each setting, the number of finished runs and of all runs. ``notes`` say what the quantities leave
    out. ``unit``: what the runs of a setting are called.
    """

    heading: str
    runs: dict[str, tuple[int, int]]
    quantities: list[Quantity]
    notes: list[str]
    unit: str


def compare(runs: Runs, also: Sequence[str] = (), columns: Sequence[str] = (), unit: str = "seeds") -> Comparison:
    """Compare all settings by the loss and the main metrics, or only by the given ``columns`` of the table.

    ``also`` names further columns, with or without "test "; InputError for one that no run has. Entries of ``columns``
    that no run has (yet) are left out. ``unit``: what the runs of a setting are called, in the plural.
    """
    groups = {str(name): group for (name,), group in runs.table.group_by("setting", maintain_order=True)}
    counts = {name: (group["state"].to_list().count(FINISHED), len(group)) for name, group in groups.items()}

    def measured(quantities: Sequence[Quantity]) -> list[Quantity]:
        known = [quantity for quantity in quantities if quantity.column in runs.table.columns]
        found = {each.column: {name: runs.values(name, each.column) for name in groups} for each in known}
        return [replace(each, values=found[each.column], overlap=runs.overlap) for each in known]

    shown, notes = _chosen(runs, columns) if columns else _main(runs)
    notes += [SPLITS] if runs.overlap else []
    shown = measured([*shown, *(_also(runs, name) for name in also)])
    first, *others = groups
    keys = {name: runs.values(name, "seed").keys() for name in groups}
    for name in others:
        common = len(keys[name] & keys[first])
        if common >= FEWEST and not len(keys[name]) == len(keys[first]) == common:
            notes.append(f"{name} has {common} seeds in common with {first}, whose differences are shown.")
    if len(runs.main) > MOST_TASKS and not columns:
        tasks = measured(_tasks(runs))
        notes += [wins(tasks, name, first) for name in others]
    return Comparison(runs.heading, counts, shown, notes, unit)


def _main(runs: Runs) -> tuple[list[Quantity], list[str]]:
    """Return the loss and the main metrics, and notes on what they leave out."""
    shown = [Quantity("loss", "test loss", False)]
    shown += [Quantity(name.removeprefix("test "), name, True) for name in AVERAGES]
    shown += [Quantity(TITLE, DELTA, True)]
    tasks, notes = _tasks(runs), [NOTE] if DELTA in runs.table.columns else []
    if len(tasks) > MOST_TASKS:
        means = {f"mean {metric}": runs.is_higher_better(metric) for metric in runs.main.values()}
        shown += [Quantity(f"mean over tasks of {name[5:]}", name, higher) for name, higher in means.items()]
        notes.append(f"summary.csv has the values of each of the {len(tasks)} tasks.")
        tasks = []
    return [*shown, *tasks], notes


def _tasks(runs: Runs) -> list[Quantity]:
    return [
        Quantity(f"{task} {metric}", f"test {task}/{metric}", runs.is_higher_better(metric))
        for task, metric in runs.main.items()
    ]


def _chosen(runs: Runs, columns: Sequence[str]) -> tuple[list[Quantity], list[str]]:
    """Return the numeric ``columns``, and a note on the others."""
    have = [name for name in columns if name in runs.table.columns and runs.table[name].dtype.is_numeric()]
    left = [name for name in columns if name not in have]
    names = [TITLE if name == DELTA else name.removeprefix("test ").replace("/", " ") for name in have]
    shown = [Quantity(*pair, runs.is_higher_better(pair[1])) for pair in zip(names, have, strict=True)]
    notes = [f"No run has {', '.join(left)}."] if left else []
    return shown, [*notes, NOTE] if DELTA in have else notes


def _also(runs: Runs, name: str) -> Quantity:
    table = runs.table
    for column in (name, f"test {name}"):
        if column in table.columns and table[column].dtype.is_numeric():
            return Quantity(name.removeprefix("test "), column, runs.is_higher_better(column))
    known = [column for column in table.columns if table[column].dtype.is_numeric() and "/" not in column]
    raise InputError(f"--also {name}: no run has this column; among those of summary.csv are {', '.join(known)}")


def wins(tasks: Sequence[Quantity], name: str, first: str) -> str:
    """Say for how many tasks the mean of a setting is better than the mean of the first setting."""
    better = []
    for task in tasks:
        own, other = task.means[name].mean, task.means[first].mean
        if own is not None and other is not None and task.higher is not None:
            better.append(own > other if task.higher else own < other)
    return f"{name} is better than {first} on {sum(better)} of {len(better)} tasks."
