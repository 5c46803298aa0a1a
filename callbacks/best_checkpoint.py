"""Keep the best checkpoint of a run."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, Literal

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint

from mtl.checkpoints.files import read
from mtl.checks import InputError
from mtl.distributed import gather
from mtl.options import Name, validated
from mtl.training.metrics import mode_of
from mtl.training.module import MultiTaskModule

from .monitoring import MonitoringCallback

log = logging.getLogger(__name__)


class BestCheckpoint(MonitoringCallback, ModelCheckpoint):  # type: ignore[misc]  # its hooks take a MultiTaskModule
    """Keep the best checkpoint by ``monitor`` as ``dirpath/best.ckpt``.

    ``mode``: whether the best value is the lowest or the highest; auto: see ``mode_of``. Each validation counts once; a
    NaN or infinite value never counts. The state holds no folder, so that a run folder may be moved or copied.
    """

    section, within_epochs = "callbacks.best", True

    @validated
    def __init__(
        self,
        dirpath: str,
        monitor: Name = "val/loss",
        mode: Literal["min", "max", "auto"] = "auto",
        save_weights_only: bool = False,
    ) -> None:
        super().__init__(
            dirpath,
            "best",
            monitor,
            save_weights_only=save_weights_only,
            mode=mode_of(monitor, mode),
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )
        self._is_lost = False  # whether a resumed run lacks its best checkpoint

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_lost and trainer.is_global_zero:
            log.warning("the best checkpoint so far, best.ckpt, is not in %s, or damaged: starting anew", self.dirpath)
        self._is_lost = False

    def on_value(self, trainer: Trainer, pl_module: MultiTaskModule, value: float) -> None:
        if math.isfinite(value):
            ModelCheckpoint.on_train_epoch_end(self, trainer, pl_module)
        else:
            log.warning("epoch %d: %s is %s, so its checkpoint is not kept", trainer.current_epoch, self.monitor, value)

    def state_dict(self) -> dict[str, Any]:
        return {"best_model_score": self.best_model_score}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the score, if the checkpoint with it is in ``dirpath``.

        A run that was killed may have found a better one after its last save: the score is that of the file. The test
        at the end of a training restores the state too; the score is known by then.
        """
        if self.best_model_path:
            return
        path = Path(str(self.dirpath)) / "best.ckpt"
        state_in_file = gather(self._state_in(path))[0]  # rank 0 has the file
        score = (state_in_file or state_dict)["best_model_score"]
        self._is_lost = score is not None and state_in_file is None
        if score is not None and state_in_file is not None:
            self.best_model_path = self.kth_best_model_path = str(path)
            self.best_model_score = self.kth_value = score
            self.best_k_models = {str(path): score}

    def _state_in(self, path: Path) -> dict[str, Any] | None:
        """Return the state of this callback in a checkpoint, empty if it has only weights; None if it is unreadable."""
        try:
            state: dict[str, Any] = read(path, sharded=True).get("callbacks", {}).get(self.state_key, {})
        except InputError:  # missing or damaged
            return None
        return state
