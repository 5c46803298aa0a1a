"""The settings that are compared, and what their runs show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import polars as pl
from pydantic import Field

from mtl.analysis.conflicts import affinities, read_table
from mtl.jobs.setting import FolderName, Setting, WorkerOptions, derived_seed, run_folder
from mtl.loggers.base import MAX_LISTED_TASKS
from mtl.options import Count, LargeCount, Name, Positive
from mtl.overrides import last_of_each, write_value
from mtl.report.runs import Named, read_named_runs
from mtl.sharing.answer import ALONE, GROUPS, TOGETHER, SharingGain, measure_gains
from mtl.sharing.grouping import Group


class ShareOptions(WorkerOptions):
    """The composed ``conf/share.yaml``, which explains the options."""

    name: FolderName | None
    seeds: Annotated[LargeCount, Field(ge=2)]
    budget: Positive | None
    gates: list[Name]
    groups: Count | None
    every_n_steps: LargeCount
    show: bool


@dataclass(frozen=True)
class SharedSetting(Setting):
    """A setting, and with which other tasks each task shares."""

    partners: Mapping[str, list[str]]


@dataclass
class Comparison:
    """The settings that are compared, and what is known of them after (or, with ``show=true``, during) the runs.

    ``run_overrides``: options of mtl train for all runs, which take precedence. ``task_batches``: whether a batch has
    the labels of some tasks only. ``own_splits``: whether each seed has a random split of its own. ``seeds``: of each
    setting. ``groups``: chosen by the affinities, if any were measured. ``labels``: of the training rows, by task.
    ``budget_note``: a sentence on what the budget leaves out.
    """

    options: ShareOptions
    folder: Path
    tasks: list[str]
    run_overrides: Sequence[str]
    task_batches: bool
    own_splits: bool
    seeds: range = range(0)
    settings: dict[str, SharedSetting] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    labels: Mapping[str, int] = field(default_factory=dict)
    budget_note: str = ""

    def __post_init__(self) -> None:
        """Add the settings alone, together and those with a gate; of many tasks, only those that are joint.

        A network for each of them, affinities of all pairs and as many experts would take too long.
        """
        every = [f"callbacks.conflict.every_n_steps={self.options.every_n_steps}"]
        if not self.are_many:
            self.settings[ALONE] = self._setting(ALONE, ["network=single_task"], [[task] for task in self.tasks])
        joint = ["network=shared_bottom", *([] if self.are_many else every)]
        self.settings[TOGETHER] = self._setting(TOGETHER, joint, [self.tasks])
        named = any(override.startswith("network=") for override in self.run_overrides)  # the network that is gated
        experts = [] if self.are_many else [f"recipe.num_experts={len(self.tasks)}"]
        network = [] if named else ["network=mmoe", *experts]
        for gate in self.options.gates:
            self.settings[gate] = self._setting(gate, [*network, f"gate={gate}"], [self.tasks], gated=True)

    @property
    def are_many(self) -> bool:
        """Whether the tasks are too many for networks of their own."""
        return len(self.tasks) > MAX_LISTED_TASKS

    def of_groups(self, groups: Sequence[Group]) -> SharedSetting:
        """Return the setting of separate networks for ``groups`` of tasks."""
        named = [[self.tasks[task] for task in group] for group in groups]
        label = f"{GROUPS}_{derived_seed(0, *groups):08x}"
        return self._setting(label, ["network=grouped", f"network.groups={write_value(named)}"], named)

    def _setting(self, label: str, overrides: list[str], groups: list[list[str]], gated: bool = False) -> SharedSetting:
        common = ["callbacks.routing.figures=false", "callbacks.progress=null"]
        heads = ["heads=per_task"] if self.task_batches else []  # momentum would move the heads of a step's other tasks
        splits = ["data.seed=${seed}"] if self.own_splits else []
        replaced = ("gate=", *(() if gated else ("network",)))
        run_overrides = [override for override in self.run_overrides if not override.startswith(replaced)]
        chosen = last_of_each([*common, *heads, *splits, *overrides, *run_overrides])
        name = f"share/{self.folder.name}/{label}"
        partners = {task: [other for other in group if other != task] for group in groups for task in group}
        return SharedSetting(name, label, chosen, partners)

    def runs(self, settings: Mapping[str, SharedSetting]) -> dict[Path, Named]:
        """Return the run folders of some settings, each with its setting and seed."""
        return {
            run_folder(self.folder, setting.label, number): (name, seed)
            for name, setting in settings.items()
            for number, seed in enumerate(self.seeds)
        }

    def gains_over_alone(self, settings: Mapping[str, SharedSetting]) -> list[SharingGain]:
        """Return the gains of the tasks in some settings on validation rows, as ``measure_gains``."""
        runs = read_named_runs(self.runs({ALONE: self.settings[ALONE], **settings}))
        return measure_gains(runs, {name: setting.partners for name, setting in settings.items()}, "val")

    def conflicts(self) -> list[pl.DataFrame]:
        """Return what the joint runs measured of their gradients, see ``mtl.analysis.conflicts.as_table``."""
        files = [path / "conflict.csv" for path in self.runs({TOGETHER: self.settings[TOGETHER]})]
        return [read_table(file) for file in files if file.exists()]

    def affinity(self) -> np.ndarray:
        """Return the ``affinities`` of the joint runs."""
        return affinities(self.conflicts(), self.tasks)
