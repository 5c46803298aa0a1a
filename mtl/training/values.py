"""Log many values at once: for monitors, and in the loggers under the names of their curves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

# Loggers group curves by the part before the first slash. TensorBoard sorts the groups by name and opens the first two,
# train and val; metrics of the validation have a group of their own, so that val has the losses alone
GROUPS = {"val": "val_metrics"}
LOSSES = ("loss", "step_loss")


def curve_name(name: str) -> str:
    """Return the curve name of the value that monitors know as ``name``: ``val_metrics/x/auroc`` for ``val/x/auroc``.

    Only the names of metrics of the validation differ, not those of its losses.
    """
    group, _, rest = name.partition("/")
    return name if rest.rpartition("/")[2] in LOSSES else f"{GROUPS.get(group, group)}/{rest}"


def log_values(
    trainer: Any,
    values: Mapping[str, Any],
    curve: Callable[[str], str] = curve_name,
    step: int | None = None,
    loggers: Iterable[Any] | None = None,
) -> None:
    """Put ``values`` into ``trainer.callback_metrics``, where monitors read them, and log them in one row.

    ``curve`` maps the name of a value to the name of its curve. All processes must have the same values. ``step``: by
    default the latest training step, or the number of steps before a test. ``loggers``: by default the trainer's.
    Lightning's ``log_dict`` would do the same
    with objects for each name, which take about 1 ms per name and epoch.
    """
    if not values:
        return
    numbers = {name: torch.tensor(float(value)) for name, value in values.items()}
    trainer.callback_metrics.update(numbers)
    if trainer.sanity_checking:
        return
    if step is None:
        step = trainer.global_step if trainer.testing else max(0, trainer.global_step - 1)
    row = {curve(name): number.item() for name, number in numbers.items()}
    for logger in trainer.loggers if loggers is None else loggers:
        logger.log_metrics({**row, "epoch": trainer.current_epoch}, step)
        logger.save()
