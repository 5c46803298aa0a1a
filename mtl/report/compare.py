"""Compare settings: what is shown of each, its mean over seeds, and the difference to the first setting."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from mtl.checks import InputError
from mtl.report.runs import FINISHED, Runs
from mtl.report.statistics import Difference, Interval, Summary, Value, difference, interval, summarise, welch

MOST_TASKS = 16  # of which each is shown; of more tasks, the mean and the extremes
EXTREMES = 3  # tasks at each end
AVERAGES = ("test average", "test small_average")


@dataclass(frozen=True)
class Quantity:
    """A column of the table of runs: its name for the reader, and whether higher values are better (None: unknown)."""

    name: str
    column: str
    higher: bool | None


@dataclass(frozen=True)
class Cell:
    """A quantity of one setting, and the bootstrap interval of its mean.

    ``best``: no setting has a better mean, and this one has a value in each run.
    """

    value: Summary
    interval: Interval
    difference: Difference | None
    best: bool = False


@dataclass(frozen=True)
class Contest:
    """The best setting against the best other one: the p-value of Welch's t test that it is better, one-sided."""

    best: str
    other: str
    p: float


@dataclass(frozen=True)
class Comparison:
    """Settings beside each other, in the order of their runs; differences are those to the first one.

    ``runs``: for each setting, how many of its runs have finished, and how many there are. ``cells`` has an entry for
    each (setting, name of a quantity), ``contests`` one for each quantity whose best settings could be tested.
    ``notes`` say what the quantities leave out. ``unit``: what the runs of a setting are.
    """

    heading: str
    runs: dict[str, tuple[int, int]]
    quantities: list[Quantity]
    cells: dict[tuple[str, str], Cell]
    contests: dict[str, Contest] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unit: str = "seeds"

    @property
    def settings(self) -> list[str]:
        """The names of the settings."""
        return list(self.runs)


def compare(runs: Runs, also: Sequence[str] = (), columns: Sequence[str] = (), unit: str = "seeds") -> Comparison:
    """Return the comparison of all settings, of the loss and the main metrics, or of ``columns`` of the table alone.

    ``also`` names further columns to show, without "test " or with it: InputError for one that no run has. Those of
    ``columns`` that no run has (yet) are left out. ``unit``: what the runs of a setting are, in the plural.
    """
    table = runs.table
    shown, notes = _chosen(runs, columns) if columns else _main(runs, table)
    shown += [_also(runs, name) for name in also]
    shown = [quantity for quantity in shown if quantity.column in table.columns]
    groups = {str(group["setting"][0]): group for group in table.partition_by("setting", maintain_order=True)}
    counts = {name: (group["state"].to_list().count(FINISHED), len(group)) for name, group in groups.items()}
    first = next(iter(groups))
    cells: dict[tuple[str, str], Cell] = {}
    contests = {}
    for quantity in shown:
        values = {name: _by_seed(group, quantity.column) for name, group in groups.items()}
        means = {name: summarise(list(each.values())) for name, each in values.items()}
        best = best_of(means, quantity.higher)
        for name, own in values.items():
            apart = difference(own, values[first]) if name != first else None
            cells[name, quantity.name] = Cell(means[name], interval(list(own.values())), apart, name in best)
        if found := contest(values, quantity.higher):
            contests[quantity.name] = found
    notes += [line for name in list(groups)[1:] if (line := common_seeds(groups[first], first, groups[name], name))]
    if len(runs.main) > MOST_TASKS and not columns:
        notes += [wins(groups[first], first, groups[name], name, _tasks(runs)) for name in list(groups)[1:]]
    return Comparison(runs.heading, counts, shown, cells, contests, notes, unit)


def _main(runs: Runs, table: pl.DataFrame) -> tuple[list[Quantity], list[str]]:
    """Return the loss and the main metrics, and what is left out of them."""
    shown = [Quantity("loss", "test loss", False)]
    shown += [Quantity(name.removeprefix("test "), name, True) for name in AVERAGES]
    tasks, notes = _tasks(runs), []
    if len(tasks) > MOST_TASKS:
        means = {f"mean {metric}": runs.is_higher_better(metric) for metric in runs.main.values()}
        shown += [Quantity(f"mean over tasks of {name[5:]}", name, higher) for name, higher in means.items()]
        notes.append(f"Of {len(tasks)} tasks, those with the best and the worst means are shown; summary.csv has all.")
        tasks = extremes(table, tasks)
    return [*shown, *tasks], notes


def _tasks(runs: Runs) -> list[Quantity]:
    return [
        Quantity(f"{task} {metric}", f"test {task}/{metric}", runs.is_higher_better(metric))
        for task, metric in runs.main.items()
    ]


def _chosen(runs: Runs, columns: Sequence[str]) -> tuple[list[Quantity], list[str]]:
    """Return the numeric ones of ``columns``, and a note on the others."""
    have = [name for name in columns if name in runs.table.columns and runs.table[name].dtype.is_numeric()]
    left = [name for name in columns if name not in have]
    shown = [Quantity(name.removeprefix("test ").replace("/", " "), name, runs.is_higher_better(name)) for name in have]
    return shown, [f"No run has {', '.join(left)}."] if left else []


