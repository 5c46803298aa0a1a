"""Record a run's options and final metrics in TensorBoard, once."""

from __future__ import annotations

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import TensorBoardLogger

from mtl.records import flatten

SECTIONS = ("setting.", "experts.", "gate.", "optimizer.", "permutation.")
CHOICES = ("seed", "label", *SECTIONS, "data._target_", "network._target_")
PARTS = ("test/expert_share/", "test/experts_per_sample/")  # metrics of single experts and tasks: left out


class HParamsRecord(Callback):
    """Write one row to TensorBoard's HParams page after the test: the chosen options and the final metrics."""

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        config = {
            key: value
            for key, value in flatten(pl_module.config).items()
            if key.startswith(CHOICES) and not key.endswith("._partial_")
        }
        metrics = {
            f"final/{name}": float(value)
            for name, value in trainer.callback_metrics.items()
            if name.startswith("test/") and not name.startswith(PARTS)
        }
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                logger.log_hyperparams(config, metrics)
