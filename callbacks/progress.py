"""Show a progress bar."""

from __future__ import annotations

from pytorch_lightning.callbacks import RichProgressBar

from mtl.checks import check_whole


class Progress(RichProgressBar):
    """Show the progress of each epoch, redrawn every ``refresh_rate`` batches (0: no bar).

    Lines that are printed above the bar are not broken, so that a path can be copied.
    """

    def __init__(self, refresh_rate: int = 10, leave: bool = False) -> None:
        check_whole("callbacks.progress.refresh_rate", refresh_rate, at_least=0)
        super().__init__(refresh_rate=refresh_rate, leave=leave, console_kwargs={"soft_wrap": True})
