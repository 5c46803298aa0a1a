"""The definition of a study: fixed options, space, sampler and pruner, from ``conf/study`` and the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from mtl.checks import require
from mtl.jobs.setting import FolderName, Setting, WorkerOptions, overrides_by_key
from mtl.options import LargeCount, Name, StrictModel, valid
from mtl.overrides import key_of, last_of_each

FORMAT = 2  # of what the storage holds of a study and its trials; they are refused in another one

DEFAULTS = "defaults"  # folder beside the trials of a method

Space = dict[str, Any]  # see ``mtl.tune.space``
MaybeSpace = Annotated[Space, Field(default_factory=dict)]


class Searches(WorkerOptions):
    """The options that ``conf/tune.yaml`` and ``conf/reproduce.yaml`` have in common; the files explain them."""

    storage: Name | None
    fixed: Annotated[list[str], Field(default_factory=list)]
    space: MaybeSpace
    values: Annotated[dict[str, Any], Field(default_factory=dict)]
    sampler: dict[str, Any]
    pruner: dict[str, Any]


class MethodEntry(StrictModel):
    """The entry of a method, such as a gate, in a study's file."""

    fixed: list[str] | None = None
    space: MaybeSpace


class Study(Searches):
    """The composed ``conf/tune.yaml``."""

    name: FolderName | None
    n_trials: LargeCount
    try_defaults: bool
    methods: dict[str, MethodEntry]


@dataclass(frozen=True)
class Definition(Setting):
    """One study of Optuna: the trials of one method, of which ``overrides`` are what all trials share.

    ``label``: the method, or "" for a study without methods.
    """

    space: Space
    sampler: dict[str, Any]
    pruner: dict[str, Any]
    seed: int

    def defaults(self) -> Setting:
        """Return what all trials share without the options that are searched, which have their defaults."""
        return Setting(f"{self.name}/{DEFAULTS}", f"{self.label}/{DEFAULTS}".lstrip("/"), self.overrides)

    def record(self, monitor: str) -> dict[str, Any]:
        """Return as plain data what must not change between starts of the study."""
        return {
            "format": FORMAT,
            "overrides": overrides_by_key(self.overrides),
            "space": self.space,
            "sampler": self.sampler,
            "pruner": self.pruner,
            "seed": self.seed,
            "monitor": monitor,
        }


def read(cfg: DictConfig, name: str, methods: Sequence[str], overrides: Sequence[str]) -> list[Definition]:
    """Return the studies that ``cfg``, the composed ``conf/tune.yaml``, asks for.

    ``name``: the name of the study's file. ``methods``: those to search ([]: all of the file). ``overrides``: options
    of mtl train, which replace those of the file. Raises InputError for an unknown method or a wrong option.
    """
    study: Study = valid(Study, OmegaConf.to_container(cfg, resolve=True), "")
    entries = study.methods
    if not entries:
        require(len(methods) < 2, f"gate={','.join(methods)}: study {name} has no section methods; give one gate")
        overrides = [*overrides, *(f"gate={method}" for method in methods)]
        entries, methods = {"": MethodEntry(fixed=[], space={})}, []
    missing = [method for method in methods if method not in entries]
    require(not missing, f"gate={','.join(missing)}: study {name} has the methods {', '.join(entries)}")
    title, definitions = study.name or name, []
    for method in methods or entries:
        fixed, space = entries[method].fixed, study.space | entries[method].space
        check_unsearched(overrides, space, f"study {name}")
        fixed = [f"gate={method}"] if fixed is None else fixed
        all_overrides = last_of_each([*study.fixed, *fixed, *overrides])
        label = f"{title}/{method}" if method else title
        definitions.append(Definition(label, method, all_overrides, space, study.sampler, study.pruner, study.seed))
    return definitions


def check_unsearched(overrides: Sequence[str], space: Space, who: str) -> None:
    """Raise InputError if one of ``overrides`` sets an option of ``space``."""
    clash = [override for override in overrides if key_of(override) in space]
    require(not clash, f"{' '.join(clash)}: {who} searches this option; leave it out")
