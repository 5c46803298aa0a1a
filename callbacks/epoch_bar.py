"""One progress bar over the epochs, for notebooks and scripts."""

from __future__ import annotations

import warnings
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from mtl.files.formatting import number

with warnings.catch_warnings(action="ignore"):  # a notebook without ipywidgets gets the bar of the console
    from tqdm.auto import tqdm


class EpochBar(Callback):
    """Show the number of epochs and the latest and best value of the monitored metric in one line."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._values: list[float] = []  # of the monitored metric

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epochs = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else None
        early = " (may stop early)" if trainer.early_stopping_callbacks else ""
        self._bar = tqdm(total=epochs, desc=f"training{early}", unit="epoch", mininterval=0.5)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        saved: Any = trainer.checkpoint_callback  # not BestCheckpoint if the run has none
        monitor, metrics = getattr(saved, "monitor", None), trainer.callback_metrics
        if monitor in metrics:
            self._values.append(float(metrics[monitor]))
            best = max(self._values) if saved.mode == "max" else min(self._values)
            self._bar.set_postfix_str(f"{monitor} {number(self._values[-1], 4)}, best {number(best, 4)}", refresh=False)
        self._bar.update()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._bar.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._bar is not None:
            self._bar.close()
