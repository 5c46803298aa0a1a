"""Show a progress bar."""

from __future__ import annotations

from pytorch_lightning.callbacks import RichProgressBar

from mtl.options import CountOrZero, validated


class Progress(RichProgressBar):
    """Show the progress of each epoch, redrawn every ``refresh_rate`` batches (0: no bar).

    Lines printed above the bar are not wrapped, so that a path can be copied.
    """

    @validated
    def __init__(self, refresh_rate: CountOrZero = 10, leave: bool = False) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=leave, console_kwargs={"soft_wrap": True})
