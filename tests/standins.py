"""What stands in for the LightningModule and the trainer in tests of callbacks."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from mtl.networks.base import MultiTaskNetwork
from mtl.training.measurements import Measurements
from mtl.types import DataSpec, TaskSpec


class Recorder(nn.Module):
    """A LightningModule that keeps what is logged."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, network: nn.Module | None = None, tasks: Iterable[str] = ()) -> None:
        super().__init__()
        self.network, self.tasks = network or nn.Module(), dict.fromkeys(tasks)
        self.logged: dict[str, float] = {}
        self.measured = Measurements()

    def log(self, name: str, value: float, **options: Any) -> None:
        self.logged[name] = value


def bare_network(*tasks: TaskSpec) -> MultiTaskNetwork:
    """Return a network that has a parameter and predicts nothing."""
    network = MultiTaskNetwork(DataSpec({}, tasks))
    network.layer = nn.Linear(1, 1)
    return network


def trainer(step: int = 0, **options: Any) -> Any:
    """Return a trainer after ``step`` steps: of two epochs of 10 batches, unless ``options`` say otherwise."""
    usual = {"accumulate_grad_batches": 1, "num_training_batches": 10, "max_epochs": 2, "max_steps": -1}
    usual |= {"is_global_zero": True, "sanity_checking": False, "testing": False, "log_every_n_steps": 1}
    usual |= {"loggers": [], "datamodule": None, "strategy": None, "current_epoch": 0, "callback_metrics": {}}
    return SimpleNamespace(**usual | options, global_step=step)
