"""The definition of a table or figure of a publication: groups and gates, read from ``conf/paper``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from mtl.checks import require
from mtl.options import InnerShare, Long, LongOrZero, Model, Name, Positive, valid
from mtl.tune.definition import Definition, MaybeSpace, Searches, Space, check_unsearched, unique

NAMES = {  # names, as in the papers, for parts whose file gives none
    "comet": "COMET",
    "comet+": "COMET+",
    "dselect_k": "DSelect-k",
    "gumbel_softmax": "Gumbel-softmax",
    "hash": "Hash-r",
    "hash+": "Hash-r+",
    "topk": "top-k",
    "topk+": "top-k+",
}


Words = Annotated[list[str], Field(default_factory=list)]
# Or [mean, standard error], or [mean, standard deviation, number of runs]
Number = float | Annotated[list[float], Field(min_length=2, max_length=3)]


class Claim(Model):
    """A sentence of the publication about ``gate``, in ``group``, on ``column``.

    With ``than``, the claim is that the gate's mean is better than the mean of each gate in ``than``, by at least the
    share ``by`` of the latter (below 0: that it is worse by at most so much); ``higher`` says whether higher values are
    better. With ``times``, it is that the gate's search needs so many times fewer trials to reach the expected value of
    each search in ``than``. ``other`` is another column of the gate, with which to compare instead. Otherwise the claim
    is that the mean is at least ``at_least`` or at most ``at_most``. Group and gates are given by their keys.
    ``binary``: the claim is about the selected experts, which soft selectors leave open.
    """

    text: str
    group: str
    column: str
    gate: str
    than: Words
    other: str | None = None
    by: float | None = None
    times: Positive | None = None
    higher: bool = False
    at_least: float | None = None
    at_most: float | None = None
    binary: bool = False


class Scale(Model):
    """``seeds``: runs of each gate; ``n_trials``: trials of the search before them, if any, with words ``search``.

    With ``best`` in place of ``seeds``, the rows of the tables are the best trials of the search: so many, or a share.
    """

    seeds: Long | None = None
    best: InnerShare | Long | None = None
    n_trials: LongOrZero = 0
    fixed: Words
    search: Words
    note: str = ""


class Described(Model):
    """The entry of a group or a gate in the file."""

    name: Name | None = None
    fixed: list[str] | None = None
    space: MaybeSpace
    limit: Annotated[dict[str, float], Field(default_factory=dict)]  # of the search's best trial: the most of a column


class Figure(Model):
    """A figure with a panel for each of ``columns``.

    ``at`` gives places on the axis ``label`` to groups, between which each gate has a line, or to gates, between which
    each group has one. ``random``: the columns whose panels show the expected Jaccard index of random selections.
    """

    title: str
    label: str
    at: Annotated[dict[str, float], Field(min_length=2)]
    columns: Annotated[list[str], Field(min_length=1)]
    random: Words


class Numbers(Model):
    """The paper's numbers by group, gate and column, and the factors that convert our numbers to the paper's units."""

    values: Annotated[dict[str, dict[str, dict[str, Number]]], Field(default_factory=dict)]
    units: Annotated[dict[str, float], Field(default_factory=dict)]


Parts = Annotated[dict[Name, Described], Field(min_length=1)]


class File(Searches):
    """The composed ``conf/reproduce.yaml``, which explains the entries."""

    n_trials: int | None = None  # a study whose spaces the file uses has one, which is ignored: each scale has its own
    scale: str
    only: str | None
    show: bool
    page: str | None
    title: str
    source: str
    groups: Parts
    gates: Parts
    scales: dict[str, Scale]
    baseline: str | None
    columns: list[str]
    published: Numbers
    figures: list[Figure]
    curves: dict[str, Long]
    pictures: dict[str, list[str]]
    claims: list[Claim]
    remarks: list[str]


@dataclass(frozen=True)
class Part:
    """A group or a gate: its key in the file, its name for the reader, its words and its space."""

    key: str
    name: str
    words: list[str]
    space: Space = field(default_factory=dict)
    limit: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Paper:
    """A table or figure at one scale, with the requested ``groups`` and ``gates``.

    ``words``: options of mtl train that the command line adds to all runs.
    """

    name: str
    file: File
    scale: Scale
    groups: list[Part]
    gates: list[Part]
    words: list[str]

    def pairs(self) -> list[tuple[Part, Part]]:
        """Return the (group, gate) of each row of the tables."""
        return [(group, gate) for group in self.groups for gate in self.gates]

    def published(self) -> dict[str, dict[str, dict[str, tuple[float, float | None]]]]:
        """Return the published (mean, standard error or None) in our units, by group, gate and column."""

        def ours(column: str, value: Number) -> tuple[float, float | None]:
            mean, *spread = value if isinstance(value, list) else [value]
            unit, runs = self.file.published.units.get(column, 1), math.prod(spread[1:])
            return mean / unit, spread[0] / unit / math.sqrt(runs) if spread else None

        return {
            group: {
                gate: {name: ours(name, value) for name, value in columns.items()} for gate, columns in rows.items()
            }
            for group, rows in self.file.published.values.items()
        }

    def definition(self, group: Part, gate: Part, chosen: Sequence[str] | None, trial: int = 0) -> Definition:
        """Return the study of a gate in a group: the search if ``chosen`` is None, otherwise the runs.

        ``chosen``: the words that the search has chosen; ``trial``: the number of the trial with these words.
        """
        label, further, space = f"{group.key}/{gate.key}", chosen or [], self.space_of(gate)
        check_unsearched(self.words, space, self.name)
        if chosen is None:
            label, further = f"{label}/search", self.scale.search
        elif chosen:
            label = f"{label}/trial_{trial}"
        words, file = unique([*group.words, *gate.words, *further, *self.words]), self.file
        space = space if chosen is None else {}
        name = f"{self.name}/{file.scale}/{label}"
        return Definition(name, label, words, space, file.sampler, file.pruner, file.seed)

    def space_of(self, gate: Part) -> Space:
        """Return the space that is searched for the gate before its runs; {} if there is no search."""
        return self.file.space | gate.space if self.scale.n_trials else {}


def read(cfg: DictConfig, name: str, words: Sequence[str]) -> Paper:
    """Return the table or figure that ``cfg``, the composed ``conf/reproduce.yaml``, asks for.

    ``name``: the name of the file in ``conf/paper``. ``words``: options of mtl train for all runs, which replace the
    file's. Raises InputError for a wrong option.
    """
    file: File = valid(File, OmegaConf.to_container(cfg, resolve=True), "")
    require(file.scale in file.scales, f"scale={file.scale}: {name} has {', '.join(file.scales)}")
    used = [("claims", claim.group, file.groups) for claim in file.claims]
    used += [("claims", gate, file.gates) for claim in file.claims for gate in (claim.gate, *claim.than)]
    used += [("published.values", group, file.groups) for group in file.published.values]
    used += [("published.values", gate, file.gates) for rows in file.published.values.values() for gate in rows]
    used += [("figures", key, {**file.groups, **file.gates}) for figure in file.figures for key in figure.at]
    used += [("pictures", gate, file.gates) for gates in file.pictures.values() for gate in gates]
    used += [("baseline", file.baseline, file.gates)] if file.baseline else []
    for where, key, known in used:
        require(key in known, f"{where}: {key} is none of {', '.join(known)}")
    only = [word for word in (file.only or "").split(",") if word]
    unknown = set(only) - {*file.groups, *file.gates}
    have = f"the groups {', '.join(file.groups)}; gates {', '.join(file.gates)}"
    require(not unknown, f"only={file.only}: {name} has {have}")
    scale = file.scales[file.scale]
    shared = [*file.fixed, *scale.fixed]
    groups = [Part(key, name_of(key, part), [*shared, *(part.fixed or [])]) for key, part in _wanted(file.groups, only)]
    gates = [
        Part(key, name_of(key, part), [f"gate={key}"] if part.fixed is None else part.fixed, part.space, part.limit)
        for key, part in _wanted(file.gates, only)
    ]
    require((scale.seeds is None) != (scale.best is None), f"scales.{file.scale}: must have either seeds or best")
    found = Paper(name, file, scale, groups, gates, list(words))
    unsearched = [gate.key for gate in gates if scale.best and not found.space_of(gate)]
    require(not unsearched, f"scales.{file.scale}.best: nothing is searched for {', '.join(unsearched)}")
    return found


def name_of(key: str, part: Described) -> str:
    """Return the name of a group or gate for the reader."""
    return part.name or NAMES.get(key, key.replace("_", " "))


def _wanted(parts: Mapping[str, Described], only: Sequence[str]) -> list[tuple[str, Described]]:
    """Return the parts that ``only`` names, or all parts if it names none of them."""
    return [(key, part) for key, part in parts.items() if key in only] or list(parts.items())
