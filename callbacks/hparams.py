"""Give the options of a run to its loggers, and to TensorBoard one row of options and final metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytorch_lightning import Callback, Trainer
from pytorch_lightning.loggers import TensorBoardLogger

from mtl.records import flatten
from mtl.training.module import MultiTaskModule

FIRST = ("network", "gate", "data", "weighting")  # TensorBoard shows five columns unless asked for more
NO_CHOICES = ("paths", "callbacks", "logger", "trainer")  # config groups that say nothing about the training
VALUES = {
    "learning_rate": "optimizer.lr",
    "seed": "seed",
    "batch_size": "data.batch_size",
    "max_epochs": "trainer.max_epochs",
    "num_experts": "recipe.num_experts",
    "dropout": "recipe.dropout",
}
MOST_TASKS = 4  # up to this many tasks, each main metric has a column; otherwise only averages


class HParamsRecord(Callback):
    """Give each logger the configuration when the run starts; write one row to TensorBoard's page after the test.

    TensorBoard takes the column names from a single run. Therefore all runs have the same columns: the choices of
    config groups, the numbers that every run has, and all options of the gate as one text.
    """

    _given = False

    def setup(self, trainer: Trainer, pl_module: MultiTaskModule, stage: str) -> None:
        if self._given:
            return
        self._given = True
        for logger in trainer.loggers:
            if not isinstance(logger, TensorBoardLogger):
                logger.log_hyperparams(pl_module.config)

    def on_test_end(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        tested = {name: float(value) for name, value in trainer.callback_metrics.items()}
        metrics = {name: tested[name] for name in main_metrics(pl_module) if name in tested}
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.log_hyperparams(columns(pl_module.config), metrics, trainer.global_step)


def columns(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that distinguish runs in a table, the most important first."""
    choices = {name: option for name, option in config.get("choices", {}).items() if name not in NO_CHOICES}
    values = flatten(dict(config))
    numbers = {name: values[key] for name, key in VALUES.items() if values.get(key) is not None}
    gate = {key: value for key, value in values.items() if key.startswith("gate.") and not key.endswith("_")}
    options = ", ".join(f"{key.removeprefix('gate.')}={value}" for key, value in gate.items())
    first = {name: choices.pop(name) for name in FIRST if name in choices}
    return first | numbers | {"gate options": options} | choices


def main_metrics(module: MultiTaskModule) -> list[str]:
    """Return the names of the metrics in the row: the loss, the averages, and the main metrics of a few tasks."""
    mains = [f"{task}/{metric}" for task, metric in module.evaluation.main_metrics().items()]
    shown = ["loss", *module.evaluation.averages, *(mains if len(mains) <= MOST_TASKS else ())]
    return [f"test/{name}" for name in shown]
