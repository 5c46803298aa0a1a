"""The settings that are compared, each as a study of Optuna without a space: its runs differ only by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from mtl.checks import require
from mtl.options import Count, Long, Name, Positive, valid
from mtl.sharing.answer import ALONE, GROUPS, TOGETHER
from mtl.tune.definition import Definition, Searches, unique
from mtl.tune.space import derived_seed, words

HEADS = "heads._target_=mtl.networks.heads.SeparateHeads"  # else momentum would move the heads of a step's other tasks


class Share(Searches):
    """The composed ``conf/share.yaml``, which explains the options."""

    name: Annotated[str, Field(pattern=r"^[^/\s]([^/]*[^/\s])?$", description="a name without slashes")] | None
    seeds: Annotated[Long, Field(ge=2)]
    budget: Positive | None
    pairs: bool
    gates: list[Name]
    groups: Count | None
    every_steps: Long
    show: bool


def read(cfg: DictConfig) -> Share:
    """Return the checked options; raise InputError for a wrong one."""
    options: Share = valid(Share, OmegaConf.to_container(cfg, resolve=True), "")
    require(not options.space, "space: mtl share searches nothing; tune the options first, and give them here")
    return options


@dataclass(frozen=True)
class Setting:
    """A setting: its study, and with which other tasks each task shares."""

    definition: Definition
    mates: Mapping[str, list[str]]


class Settings:
    """Makes the settings of ``tasks``; ``given``: the words of mtl train for all runs, which take precedence."""

    def __init__(self, options: Share, title: str, tasks: Sequence[str], given: Sequence[str], batches: bool) -> None:
        self.options, self.title, self.tasks = options, title, list(tasks)
        self.given = [word for word in given if not word.startswith("gate=")]  # the option gates has them
        self.common = [*options.fixed, "callbacks.routing.pictures=false", "callbacks.progress=null"]
        self.heads = [HEADS] if batches else []

    def base(self) -> dict[str, Setting]:
        """Return the settings alone, together and those with a gate, by name."""
        every = f"callbacks.conflict.every_steps={self.options.every_steps}"
        network = any(word.startswith("network=") for word in self.given)  # the network that is gated
        size = [] if network else [f"recipe.num_experts={len(self.tasks)}"]
        found = {
            ALONE: self._setting(ALONE, ["network=single_task"], [[task] for task in self.tasks]),
            TOGETHER: self._setting(TOGETHER, ["network=shared_bottom", *self.heads, every], [self.tasks]),
        }
        for gate in self.options.gates:
            gated = [*([] if network else ["network=mmoe"]), f"gate={gate}", *size, *self.heads]
            found[gate] = self._setting(gate, gated, [self.tasks], own_network=True)
        return found

    def of_groups(self, groups: Sequence[Sequence[int]], name: str = GROUPS) -> Setting:
        """Return the setting of separate networks for ``groups`` of tasks, given by their indices."""
        named = [[self.tasks[task] for task in group] for group in groups]
        label = f"{name}_{derived_seed(0, *map(tuple, groups)):08x}"
        return self._setting(label, ["network=grouped", *self.heads, *words({"network.groups": named})], named)

    def _setting(self, label: str, own: list[str], groups: list[list[str]], own_network: bool = False) -> Setting:
        given = [word for word in self.given if own_network or not word.startswith("network")]
        options, name = self.options, f"share/{self.title}/{label}"
        chosen = unique([*self.common, *own, *given])
        definition = Definition(name, label, chosen, {}, options.sampler, options.pruner, options.seed)
        mates = {task: [other for other in group if other != task] for group in groups for task in group}
        return Setting(definition, mates)
