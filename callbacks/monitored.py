"""Refuse a run whose best checkpoint, early stopping or learning rate monitors a value that nobody logs."""

from __future__ import annotations

import difflib
import fnmatch
import logging
from collections.abc import Sequence

from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint

from mtl.checks import require
from mtl.training.module import MultiTaskModule

from .lr_schedule import PlateauRate

log = logging.getLogger(__name__)

KNOWN = ("mtl.callbacks.", "pytorch_lightning.")  # callbacks of other packages may log what they like
MOST = 12  # names that a message lists


class MonitorCheck(Callback):
    """Raise InputError before the first step if a callback monitors a value that will never be logged.

    The module and the callbacks say in ``logged_names`` what they log; a name may be a pattern such as ``val/x*``. If a
    callback of another package has no such method, this is only a warning.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        names, sure = pl_module.logged_names(), True
        for callback in trainer.callbacks:
            if hasattr(callback, "logged_names"):
                names += callback.logged_names()
            elif not type(callback).__module__.startswith(KNOWN):
                sure = False
        for name, callback in _watchers(trainer):
            monitor = callback.monitor
            if monitor is None or any(fnmatch.fnmatchcase(monitor, known) for known in names):
                continue
            option = "monitor" if monitor == pl_module.config.get("monitor") else f"{name}.monitor"
            if sure:
                require_logged(f"{option}={monitor}", monitor, names)
            log.warning("%s=%s: nothing that is known logs this name", option, monitor)


def _watchers(trainer: Trainer) -> list[tuple[str, ModelCheckpoint | EarlyStopping | PlateauRate]]:
    """Return the callbacks that monitor a value, each with its place in the configuration."""
    found: list[tuple[str, ModelCheckpoint | EarlyStopping | PlateauRate]] = []
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint):
            found.append(("callbacks.best", callback))
        elif isinstance(callback, EarlyStopping):
            found.append(("callbacks.early_stopping", callback))
        elif isinstance(callback, PlateauRate):
            found.append(("callbacks.lr_schedule", callback))
    return found


def require_logged(given: str, monitor: str, names: Sequence[str]) -> None:
    """Raise InputError unless ``monitor`` is among the logged ``names``; ``given`` is the option, as it was given."""
    near = difflib.get_close_matches(monitor, names, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    general = sorted(names, key=lambda name: name.count("/"))  # those of single tasks and experts come last
    shown = ", ".join(general[:MOST]) + (f" and {len(names) - MOST} more" if len(names) > MOST else "")
    require(monitor in names, f"{given}: no value of this name is logged; there are {shown or 'none'}.{hint}")
