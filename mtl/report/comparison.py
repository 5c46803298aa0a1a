"""Compare settings: means over seeds, and how far each setting is from the reference in the main quantity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mtl.checks import require
from mtl.files.formatting import aligned, with_error
from mtl.files.tables import Bold, Table
from mtl.report.runs import FINISHED, MEAN, Runs, defined_in_all
from mtl.report.statistics import (
    DELTA,
    MIN_RUNS,
    NOTE,
    TITLE,
    Difference,
    Summary,
    Values,
    Verdict,
    percent_gain,
    summarise,
)
from mtl.runs.results import MOST_TASKS
from mtl.training.measurements import Key

Published = Mapping[str, Mapping[str, tuple[float, float | None]]]  # see ``ComparisonTable.table``
LOSS, AVERAGES, DELTA_M = "test/loss", ("test/average", "test/small_average"), f"test/{DELTA}"  # columns
SPLITS = (
    "Each data.seed is a random split of the same rows: errors and intervals have Nadeau and Bengio's correction "
    "(2003) for training rows in common."
)
DECIDED = {Verdict.BETTER: 1, Verdict.WORSE: -1}  # and the sign of their gains
_ARROWS: Mapping[bool | None, str] = {True: " ↑", False: " ↓", None: ""}


@dataclass(frozen=True)
class ComparedMetric:
    """A column of the table of runs, and whether higher values are better (None: unknown).

    ``values``: by setting, as ``Runs.values`` returns them. ``overlap``: as in ``summarise``.
    """

    column: str
    higher: bool | None
    values: Mapping[str, Values]
    overlap: float = 0.0

    @property
    def name(self) -> str:
        """The name for the reader."""
        if self.column == DELTA_M:
            return TITLE
        name = self.column.removeprefix("test/")
        is_mean = name.startswith(MEAN) and "/" not in name
        return name.replace(MEAN, "mean ", 1) if is_mean else name.replace("/", " ")

    @cached_property
    def means(self) -> dict[str, Summary]:
        """The mean of each setting."""
        return {name: summarise(list(values.values()), 1.0, self.overlap) for name, values in self.values.items()}

    def texts(self) -> dict[str, str]:
        """Return mean ± standard error of each setting, then (m/n) if only m of n runs have a value; "-" if none."""
        means = self.means.values()
        texts = aligned([(value.mean, value.sem) for value in means])
        counts = (f" ({mean.count}/{mean.count + mean.undefined})" if mean.undefined else "" for mean in means)
        return {name: text + count for name, text, count in zip(self.means, texts, counts, strict=True)}


@dataclass(frozen=True)
class ComparisonTable:
    """Settings side by side, in the order of their runs; ``reference`` is the one that the others are compared with.

    ``runs``: for each setting, the number of finished runs and of all runs. The first of ``quantities`` is the main one
    if it is known which values are better. ``notes`` say what the quantities leave out. ``unit``: what runs are called.
    """

    heading: str
    reference: str
    runs: dict[str, tuple[int, int]]
    quantities: list[ComparedMetric]
    notes: list[str]
    unit: str

    @cached_property
    def gains(self) -> dict[str, Difference]:
        """By how much each other setting is better in the main quantity, in percent of the reference's mean.

        Settings without a value are left out, and all of them if there is no main quantity.
        """
        gains = {}
        for main in self.quantities[:1]:
            for name, values in main.values.items() if main.higher is not None else ():
                gain = percent_gain(values, main.values[self.reference], bool(main.higher), main.overlap)
                if gain and name != self.reference:
                    gains[name] = gain
        return gains

    def verdict(self, name: str) -> Verdict:
        """Return the verdict on a setting: undecided if a run has no value, since the others are no random sample."""
        gain = self.gains.get(name)
        return gain.verdict() if gain and not gain.undefined else Verdict.UNDECIDED

    def sentence(self) -> str:
        """Say which settings are better or worse than the reference, by how much, or that nothing is decided."""
        if not self.gains:
            return f"nothing can be compared with {self.reference}." if len(self.runs) > 1 else ""
        parts, left = list[str](), len(self.runs) - 1
        for verdict, sign in DECIDED.items():
            if names := [name for name in self.gains if self.verdict(name) == verdict]:
                most, left = max(names, key=lambda name: abs(self.gains[name].mean)), left - len(names)
                by = f"by {self.gains[most].scaled(sign).text(' %', '')}"
                several = f"{len(names)} are {verdict} (most {most}, {by})"
                parts.append(several if names[1:] else f"{most} is {verdict} {by}")
        if parts:
            open_ = [name for name in self.runs if name != self.reference and self.verdict(name) not in DECIDED]
            parts += [f"{open_[0]} is undecided" if left == 1 else f"{left} are undecided"] if left else []
        else:
            best = max(self.gains, key=lambda name: self.gains[name].mean)
            sign = 1 if self.quantities[0].higher else -1
            text = self.gains[best].scaled(sign).text(" %")
            parts = [f"nothing is decided; the best of the others, {best}, changes it by {text}"]
        return f"{self.quantities[0].name} against {self.reference}: {'; '.join(parts)}."

    def table(self, published: Published | None = None) -> Table:
        """Return the table, best settings first, each followed by its ``published`` values, if any.

        ``published``: (mean, standard error or None) in our units, by setting and column of the table of runs.
        """
        published, rows, texts = published or {}, list[list[str]](), [quantity.texts() for quantity in self.quantities]
        counts = {count for pair in self.runs.values() for count in pair}
        even, gains = len(counts) == 1, bool(self.gains)  # whether all have as many runs, and these have finished

        def add(name: str, count: str, change: str, means: Sequence[str]) -> None:
            rows.append([name, *[count] * (not even), *means[:1], *[change] * gains, *means[1:]])

        columns = [quantity.name + _ARROWS[quantity.higher] for quantity in self.quantities]
        add(self.heading, self.unit, f"against {self.reference}, %", columns)
        for name in dict.fromkeys((*self._ranked(), *published)):
            if name in self.runs:
                done, every = self.runs[name]
                count = f"{done} of {every}" if done < every else f"{done}"
                add(name, count, self._change(name), [text_by_name[name] for text_by_name in texts])
            if name in published:
                theirs = [published[name].get(quantity.column) for quantity in self.quantities]
                add(f"{name}, published", "", "", ["-" if value is None else with_error(*value) for value in theirs])
        over = self.unit if not even else f"{done} {self.unit}" if done != 1 else f"1 {self.unit.removesuffix('s')}"
        return Table(rows[0], rows[1:], notes=[*self._explanation(over), *self.notes])

    def _ranked(self) -> list[str]:
        """Return the settings, those with the best main quantity first, and those with undefined values last."""
        for main in self.quantities[:1]:
            sign = {True: -1, False: 1, None: 0}[main.higher]
            means = {name: sign * v.mean for name, v in main.means.items() if v.mean is not None and not v.undefined}
            return sorted(self.runs, key=lambda name: means.get(name, math.inf))
        return list(self.runs)

    def _change(self, name: str) -> str:
        """Return the change of a setting, as a raw one: higher values have a plus sign."""
        if name not in self.gains:
            return "" if name == self.reference else "-"
        text = self.gains[name].scaled(1 if self.quantities[0].higher else -1).text()
        return Bold(text) if self.verdict(name) in DECIDED else text

    def _explanation(self, over: str) -> list[str]:
        """Return the sentences that belong below the table."""
        lines = [f"Mean ± standard error over {over}, on test rows, of the checkpoint that each run chose."]
        apart = [delta for delta in self.gains.values() if not delta.undefined]
        if tests := sorted({"Student's paired" if delta.pairs else "Welch's" for delta in apart if delta.interval}):
            lines.append(
                f"Against {self.reference}: change of {self.quantities[0].name} with its 95 % interval by "
                f"{' or '.join(tests)} t test, bold if it excludes 0; {len(apart)} comparison"
                f"{'s, not corrected for their number' if apart[1:] else ''}."
            )
        undefined = any(mean.undefined for quantity in self.quantities for mean in quantity.means.values())
        note = "(m/n): only m of n runs have a defined value, which the mean is of; no test, and ranked last."
        return [*lines, *[note] * undefined]


def compare_settings(
    runs: Runs, also: Sequence[str] = (), columns: Sequence[str] = (), unit: str = "seeds", reference: str | None = None
) -> ComparisonTable:
    """Compare all settings by the loss and the main metrics, or only by the given ``columns`` of the table.

    ``also`` names further columns, with or without "test/"; InputError for one that no run has. Entries of ``columns``
    that no run has (yet) are left out. ``unit``: what the runs of a setting are called, in the plural. ``reference``:
    by default the first setting. The main quantity is the loss, if it is shown, else the first with a known direction;
    what ``also`` names comes next.
    """
    groups = {str(name): group for (name,), group in runs.table.group_by("setting", maintain_order=True)}
    counts = {name: (group["state"].to_list().count(FINISHED), len(group)) for name, group in groups.items()}
    reference = reference if reference in groups else next(iter(groups))
    numeric = [name for name in runs.table.columns if runs.table[name].dtype.is_numeric()]

    def measured(names: Sequence[str]) -> list[ComparedMetric]:
        higher = {name: runs.is_higher_better(name) for name in names if name in numeric}
        return [ComparedMetric(n, up, {s: runs.values(s, n) for s in groups}, runs.overlap) for n, up in higher.items()]

    tasks = [f"test/{task}/{metric}" for task, metric in runs.main.items()]
    means = [f"test/{MEAN}{metric}" for metric in runs.main.values()] if len(tasks) > MOST_TASKS else tasks
    further = [next((full for full in (name, f"test/{name}") if full in numeric), "") for name in also]
    have = ", ".join(column for column in numeric if not Key.of(column).task)
    for name, full in zip(also, further, strict=True):
        require(bool(full), f"--also {name}: no run has this column; among those of summary.csv are {have}")
    quantities = measured([*(columns or (LOSS, *AVERAGES, DELTA_M, *means)), *further])
    directed = [quantity for quantity in quantities if quantity.higher is not None]
    main = next((quantity for quantity in directed if quantity.column == LOSS), directed[0] if directed else None)
    quantities.sort(key=lambda quantity: (quantity is not main, quantity.column not in further))
    left = [name for name in columns if name not in numeric]
    notes = [*([f"No run has {', '.join(left)}."] if left else []), *([SPLITS] if runs.overlap else [])]
    notes += [NOTE] if any(quantity.column == DELTA_M for quantity in quantities) else []
    keys = {name: runs.values(name, "seed").keys() for name in groups}
    for name in groups:
        common = len(keys[name] & keys[reference])
        if common >= MIN_RUNS and not len(keys[name]) == len(keys[reference]) == common:
            notes.append(f"{name} has {common} seeds in common with {reference}, whose differences are shown.")
    if len(tasks) > MOST_TASKS and not columns:
        notes.append(f"summary.csv has the values of each of the {len(tasks)} tasks.")
        both = defined_in_all(runs.table, [name for name in tasks if name in numeric] or tasks)
        if len(both) < len(tasks):
            notes.append(f"Means over tasks are over the {len(both)} where all runs have a defined value.")
        every = measured(tasks)
        notes += [_wins(every, name, reference) for name in groups if name != reference]
    return ComparisonTable(runs.heading, reference, counts, quantities, notes, unit)


def _wins(tasks: Sequence[ComparedMetric], name: str, reference: str) -> str:
    """Say for how many tasks the mean of a setting is better than the mean of the reference."""
    better = []
    for task in tasks:
        mean, other = task.means[name].mean, task.means[reference].mean
        if mean is not None and other is not None and task.higher is not None:
            better.append(mean > other if task.higher else mean < other)
    return f"{name} is better than {reference} on {sum(better)} of {len(better)} tasks."
