"""Say that the network is being compiled, which takes minutes without any other output."""

from __future__ import annotations

import logging
import time
from typing import Any

from pytorch_lightning import Callback, Trainer

from mtl.training.module import MultiTaskModule

log = logging.getLogger(__name__)


class CompileReport(Callback):
    """Log one line before the first batch of a run with ``compile=true``, and one with the seconds it took."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._done = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: MultiTaskModule, batch: Any, batch_idx: int) -> None:
        if self._start is None and pl_module.config.get("compile"):
            log.info("compiling the network on its first batch; this can take minutes")
            self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: MultiTaskModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._start is not None and not self._done:
            self._done = True
            log.info("the first batch took %.1f s, compilation included", time.perf_counter() - self._start)
