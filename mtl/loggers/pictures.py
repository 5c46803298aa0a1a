"""Save a picture and show it in every logger that can show pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from pytorch_lightning.loggers import Logger

from mtl.writing import writing

DOTS = 100  # per inch
COMPRESSION = 1  # of 0 to 9: the usual 6 takes a third of the time of a picture, to make files 7 to 9 % smaller
# Loggers group what they show by the part before the first slash, and TensorBoard sorts the groups: after train and val
GROUP = "visual"


def save_picture(figure: Figure, file: Path, loggers: Sequence[Logger], step: int) -> None:
    """Draw ``figure`` once, into the PNG ``file``, and give that to the loggers as ``visual/<name of the file>``.

    A logger that can show pictures has a method ``log_picture(name, file, step)``; the others are left out.
    """
    with writing(file) as opened:
        figure.savefig(opened, format="png", dpi=DOTS, pil_kwargs={"compress_level": COMPRESSION})
    for logger in loggers:
        if hasattr(logger, "log_picture"):
            logger.log_picture(f"{GROUP}/{file.stem}", file, step)
