"""Keep the best checkpoints of a run."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint

from mtl.checkpoints.files import give_second_name
from mtl.checks import require
from mtl.distributed import gather
from mtl.options import MANY, Name, validated
from mtl.training.metrics import mode_of
from mtl.training.module import MultiTaskModule

from .length import ends_epoch, validates_within_epoch
from .monitored import Watcher

log = logging.getLogger(__name__)

NAME = "best.ckpt"


class BestCheckpoint(Watcher, ModelCheckpoint):
    """Keep the ``save_top_k`` best checkpoints (-1: all) by ``monitor`` in ``dirpath``; ``best.ckpt`` is the best.

    ``mode``: whether the best value is the lowest or the highest; auto: see ``mode_of``. With ``save_top_k=1`` there is
    only ``best.ckpt``. Otherwise the files are named after epoch and step, and ``best.ckpt`` is a second name for the
    best file. Each validation counts once; a NaN or infinite value never counts.

    The state holds the scores by file name, without the folder, so that a run folder may be moved or copied. A resumed
    run continues with the files in its folder.
    """

    section = "callbacks.best"

    @validated
    def __init__(
        self,
        dirpath: str,
        monitor: Name = "val/loss",
        mode: Literal["min", "max", "auto"] = "auto",
        save_top_k: Annotated[int, Field(ge=-1, le=MANY)] = 1,
        save_weights_only: bool = False,
    ) -> None:
        require(save_top_k != 0, "callbacks.best.save_top_k=0: must be at least 1, or -1 to keep all checkpoints")
        super().__init__(
            dirpath,
            "best" if save_top_k == 1 else "best_epoch{epoch:03d}_step{step}",
            monitor,
            save_top_k=save_top_k,
            save_weights_only=save_weights_only,
            mode=mode_of(monitor, mode),
            auto_insert_metric_name=False,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )
        self._lost = ""  # the best checkpoint that a resumed run lacks
        self._writes = True  # whether this is the process that writes files

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._writes = trainer.is_global_zero

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._lost and self._writes:
            found = f"the best of the others is {self.best_model_path}" if self.best_model_path else "starting anew"
            log.warning("the best checkpoint so far, %s, is not in %s: %s", self._lost, self.dirpath, found)
        self._lost = ""

    def on_validation_end(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if not trainer.sanity_checking and validates_within_epoch(trainer):
            self._look(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        if ends_epoch(trainer):  # a run that ends within an epoch resumes there, before this validation
            self._look(trainer, pl_module)

    def _look(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        if not self.is_fresh(trainer, pl_module):
            return
        value = float(trainer.callback_metrics[str(self.monitor)])
        if not math.isfinite(value):
            log.warning("epoch %d: %s is %s, so its checkpoint is not kept", trainer.current_epoch, self.monitor, value)
            return
        super().on_train_epoch_end(trainer, pl_module)
        if self.save_top_k != 1 and self.best_model_path and self._writes and not trainer.fast_dev_run:
            give_second_name(Path(self.best_model_path), Path(self.best_model_path).with_name(NAME))

    def state_dict(self) -> dict[str, Any]:
        scores = {Path(path).name: score for path, score in self.best_k_models.items()}
        return {"scores": scores, "best_model_score": self.best_model_score}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the files of ``state_dict`` that exist in ``dirpath``, with their scores."""
        folder, scores = Path(str(self.dirpath)), state_dict["scores"]
        ranked = sorted(scores, key=lambda name: float(scores[name]), reverse=self.mode == "max")
        here: list[str] = gather([name for name in ranked if (folder / name).is_file()])[0]  # rank 0 has the files
        self._lost = "" if ranked[:1] == here[:1] else ranked[0]
        kept = here if self.save_top_k == -1 else here[: self.save_top_k]
        self.best_k_models = {str(folder / self._name_for(folder, name)): scores[name] for name in kept}
        self.best_model_path = next(iter(self.best_k_models), "")
        self.best_model_score = self.best_k_models.get(self.best_model_path)
        if len(kept) == self.save_top_k:
            self.kth_best_model_path, self.kth_value = list(self.best_k_models.items())[-1]

    def _name_for(self, folder: Path, name: str) -> str:
        """Return the new name of a restored checkpoint, since ``save_top_k`` may have changed."""
        if (name == NAME) == (self.save_top_k == 1):
            return name
        new = NAME if self.save_top_k == 1 else "best_earlier.ckpt"
        if self._writes:
            give_second_name(folder / name, folder / new)
        return new
