"""Show a progress bar."""

from __future__ import annotations

from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import RichProgressBar
from rich.console import Console

from mtl.options import CountOrZero, validated


class Progress(RichProgressBar):
    """Show the progress of each epoch, redrawn every ``refresh_rate`` batches (0: no bar).

    Output that goes into a file or a pipe has no bar. Lines printed above the bar are not wrapped, so that a path can
    be copied.
    """

    @validated
    def __init__(self, refresh_rate: CountOrZero = 10) -> None:
        console = Console()
        rate = refresh_rate if console.is_terminal or console.is_jupyter else 0
        super().__init__(refresh_rate=rate, console_kwargs={"soft_wrap": True})

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the loss of the last step, all that fits beside the bar; the line of each epoch has the rest."""
        step_loss = trainer.progress_bar_metrics.get("train/step_loss")
        return {} if step_loss is None else {"loss": float(step_loss)}
