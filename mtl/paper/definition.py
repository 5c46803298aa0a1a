"""What a table or figure of a publication consists of: groups of settings, read from ``conf/paper``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mtl.tune.definition import Definition
from mtl.types import check_name, check_number, check_whole, require

Value = tuple[float, float | None]  # mean and standard error, None if that is not published
_SCALE = {"seeds", "n_trials", "fixed", "note"}
_CLAIM = {"text", "group", "column", "setting", "than", "by", "higher", "at_least", "at_most"}


@dataclass(frozen=True)
class Part:
    """A group or a setting: its key in the file, its name for the reader, its words and its space."""

    key: str
    name: str
    words: list[str]
    space: dict[str, Any]


@dataclass(frozen=True)
class Claim:
    """A sentence of the publication about ``setting``, in ``group``, on ``column``.

    With ``than``: its mean is better than that of each of these settings, by at least the share ``by`` of theirs;
    ``higher`` says whether higher values are better. Else its mean is at least ``at_least`` or at most ``at_most``. The
    names of group and settings are their keys.
    """

    text: str
    group: str
    column: str
    setting: str
    than: tuple[str, ...] = ()
    by: float | None = None
    higher: bool = False
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True)
class Paper:
    """A table or figure at one scale. ``seeds``: runs of each setting; ``n_trials``: of its search before, if any.

    ``words``: options of train.py that the command line adds to all runs. ``published``: values by (key of group, key
    of setting, column), in our units.
    """

    name: str
    title: str
    source: str
    scale: str
    note: str
    groups: list[Part]
    settings: list[Part]
    search: Part
    words: list[str]
    seeds: int
    n_trials: int
    seed: int
    sampler: dict[str, Any]
    pruner: dict[str, Any]
    columns: list[str]
    published: dict[tuple[str, str, str], Value]
    claims: list[Claim]

    def pairs(self) -> list[tuple[Part, Part]]:
        """Return the (group, setting) of each row of the tables."""
        return [(group, setting) for group in self.groups for setting in self.settings]

    def definition(self, group: Part, setting: Part, chosen: Sequence[str] | None, trial: int = 0) -> Definition:
        """Return the study of a setting in a group: its search, or, given what that has ``chosen``, its runs.

        ``chosen``: words; ``trial``: the number of the trial that they are from.
        """
        label = f"{group.key}/{setting.key}"
        space: dict[str, Any] = {}
        if chosen is None:
            space, label = searched, f"{label}/search"
        elif chosen:
            label = f"{label}/trial_{trial}"
        searched = self.search.space | setting.space if self.is_searched(setting) else {}
        clash = [word for word in self.words if _key(word) in searched]
        require(not clash, f"{' '.join(clash)}: {self.name} searches this option; leave it out")
        further = self.search.words if chosen is None else chosen
        words = {_key(word): word for word in (*group.words, *setting.words, *further, *self.words)}
        return Definition(
            f"{self.name}/{self.scale}/{label}",
            label,
            list(words.values()),
            space,
            self.sampler,
            self.pruner,
            self.seed,
        )

    def is_searched(self, setting: Part) -> bool:
        """Return whether options of the setting are searched before its runs."""
        return self.n_trials > 0 and bool(self.search.space | setting.space)


def read(cfg: DictConfig, name: str, words: Sequence[str]) -> Paper:
    """Return what ``cfg``, the composed ``conf/reproduce.yaml``, asks for; ``name``: of the file in ``conf/paper``.

    ``words``: options of train.py for all runs, which replace those of the file. Raises InputError for a wrong option.
    """
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    check_whole("seed", plain["seed"], at_least=0)
    check_whole("retries", plain["retries"], at_least=0)
    check_whole("max_failures", plain["max_failures"], at_least=1, or_null=True)
    check_number("heartbeat", plain["heartbeat"], above=0)
    scales = plain["scales"]
    require(plain["scale"] in scales, f"scale={plain['scale']}: {name} has {', '.join(scales)}")
    scale = scales[plain["scale"]]
    _known(f"scales.{plain['scale']}", scale, _SCALE)
    check_whole(f"scales.{plain['scale']}.seeds", scale.get("seeds"), at_least=1)
    check_whole(f"scales.{plain['scale']}.n_trials", scale.get("n_trials", 0), at_least=0)
    shared = [*plain["fixed"], *scale.get("fixed", [])]
    groups, settings = _parts("groups", plain["groups"]), _parts("settings", plain["settings"])
    for claim in plain["claims"]:
        _known("claims", claim, _CLAIM)
        for key, parts in (("group", groups), ("setting", settings)):
            require(claim[key] in parts, f"claims: {claim['text']!r}: {key} {claim[key]} is not one of the file")
        missing = set(claim.get("than", ())) - settings.keys()
        require(not missing, f"claims: {claim['text']!r}: setting {', '.join(missing)} is not one of the file")
    only = [word for word in str(plain["only"] or "").split(",") if word]
    unknown = [word for word in only if word not in {**groups, **settings}]
    require(
        not unknown, f"only={','.join(only)}: {name} has the groups {', '.join(groups)}; settings {', '.join(settings)}"
    )
    search = plain["search"] or {}
    _known("search", search, {"fixed", "space"})
    return Paper(
        name=name,
        title=plain["title"],
        source=plain["source"],
        scale=plain["scale"],
        note=scale.get("note", ""),
        groups=[
            Part(each.key, each.name, [*shared, *each.words], {}) for each in _wanted(groups, only)
        ],
        settings=_wanted(settings, only),
        search=Part("search", "search", search.get("fixed", []), search.get("space", {})),
        words=list(words),
        seeds=scale["seeds"],
        n_trials=scale.get("n_trials", 0),
        seed=plain["seed"],
        sampler=plain["sampler"],
        pruner=plain["pruner"],
        columns=plain["columns"],
        published=_published(plain["published"] or {}, groups, settings),
        claims=[Claim(**{**claim, "than": tuple(claim.get("than", ()))}) for claim in plain["claims"]],
    )


def _parts(where: str, given: Mapping[str, Any]) -> dict[str, Part]:
    require(bool(given), f"{where}: must have at least one entry")
    found = {}
    for key, part in given.items():
        check_name(where, key)
        _known(f"{where}.{key}", part, {"name", "fixed", "space"})
        found[key] = Part(key, part.get("name", key.replace("_", " ")), part.get("fixed", []), part.get("space", {}))
    return found


def _wanted(parts: Mapping[str, Part], only: Sequence[str]) -> list[Part]:
    """Return the parts that ``only`` names, all if it names none of them."""
    return [parts[key] for key in parts if key in only] or list(parts.values())


def _published(given: Mapping[str, Any], groups: Mapping[str, Part], settings: Mapping[str, Part]) -> Any:
    _known("published", given, {"values", "units"})
    units = given.get("units", {})
    found = {}
    for group, rows in given.get("values", {}).items():
        require(group in groups, f"published: {group} is not a group of the file")
        for setting, columns in rows.items():
            require(setting in settings, f"published: {setting} is not a setting of the file")
            for column, value in columns.items():
                mean, error = value if isinstance(value, list) else (value, None)
                unit = units.get(column, 1)
                found[group, setting, column] = (mean / unit, None if error is None else error / unit)
    return found


def _known(where: str, given: Any, accepted: set[str]) -> None:
    require(isinstance(given, Mapping), f"{where}: must have some of {', '.join(sorted(accepted))}")
    unknown = set(given) - accepted
    require(not unknown, f"{where}: {', '.join(sorted(unknown))} is not known; accepted: {', '.join(sorted(accepted))}")


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]
