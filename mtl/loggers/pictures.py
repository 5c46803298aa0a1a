"""Save a picture and show it in every logger that can show pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger

from mtl.files.writing import writing
from mtl.loggers.base import run_loggers

DOTS = 100  # per inch
COMPRESSION = 1  # from 0 to 9; the default 6 takes a third of a picture's time and makes files 7 to 9 % smaller
# Loggers group charts by the part before the first slash, and TensorBoard sorts the groups: this one follows train, val
GROUP = "views"


def save_picture(figure: Any, file: Path, loggers: Sequence[Logger], step: int) -> None:
    """Draw ``figure`` once, into the PNG ``file``, and pass the file to the loggers as ``views/<name of the file>``.

    ``figure``: of matplotlib, whose import here would delay the first line of a run. See ``RunLogger.log_picture``;
    other loggers are skipped.
    """
    with writing(file) as opened:
        figure.savefig(opened, format="png", dpi=DOTS, pil_kwargs={"compress_level": COMPRESSION})
    for logger in run_loggers(loggers):
        logger.log_picture(f"{GROUP}/{file.stem}", file, step)
