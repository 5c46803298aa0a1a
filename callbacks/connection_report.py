"""Report who uses which components of a routed network; does nothing with other networks."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor

from mtl.analysis import figures
from mtl.analysis.patterns import active_by_kind, compare_groups, component_names, connections, describe, routed_layers
from mtl.hooks import need_hook
from mtl.module import is_logged

_MOST_LOOKS = 200


class ConnectionReport(Callback):
    """Log ``val/`` and ``test/`` ``active_connections``, ``distinct_patterns``, ``pattern_jaccard``, ``idle_tasks``.

    See ``mtl.analysis.patterns``; also the active share of each layer, and at test of each kind of component
    (``active_connections_<kind>``). Where ``extras["task_group"]`` tells which tasks are related, at test how well the
    patterns fit: ``jaccard_related``, ``jaccard_unrelated``, ``groups_recovered``.

    After the test: ``connections.csv`` and ``connections.png`` in ``dirpath`` (the matrices side by side), and
    ``connection_probabilities`` (csv and png) where gates have probabilities: their course in training, looked at
    before the first step and whenever the trainer logs; of more than 200 looks every second one is kept.
    """

    def __init__(self, dirpath: str, pictures: bool = True) -> None:
        self.folder, self.pictures = Path(dirpath), pictures
        self.steps: list[int] = []
        self.probabilities: list[list[Tensor]] = []  # of each look, of each layer [T, C]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        need_hook(trainer, self, "on_train_batch_end", bool(routed_layers(pl_module)))
        self._look(trainer.global_step, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if is_logged(trainer, trainer.global_step - 1):
            self._look(trainer.global_step, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(trainer.global_step, pl_module)

    def _look(self, step: int, pl_module: LightningModule) -> None:
        gates: list[Any] = [layer.gate for layer in routed_layers(pl_module)]
        known = bool(gates) and all(hasattr(gate, "probabilities") for gate in gates)
        if not known or (self.steps and step <= self.steps[-1]):
            return
        self.steps.append(step)
        self.probabilities.append([gate.probabilities().detach().cpu().clone() for gate in gates])
        if len(self.steps) > _MOST_LOOKS:
            self.steps, self.probabilities = self.steps[::2], self.probabilities[::2]

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        layers = routed_layers(pl_module)
        if not layers:
            return
        values = describe([connections(layer) for layer in layers])
        pl_module.log_dict({f"val/{name}": value for name, value in values.items()})

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        layers = routed_layers(pl_module)
        if not layers:
            return
        matrices = [connections(layer).cpu() for layer in layers]
        values = describe(matrices)
        values |= {f"active_connections_{kind}": share for kind, share in active_by_kind(layers, matrices).items()}
        spec = getattr(getattr(trainer, "datamodule", None), "spec", None)
        if spec is not None and "task_group" in spec.extras:
            values |= compare_groups(matrices, spec.extras["task_group"])
        pl_module.log_dict({f"test/{name}": value for name, value in values.items()})
        if not trainer.is_global_zero:
            return
        module: Any = pl_module
        tasks = list(module.tasks)
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "connections.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["layer", "component", "kind", *tasks])
            for place, (layer, matrix) in enumerate(zip(layers, matrices, strict=True)):
                for number, kind in enumerate(component_names(layer)):
                    writer.writerow([place, number, kind, *matrix[:, number].int().tolist()])
        history = (
            [torch.stack([look[place] for look in self.probabilities]) for place in range(len(layers))]
            if len(self.steps) > 1
            else []
        )
        if history:
            self._write_course(history, tasks)
        if not self.pictures:
            return
        pictures = {"connections": figures.connections(matrices, tasks)}
        if history:
            pictures["connection_probabilities"] = figures.probabilities(self.steps, history, tasks)
        for name, picture in pictures.items():
            picture.savefig(self.folder / f"{name}.png", dpi=120)
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_figure(f"routing/{name}", picture, trainer.global_step)

    def _write_course(self, history: list[Tensor], tasks: list[str]) -> None:
        """Write a row per look; ``history``: ``[N, T, C]`` of each layer."""
        with (self.folder / "connection_probabilities.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            places = [
                f"{task}/{layer}/{n}" for layer, p in enumerate(history) for task in tasks for n in range(p.shape[2])
            ]
            writer.writerow(["step", *places])
            flat = torch.cat([p.flatten(1) for p in history], 1)
            writer.writerows(
                [step, *[f"{p:.6g}" for p in row]] for step, row in zip(self.steps, flat.tolist(), strict=True)
            )

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "probabilities": self.probabilities}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps, self.probabilities = list(state_dict["steps"]), list(state_dict["probabilities"])