def contest(values: Mapping[str, Mapping[int, Value]], higher: bool | None) -> Contest | None:
    """Test the setting with the best mean against the one with the next best; ``values`` by setting and seed.

    As in ``best_of``, a setting with an undefined value takes no part. None if there is no single best setting, or if
    the test is undefined, as of a single run.
    """
    means = {name: summarise(list(each.values())) for name, each in values.items()}
    best = best_of(means, higher)
    if len(best) != 1:
        return None
    [winner] = best
    others = {name: mean.mean for name, mean in means.items() if name != winner and not mean.undefined}
    known = {name: mean for name, mean in others.items() if mean is not None}
    if not known:
        return None
    next_best = (max if higher else min)(known, key=lambda name: known[name])
    own, other = (list(values[name].values()) for name in (winner, next_best))
    p = welch(own, other, "greater" if higher else "less")
    return None if p is None else Contest(winner, next_best, p)


def best_of(values: dict[str, Summary], higher: bool | None) -> set[str]:
    """Return the settings with the best mean; none if that is unknown, or if all means are equal.

    A setting with an undefined value, such as the loss of a run that diverged, is never the best.
    """
    means = {name: v.mean for name, v in values.items() if v.mean is not None and not v.undefined}
    if higher is None or len(values) < 2 or not means:
        return set()
    best = max(means.values()) if higher else min(means.values())
    found = {name for name, mean in means.items() if mean == best}
    return found if len(found) < len(values) else set()


def extremes(table: pl.DataFrame, tasks: Sequence[Quantity]) -> list[Quantity]:
    """Return the tasks with the best and the worst means over all runs, of the metric that most tasks have."""
    metrics = [quantity.column.rpartition("/")[2] for quantity in tasks]
    most = statistics.mode(metrics)
    means = [
        (summarise(table[quantity.column].to_list()).mean, quantity)
        for quantity, metric in zip(tasks, metrics, strict=True)
        if metric == most and quantity.column in table.columns
    ]
    known = [(mean, quantity) for mean, quantity in means if mean is not None]
    known.sort(key=lambda pair: -pair[0] if pair[1].higher else pair[0])
    ordered = [quantity for _, quantity in known]
    return [*ordered[:EXTREMES], *ordered[max(EXTREMES, len(ordered) - EXTREMES) :]]


def wins(first: pl.DataFrame, base: str, group: pl.DataFrame, name: str, tasks: Sequence[Quantity]) -> str:
    """Say on how many tasks the mean of a group is better than that of the first one."""
    better = []
    for own, other, quantity in zip(_means(group, tasks), _means(first, tasks), tasks, strict=True):
        if own is not None and other is not None and quantity.higher is not None:
            better.append(own > other if quantity.higher else own < other)
    return f"{name} is better than {base} on {sum(better)} of {len(better)} tasks."


def _means(group: pl.DataFrame, tasks: Sequence[Quantity]) -> list[Value]:
    """Return the mean over finished runs of each quantity."""
    done = group.filter(pl.col("state") == FINISHED)
    columns = [task.column for task in tasks]
    return [summarise(done[name].to_list()).mean if name in done.columns else None for name in columns]


def common_seeds(first: pl.DataFrame, base: str, group: pl.DataFrame, name: str) -> str | None:
    """Say how many seeds a group has in common with the first one, if its difference leaves out finished runs."""
    mine, theirs = (_by_seed(each, "seed") for each in (group, first))
    common = len(mine.keys() & theirs.keys())
    if common == 0 or len(mine) == len(theirs) == common:
        return None
    return f"{name} has {common} seed{'s' if common > 1 else ''} in common with {base}, whose differences are shown."


def _by_seed(group: pl.DataFrame, column: str) -> dict[int, float | None]:
    """Return the values of the finished runs by seed; runs that share a seed get numbers of their own below 0.

    It is empty if none of the runs has such a value, as runs of top-k have no share of binary selectors.
    """
    done = group.filter(pl.col("state") == FINISHED)
    if done[column].is_null().all():
        return {}
    seeds: list[int | None] = done["seed"].to_list()
    known = [seed for seed in seeds if seed is not None]
    keys = known if len(set(known)) == len(seeds) else range(-len(seeds), 0)
    return dict(zip(keys, done[column].to_list(), strict=True))


def _also(runs: Runs, name: str) -> Quantity:
    table = runs.table
    for column in (name, f"test {name}"):
        if column in table.columns and table[column].dtype.is_numeric():
            return Quantity(name.removeprefix("test "), column, runs.is_higher_better(column))
    known = [column for column in table.columns if table[column].dtype.is_numeric() and "/" not in column]
    raise InputError(f"--also {name}: no run has this column; among those of summary.csv are {', '.join(known)}")
