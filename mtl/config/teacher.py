"""Read the finished run that a new network is distilled from, and check that the two fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from mtl.checkpoints.files import read
from mtl.checks import InputError, require
from mtl.config import build
from mtl.config.resume import config_to_load
from mtl.networks.base import MultiTaskNetwork
from mtl.training.distillation import Distillation
from mtl.types import DataSpec, TaskSpec

SIZES = ("vocab_size", "num_hidden_layers", "hidden_size")  # of an encoder, as `transformers` calls them


@dataclass(frozen=True)
class Teacher:
    """A finished run, as its checkpoint at ``path`` describes it; nothing is built yet.

    ``cfg`` is its configuration, ``weights`` are those of its network, ``options`` those of ``Distillation``.
    """

    path: str
    cfg: DictConfig
    weights: Mapping[str, Tensor]
    tasks: Sequence[TaskSpec]
    options: Mapping[str, Any]

    def distillation(self, student: MultiTaskNetwork, spec: DataSpec) -> Distillation:
        """Return the distillation of the teacher into ``student``, for data described by ``spec``.

        Raises InputError if the two cannot be compared. The state of the random generators does not change.
        """
        wrong = [*self._wrong_tasks(spec), *self._wrong_sizes(student.encoder_config)]
        require(not wrong, f"distillation.teacher={self.path} does not fit this run: {'; '.join(wrong)}")
        try:
            with torch.random.fork_rng(devices=[]):
                described = DataSpec(spec.inputs, self.tasks, spec.ground_truth)
                network = build.build_network(self.cfg, described, load_pretrained=False)
            network.load_state_dict(self.weights, assign=True)  # without a copy
        except (InputError, RuntimeError) as error:
            reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
            raise InputError(f"distillation.teacher={self.path} does not fit this run: {reason}") from error
        return Distillation(network, spec.tasks, **self.options, teacher_tasks=self.tasks)

    def _wrong_tasks(self, spec: DataSpec) -> Iterator[str]:
        """Yield a phrase for each task of this run that the teacher lacks, or whose kind or classes differ."""
        tasks_by_name = {task.name: task for task in self.tasks}
        for task in spec.tasks:
            other = tasks_by_name.get(task.name)
            if other is None:
                yield f"it has no task {task.name}, only {', '.join(tasks_by_name)}"
            elif (other.kind, other.outputs) != (task.kind, task.outputs):
                yield f"its task {task.name} is {_described(other)}, here it is {_described(task)}"

    def _wrong_sizes(self, student: Mapping[str, Any]) -> Iterator[str]:
        """Yield a phrase for each size in which the teacher's encoder differs from the ``student``'s."""
        sizes = (self.cfg.network.get("config") or {}) if "pretrained" in self.cfg.network else {}
        for name in SIZES if self.options["layers"] else ("vocab_size",):
            if name in sizes and name in student and sizes[name] != student[name]:
                yield f"its {name} is {sizes[name]}, here it is {student[name]}"


def read_teacher(cfg: DictConfig) -> Teacher | None:
    """Return the teacher of ``cfg.distillation``; None if there is none, or if the run only tests.

    Raises InputError if the checkpoint is damaged, or if it names classes that are not trusted, as for any checkpoint.
    """
    options: Any = OmegaConf.to_container(cfg.distillation, resolve=True)
    path, trust = options.pop("teacher", None), list(cfg.get("trust") or [])
    if path is None or cfg.evaluate:
        return None
    location = f"distillation.teacher={path}"
    require(
        options["layers"] or options["predictions"],
        "distillation.layers=false and distillation.predictions=false leave nothing to compare; distillation=none "
        "trains without a teacher",
    )
    try:
        checkpoint = read(path)
        config = config_to_load(checkpoint, trust)
    except InputError as error:
        raise InputError(f"{location}: {error}") from error
    for title, network in (("this run", cfg.network), ("the teacher", config.network)):
        require(
            not options["layers"] or "pretrained" in network,  # as network=transformer has it
            f"distillation.layers=true compares the hidden states of two Transformers, but {title} has "
            f"{str(network.get('_target_')).split('.')[-1]}; distillation.layers=false compares predictions alone",
        )
    data = build.build_data(config)
    data.load_state_dict(checkpoint.data())
    return Teacher(path, config, checkpoint.weights(), data.spec.tasks, options)


def _described(task: TaskSpec) -> str:
    several = f"{task.outputs} {'quantiles' if task.quantiles else 'classes'}"
    return task.kind if task.outputs == 1 else f"{task.kind} of {several}"
