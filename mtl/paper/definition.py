"""The definition of a table or figure of a publication, read from ``conf/paper``.

It has a table for each group, such as a data set, and in each a row for each method, such as a gate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from pydantic import BeforeValidator, Field

from mtl.checks import InputError, require
from mtl.jobs.setting import Setting
from mtl.options import LargeCount, LargeCountOrZero, Name, OpenFraction, Positive, StrictModel, valid
from mtl.overrides import key_of, last_of_each
from mtl.tune.definition import Definition, MaybeSpace, Searches, Space, check_unsearched

DISPLAY_NAMES = {  # names, as in the papers, for parts whose file gives none
    "comet": "COMET",
    "comet+": "COMET+",
    "dselect_k": "DSelect-k",
    "gumbel_softmax": "Gumbel-softmax",
    "hash": "Hash-r",
    "hash+": "Hash-r+",
    "topk": "top-k",
    "topk+": "top-k+",
}

# A scale that every file has: its laptop scale without a search, one run of enough rows to have each group and each
# method, and in a run:
SMOKE = "smoke"
THREE_BATCHES = [
    f"trainer.{name}" for name in ("max_epochs=1", *(f"limit_{at}_batches=3" for at in ("train", "val", "test")))
]

# '{GROUP}', '{GROUP/METHOD}' or '{/METHOD}' in a quoted path: that row's run folder; a part left out is this row's own
RUN_REFERENCE = re.compile(r"\{(\w*)(?:/([\w+]+))?\}(?=/)")

Words = Annotated[list[str], Field(default_factory=list)]
# Or [mean, standard error], or [mean, standard deviation, number of runs]
Number = float | Annotated[list[float], Field(min_length=2, max_length=3)]


class Claim(StrictModel):
    """A sentence of the publication about ``method``, in ``group``, on ``column``.

    With ``than``, the claim is that the method's mean is better than the mean of each method in ``than``, by at least
    ``by`` times that mean; with a ``margin``, that it is worse by at most ``margin`` times that mean. ``higher`` says
    whether higher values are better. With ``times``, the method's search reaches the expected value of each search in
    ``than`` in 1/``times`` of its trials. ``other`` is another column of the method, with which to compare instead.
    Otherwise the claim is that the mean is at least ``at_least`` or at most ``at_most``. Group and methods are given by
    their keys. ``binary``: the claim is about selected experts; undecided while selectors are soft.
    """

    text: str
    group: str
    column: str
    method: str
    than: Words
    other: str | None = None
    by: Positive | None = None
    margin: Positive | None = None
    times: Positive | None = None
    higher: bool = False
    at_least: float | None = None
    at_most: float | None = None
    binary: bool = False


def repeated(claims: Any) -> Any:
    """Expand each claim that has ``groups`` or ``columns`` into one claim for each of them.

    In ``groups: {a: first data, b: second data}`` the values replace ``{}`` in the texts of the claims.
    """
    expanded = []
    for claim in claims if isinstance(claims, list) else [claims]:
        kind = next((name for name in ("group", "column") if isinstance(claim, dict) and f"{name}s" in claim), None)
        if kind is None:
            expanded.append(claim)
            continue
        rest = {name: value for name, value in claim.items() if name != f"{kind}s"}
        if not isinstance(replacements := claim[f"{kind}s"], dict):
            raise ValueError(f"{kind}s of a claim must be as {{{kind.upper()}: WORDS}}")
        for key, replacement in replacements.items():
            expanded.append(rest | {kind: key, "text": str(rest.get("text")).replace("{}", str(replacement))})
    return expanded


class Scale(StrictModel):
    """``seeds``: runs of each row; ``n_trials``: trials of the search before them, if any, with overrides ``search``.

    With ``best`` instead of ``seeds``, the tables show the best trials of the search: ``best`` is a number or a share.
    ``hours``: how long all runs take on two CPU cores, as measured by ``benchmarks/paper_hours.py``.
    """

    seeds: LargeCount | None = None
    best: OpenFraction | LargeCount | None = None
    n_trials: LargeCountOrZero = 0
    fixed: Words
    search: Words
    note: str = ""
    hours: Positive | None = None


class Entry(StrictModel):
    """The entry of a group or a method in the file."""

    name: Name | None = None
    fixed: list[str] | None = None
    space: MaybeSpace
    methods: list[str] | None = None  # of a group: those that it has; None: all
    limit: Annotated[dict[str, float], Field(default_factory=dict)]  # largest values that the best trial should have


class Figure(StrictModel):
    """A figure with a panel for each of ``columns``.

    ``at``: the x position of each group (a line per method) or of each method (a line per group); ``label``: of the x
    axis. ``random``: the columns whose panels show the expected Jaccard index of random selections.
    """

    title: str
    label: str
    at: Annotated[dict[str, float], Field(min_length=2)]
    columns: Annotated[list[str], Field(min_length=1)]
    random: Words


class Joint(StrictModel):
    """A table of columns of several groups, as the tasks of a benchmark, with a row for each of ``methods``.

    ``columns``: the group and the column of each. ``means``: means of some of them, as the averages of a benchmark.
    Claims and published numbers refer to the table as to a group. ``best``: also show the best run of each column.
    """

    name: Name
    columns: Annotated[dict[Name, Annotated[list[str], Field(min_length=2, max_length=2)]], Field(min_length=1)]
    means: Annotated[dict[Name, list[str]], Field(default_factory=dict)]
    methods: Annotated[list[str], Field(min_length=1)]
    best: bool = False


class Numbers(StrictModel):
    """The paper's numbers by group, method and column, and the factors that convert ours to the paper's units."""

    values: Annotated[dict[str, dict[str, dict[str, Number]]], Field(default_factory=dict)]
    units: Annotated[dict[str, float], Field(default_factory=dict)]


Entries = Annotated[dict[Name, Entry], Field(min_length=1)]


class File(Searches):
    """The composed ``conf/reproduce.yaml``, which explains the entries."""

    n_trials: int | None = None  # a study whose spaces the file uses has one, which is ignored: each scale has its own
    scale: str
    only: str | None
    show: bool
    page: str | None
    judge: str | None
    title: str
    source: str
    groups: Entries
    methods: Entries
    scales: dict[str, Scale]
    baseline: str | None
    columns: list[str]
    published: Numbers
    tables: dict[Name, Joint]
    figures: list[Figure]
    curves: dict[str, LargeCount]
    pictures: dict[str, list[str]]
    claims: Annotated[list[Claim], BeforeValidator(repeated)]
    remarks: list[str]


@dataclass(frozen=True)
class Part:
    """A group or a method: its key in the file, its name for the reader, its overrides and its space."""

    key: str
    name: str
    overrides: list[str]
    space: Space = field(default_factory=dict)
    limit: Mapping[str, float] = field(default_factory=dict)
    methods: Sequence[str] | None = None


Key = tuple[str, str]  # of a group and of a method


class Row(NamedTuple):
    """A row of the table of ``group``."""

    group: Part
    method: Part

    @property
    def key(self) -> Key:
        """The keys of the group and the method."""
        return self.group.key, self.method.key


@dataclass(frozen=True)
class Paper:
    """A table or figure at one scale, with the requested ``groups`` and ``methods``.

    ``overrides``: options of mtl train that the command line adds to all runs.
    """

    name: str
    file: File
    scale: Scale
    groups: list[Part]
    methods: list[Part]
    overrides: list[str]
    rows_by_key: Mapping[Key, Row] = field(default_factory=dict)  # all rows of the file
    left_out: Collection[Key] = ()  # rows that are not requested although their group and their method are

    def rows(self) -> list[Row]:
        """Return the requested rows of all tables."""
        return [row for group in self.groups for row in self.rows_of(group)]

    def rows_of(self, group: Part) -> list[Row]:
        """Return the requested rows of the table of a group."""
        keys = [(group.key, method.key) for method in self.methods]
        return [self.rows_by_key[key] for key in keys if key in self.rows_by_key and key not in self.left_out]

    def smoke_subset(self) -> Paper:
        """Return the table with a few rows that cover all groups and methods, and those that these refer to."""
        covered, kept = set[tuple[str, str]](), set[Key]()
        for num_new in (2, 1):  # first rows that add a group and a method, then those that add one of them
            for row in self.rows():
                parts = {("group", row.group.key), ("method", row.method.key)}
                if len(parts - covered) >= num_new:
                    covered |= parts
                    kept |= {row.key, *self.references(row).values()}
        return replace(self, left_out={row.key for row in self.rows()} - kept)

    def references(self, row: Row) -> dict[str, Key]:
        """Return the key of each row that the overrides of ``row`` refer to, by the text of the reference."""
        references = {}
        for override in self.setting(row).overrides:
            for match in RUN_REFERENCE.finditer(override):
                key = references[match[0]] = match[1] or row.group.key, match[2] or row.method.key
                require(key in self.rows_by_key, f"{override}: {self.name} has no method {key[1]} in a group {key[0]}")
        return references

    def stages(self) -> list[list[Row]]:
        """Return the requested rows and all that they refer to, in stages: a row runs after those that it refers to.

        Raises InputError if a row refers to itself, or to rows that are trials of a search.
        """
        pending, references = [row.key for row in self.rows()], dict[Key, set[Key]]()
        while pending:
            if (key := pending.pop()) not in references:
                references[key] = set(self.references(self.rows_by_key[key]).values())
                pending += references[key]
        sorter, stages = TopologicalSorter(references), list[list[Row]]()
        try:
            sorter.prepare()
        except CycleError as error:
            raise InputError(
                f"{self.name}: {' -> '.join(map('/'.join, error.args[1]))}: these rows refer to each other in a circle"
            ) from None
        while ready := sorter.get_ready():
            stages.append([row for key, row in self.rows_by_key.items() if key in ready])
            sorter.done(*ready)
        needs_seeds = f"scales.{self.file.scale}: rows that refer to others need seeds"
        require(len(stages) < 2 or self.scale.seeds is not None, needs_seeds)
        return stages

    @property
    def count(self) -> int:
        """The number of runs, with those of searches and those of rows that others refer to."""
        rows = [row for stage in self.stages() for row in stage]
        searched = sum(bool(self.space_of(row)) for row in rows)
        return searched * self.scale.n_trials + len(rows) * (self.scale.seeds or 0)

    def published(self) -> dict[str, dict[str, dict[str, tuple[float, float | None]]]]:
        """Return the published (mean, standard error or None) in our units, by group, method and column."""

        def ours(column: str, value: Number) -> tuple[float, float | None]:
            mean, *spread = value if isinstance(value, list) else [value]
            unit, runs = self.file.published.units.get(column, 1), math.prod(spread[1:])
            return mean / unit, spread[0] / unit / math.sqrt(runs) if spread else None

        return {
            group: {
                method: {name: ours(name, value) for name, value in columns.items()} for method, columns in rows.items()
            }
            for group, rows in self.file.published.values.items()
        }

    def setting(self, row: Row, chosen: Sequence[str] = (), trial: int = 0) -> Setting:
        """Return the setting of a row's runs.

        ``chosen``: the overrides that the search has chosen; ``trial``: the number of the trial with these overrides.
        """
        return self._setting(row, f"/trial_{trial}" if chosen else "", chosen)

    def search(self, row: Row) -> Definition:
        """Return the study that searches the options of a row, see ``space_of``."""
        setting, file = self._setting(row, "/search", self.scale.search), self.file
        return Definition(
            **vars(setting), space=self.space_of(row), sampler=file.sampler, pruner=file.pruner, seed=file.seed
        )

    def _setting(self, row: Row, suffix: str, further: Sequence[str]) -> Setting:
        check_unsearched(self.overrides, self.space_of(row), self.name)
        label = "/".join(row.key) + suffix
        overrides = last_of_each([*row.group.overrides, *row.method.overrides, *further, *self.overrides])
        return Setting(f"{self.name}/{self.file.scale}/{label}", label, overrides)

    def space_of(self, row: Row) -> Space:
        """Return the space that is searched for a row before its runs; {} if there is no search.

        What the scale fixes is not searched.
        """
        if not self.scale.n_trials:
            return {}
        fixed = {key_of(override) for override in self.scale.fixed}
        space = self.file.space | row.group.space | row.method.space
        return {key: values for key, values in space.items() if key not in fixed}


def read(cfg: DictConfig, name: str, overrides: Sequence[str]) -> Paper:
    """Return the table or figure that ``cfg``, the composed ``conf/reproduce.yaml``, asks for.

    ``name``: the name of the file in ``conf/paper``. ``overrides``: options of mtl train for all runs, which replace
    the file's. Raises InputError for a wrong option.
    """
    file: File = valid(File, OmegaConf.to_container(cfg, resolve=True), "")
    small = {
        "seeds": 1,
        "best": None,
        "n_trials": 0,
        "hours": None,
        "note": "one run of each group and each method, of three batches: only to see that it works",
    }
    scales = {**file.scales, SMOKE: file.scales["laptop"].model_copy(update=small)}
    require(file.scale in scales, f"scale={file.scale}: {name} has {', '.join(scales)}")
    overrides = [*(THREE_BATCHES if file.scale == SMOKE else ()), *overrides]
    tables: Mapping[str, object] = {**file.groups, **file.tables}
    used: list[tuple[str, str, Mapping[str, object]]] = [("claims", claim.group, tables) for claim in file.claims]
    used += [("claims", method, file.methods) for claim in file.claims for method in (claim.method, *claim.than)]
    used += [("published.values", group, tables) for group in file.published.values]
    used += [("tables", group, file.groups) for table in file.tables.values() for group, _ in table.columns.values()]
    used += [("tables", key, t.columns) for t in file.tables.values() for keys in t.means.values() for key in keys]
    used += [("tables", method, file.methods) for table in file.tables.values() for method in table.methods]
    used += [("groups", method, file.methods) for group in file.groups.values() for method in group.methods or ()]
    used += [("published.values", method, file.methods) for rows in file.published.values.values() for method in rows]
    used += [("figures", key, {**file.groups, **file.methods}) for figure in file.figures for key in figure.at]
    used += [("pictures", method, file.methods) for methods in file.pictures.values() for method in methods]
    used += [("baseline", file.baseline, file.methods)] if file.baseline else []
    for section, key, accepted in used:
        require(key in accepted, f"{section}: {key} is none of {', '.join(accepted)}")
    only = [name for name in (file.only or "").split(",") if name]
    unknown = set(only) - {*file.groups, *file.methods}
    have = f"the groups {', '.join(file.groups)}; methods {', '.join(file.methods)}"
    require(not unknown, f"only={file.only}: {name} has {have}")
    scale = scales[file.scale]
    shared = [*file.fixed, *scale.fixed]
    groups = {
        key: Part(key, name_of(key, part), [*shared, *(part.fixed or [])], part.space, methods=part.methods)
        for key, part in file.groups.items()
    }
    methods = {
        key: Part(key, name_of(key, part), overrides, part.space, part.limit)
        for key, part in file.methods.items()
        for overrides in [[f"gate={key}"] if part.fixed is None else part.fixed]
    }
    rows = [Row(group, method) for group in groups.values() for method in methods.values()]
    rows_by_key = {row.key: row for row in rows if row.group.methods is None or row.method.key in row.group.methods}
    require((scale.seeds is None) != (scale.best is None), f"scales.{file.scale}: must have either seeds or best")
    paper = Paper(name, file, scale, _select(groups, only), _select(methods, only), list(overrides), rows_by_key)
    require(bool(paper.rows()), f"only={file.only}: none of these groups has one of these methods")
    unsearched = [row.method.key for row in paper.rows() if scale.best and not paper.space_of(row)]
    require(not unsearched, f"scales.{file.scale}.best: nothing is searched for {', '.join(unsearched)}")
    return paper.smoke_subset() if file.scale == SMOKE else paper


def name_of(key: str, part: Entry) -> str:
    """Return the name of a group or method for the reader."""
    return part.name or DISPLAY_NAMES.get(key, key.replace("_", " "))


def _select(parts: Mapping[str, Part], only: Sequence[str]) -> list[Part]:
    """Return the parts that ``only`` names, or all parts if it names none of them."""
    return [part for key, part in parts.items() if key in only] or list(parts.values())
