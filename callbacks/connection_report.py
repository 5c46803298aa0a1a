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


class ConnectionReport(Callback):
    """Log ``val/`` and ``test/`` ``active_connections``, ``distinct_patterns``, ``pattern_jaccard``, ``idle_tasks``.

    See ``mtl.analysis.patterns``; also the active share of each layer, and at test of each kind of component
    (``active_connections_<kind>``). Where ``extras["task_group"]`` tells which tasks are related, at test how well the
    patterns fit: ``jaccard_related``, ``jaccard_unrelated``, ``groups_recovered``.

    After the test: ``connections.csv`` and ``connections.png`` in ``dirpath`` (the matrices side by side), and
    ``connection_probabilities.png`` where gates have probabilities: their course over epochs.
    """

    def __init__(self, dirpath: str, pictures: bool = True) -> None:
        self.folder, self.pictures = Path(dirpath), pictures
        self.steps: list[int] = []
        self.probabilities: list[list[Tensor]] = []  # of each epoch, of each layer [T, C]

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        layers = routed_layers(pl_module)
        if not layers:
            return
        values = describe([connections(layer) for layer in layers])
        pl_module.log_dict({f"val/{name}": value for name, value in values.items()})
        gates: list[Any] = [layer.gate for layer in layers]
        if all(hasattr(gate, "probabilities") for gate in gates):
            self.steps.append(trainer.global_step)
            self.probabilities.append([gate.probabilities().detach().cpu().clone() for gate in gates])

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
        if not self.pictures:
            return
        pictures = {"connections": figures.connections(matrices, tasks)}
        if len(self.steps) > 1:
            history = [torch.stack([epoch[place] for epoch in self.probabilities]) for place in range(len(layers))]
            pictures["connection_probabilities"] = figures.probabilities(self.steps, history, tasks)
        for name, picture in pictures.items():
            picture.savefig(self.folder / f"{name}.png", dpi=120)
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_figure(f"routing/{name}", picture, trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "probabilities": self.probabilities}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps, self.probabilities = list(state_dict["steps"]), list(state_dict["probabilities"])
