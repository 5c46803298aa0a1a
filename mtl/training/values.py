"""Log many values at once: for monitors and in the loggers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch


def log_values(
    trainer: Any, values: Mapping[str, Any], step: int | None = None, loggers: Iterable[Any] | None = None
) -> None:
    """Put ``values`` into ``trainer.callback_metrics``, where monitors read them, and log them in one row.

    All processes must have the same values. ``step``: by default the latest training step, or the number of steps
    before a test. ``loggers``: by default the trainer's. Lightning's ``log_dict`` would do the same with objects for
    each name, which take about 1 ms per name and epoch.
    """
    if not values:
        return
    numbers = {name: torch.tensor(float(value)) for name, value in values.items()}
    trainer.callback_metrics.update(numbers)
    if trainer.sanity_checking:
        return
    if step is None:
        step = trainer.global_step if trainer.testing else max(0, trainer.global_step - 1)
    row = {name: number.item() for name, number in numbers.items()}
    for logger in trainer.loggers if loggers is None else loggers:
        logger.log_metrics({**row, "epoch": trainer.current_epoch}, step)
        logger.save()
