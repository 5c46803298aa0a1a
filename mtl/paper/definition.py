"""What a table or figure of a publication consists of: groups of gates, read from ``conf/paper``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mtl.checks import check_name, check_whole, require
from mtl.tune.definition import Definition, check_workers, key_of

Value = tuple[float, float | None]  # mean and standard error, None if that is not published
NAMES = {  # of parts whose file gives none: as the papers write them
    "comet": "COMET",
    "comet+": "COMET+",
    "dselect_k": "DSelect-k",
    "gumbel_softmax": "Gumbel-softmax",
    "hash": "Hash-r",
    "hash+": "Hash-r+",
    "topk": "top-k",
    "topk+": "top-k+",
}
_SCALE = {"seeds", "n_trials", "fixed", "search", "note"}
_CLAIM = {"text", "group", "column", "gate", "than", "by", "higher", "at_least", "at_most"}


@dataclass(frozen=True)
class Part:
    """A group or a gate: its key in the file, its name for the reader, its words and its space."""

    key: str
    name: str
    words: list[str]
    space: dict[str, Any]


@dataclass(frozen=True)
class Claim:
    """A sentence of the publication about ``gate``, in ``group``, on ``column``.

    With ``than``: its mean is better than that of each of these gates, by at least the share ``by`` of theirs;
    ``higher`` says whether higher values are better. Else its mean is at least ``at_least`` or at most ``at_most``. The
    names of group and gates are their keys.
    """

    text: str
    group: str
    column: str
    gate: str
    than: tuple[str, ...] = ()
    by: float | None = None
    higher: bool = False
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True)
class Paper:
    """A table or figure at one scale. ``seeds``: runs of each gate; ``n_trials``: of its search before, if any.

    ``words``: options of train.py that the command line adds to all runs. ``published``: values by (key of group, key
    of gate, column), in our units. ``baseline``: the key of the gate whose FLOPs are 100 %. ``remarks``: sentences on
    the claims, such as what was tried where one does not hold.
    """

    name: str
    title: str
    source: str
    scale: str
    note: str
    groups: list[Part]
    gates: list[Part]
    search: Part
    words: list[str]
    seeds: int
    n_trials: int
    seed: int
    sampler: dict[str, Any]
    pruner: dict[str, Any]
    baseline: str | None
    columns: list[str]
    published: dict[tuple[str, str, str], Value]
    claims: list[Claim]
    remarks: list[str]

    def pairs(self) -> list[tuple[Part, Part]]:
        """Return the (group, gate) of each row of the tables."""
        return [(group, gate) for group in self.groups for gate in self.gates]

    def definition(self, group: Part, gate: Part, chosen: Sequence[str] | None, trial: int = 0) -> Definition:
        """Return the study of a gate in a group: its search, or, given what that has ``chosen``, its runs.

        ``chosen``: words; ``trial``: the number of the trial that they are from.
        """
        label, further, space = f"{group.key}/{gate.key}", chosen or [], self.space_of(gate)
        clash = [word for word in self.words if key_of(word) in space]
        require(not clash, f"{' '.join(clash)}: {self.name} searches this option; leave it out")
        if chosen is None:
            label, further = f"{label}/search", self.search.words
        elif chosen:
            label = f"{label}/trial_{trial}"
        words = {key_of(word): word for word in (*group.words, *gate.words, *further, *self.words)}
        return Definition(
            f"{self.name}/{self.scale}/{label}",
            label,
            list(words.values()),
            space if chosen is None else {},
            self.sampler,
            self.pruner,
            self.seed,
        )

    def space_of(self, gate: Part) -> dict[str, Any]:
        """Return what is searched for the gate before its runs; {} if nothing is."""
        return self.search.space | gate.space if self.n_trials else {}


def read(cfg: DictConfig, name: str, words: Sequence[str]) -> Paper:
    """Return what ``cfg``, the composed ``conf/reproduce.yaml``, asks for; ``name``: of the file in ``conf/paper``.

    ``words``: options of train.py for all runs, which replace those of the file. Raises InputError for a wrong option.
    """
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    check_workers(plain)
    scales = plain["scales"]
    require(plain["scale"] in scales, f"scale={plain['scale']}: {name} has {', '.join(scales)}")
    scale = scales[plain["scale"]]
    _known(f"scales.{plain['scale']}", scale, _SCALE)
    check_whole(f"scales.{plain['scale']}.seeds", scale.get("seeds"), at_least=1)
    check_whole(f"scales.{plain['scale']}.n_trials", scale.get("n_trials", 0), at_least=0)
    shared = [*plain["fixed"], *scale.get("fixed", [])]
    groups, gates = _parts("groups", plain["groups"], []), _parts("gates", plain["gates"], ["gate={}"])
    for claim in plain["claims"]:
        _known("claims", claim, _CLAIM)
        for key, parts in (("group", groups), ("gate", gates)):
            require(claim[key] in parts, f"claims: {claim['text']!r}: {key} {claim[key]} is not one of the file")
        missing = set(claim.get("than", ())) - gates.keys()
        require(not missing, f"claims: {claim['text']!r}: gate {', '.join(missing)} is not one of the file")
    require(plain["baseline"] in (None, *gates), f"baseline={plain['baseline']}: is not a gate of the file")
    only = [word for word in str(plain["only"] or "").split(",") if word]
    unknown = [word for word in only if word not in {**groups, **gates}]
    require(not unknown, f"only={','.join(only)}: {name} has the groups {', '.join(groups)}; gates {', '.join(gates)}")
    return Paper(
        name=name,
        title=plain["title"],
        source=plain["source"],
        scale=plain["scale"],
        note=scale.get("note", ""),
        groups=[Part(each.key, each.name, [*shared, *each.words], {}) for each in _wanted(groups, only)],
        gates=_wanted(gates, only),
        search=Part("search", "search", scale.get("search", []), plain["space"]),
        words=list(words),
        seeds=scale["seeds"],
        n_trials=scale.get("n_trials", 0),
        seed=plain["seed"],
        sampler=plain["sampler"],
        pruner=plain["pruner"],
        baseline=plain["baseline"],
        columns=plain["columns"],
        published=_published(plain["published"] or {}, groups, gates),
        claims=[Claim(**{**claim, "than": tuple(claim.get("than", ()))}) for claim in plain["claims"]],
        remarks=plain["remarks"],
    )


def _parts(where: str, given: Mapping[str, Any], default: Sequence[str]) -> dict[str, Part]:
    require(bool(given), f"{where}: must have at least one entry")
    found = {}
    for key, part in given.items():
        check_name(where, key)
        _known(f"{where}.{key}", part, {"name", "fixed", "space"})
        words = part.get("fixed", [word.format(key) for word in default])
        found[key] = Part(key, part.get("name", NAMES.get(key, key.replace("_", " "))), words, part.get("space", {}))
    return found


def _wanted(parts: Mapping[str, Part], only: Sequence[str]) -> list[Part]:
    """Return the parts that ``only`` names, all if it names none of them."""
    return [parts[key] for key in parts if key in only] or list(parts.values())


def _published(given: Mapping[str, Any], groups: Mapping[str, Part], gates: Mapping[str, Part]) -> Any:
    _known("published", given, {"values", "units"})
    units = given.get("units", {})
    found = {}
    for group, rows in given.get("values", {}).items():
        require(group in groups, f"published: {group} is not a group of the file")
        for gate, columns in rows.items():
            require(gate in gates, f"published: {gate} is not a gate of the file")
            for column, value in columns.items():
                mean, error = value if isinstance(value, list) else (value, None)
                unit = units.get(column, 1)
                found[group, gate, column] = (mean / unit, None if error is None else error / unit)
    return found


def _known(where: str, given: Any, accepted: set[str]) -> None:
    require(isinstance(given, Mapping), f"{where}: must have some of {', '.join(sorted(accepted))}")
    unknown = set(given) - accepted
    require(not unknown, f"{where}: {', '.join(sorted(unknown))} is not known; accepted: {', '.join(sorted(accepted))}")
