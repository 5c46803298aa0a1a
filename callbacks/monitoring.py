"""The base of callbacks that act on a monitored metric, and a check that the run logs this metric."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

from pytorch_lightning import Callback, Trainer

from mtl.checks import join_names, require, suggestion
from mtl.training.module import MultiTaskModule

from .phase_length import ends_epoch, validates_within_epoch

KNOWN_PACKAGES = ("mtl.callbacks.", "pytorch_lightning.")  # callbacks of other packages may log what they like


class MonitoringCallback(Callback):
    """Base of callbacks that read the value ``monitor``: subclasses implement ``on_value``.

    A value of the validation is read once after it: at the end of the epoch or, if the class is ``within_epochs`` and
    the validation lies within the epoch, right after it. Other values are read at the end of each epoch. ``section``:
    where the options of the callback are.
    """

    monitor: str | None
    section = "callbacks"
    within_epochs = False
    _validated = False  # whether there was a validation since the value was last read

    def on_value(self, trainer: Trainer, pl_module: MultiTaskModule, value: float) -> None:
        """Act on a new ``value``, which may be NaN or infinite, but not because the metric is undefined on the rows."""
        raise NotImplementedError

    def on_validation_end(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        if trainer.sanity_checking:
            return
        self._validated = True
        if self.within_epochs and validates_within_epoch(trainer):
            self._read(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        if ends_epoch(trainer):  # a run that stops within an epoch validates again when it is resumed
            self._read(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "validated": self._validated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._validated = state_dict.get("validated", False)
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "validated"})

    def _read(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        validated, self._validated = self._validated, False
        name, metrics = str(self.monitor), trainer.callback_metrics
        of_validation = name.startswith("val/") or name not in metrics
        if (validated if of_validation else ends_epoch(trainer)) and name not in pl_module.undefined:
            require_logged(f"{self.section}.monitor={name}", name, list(metrics))
            self.on_value(trainer, pl_module, float(metrics[name]))


class MonitorCheck(Callback):
    """Raise InputError before the first step if a callback's ``monitor`` is a value that will never be logged.

    The module and the callbacks say in ``logged_names`` what they log; a name may be a pattern such as ``val/x*``. If a
    callback of another package has no such method, only ``MonitoringCallback`` finds out.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        names, callbacks = pl_module.logged_names(), trainer.callbacks  # type: ignore[attr-defined]  # not declared
        for callback in callbacks:
            if hasattr(callback, "logged_names"):
                names += callback.logged_names()
            elif not type(callback).__module__.startswith(KNOWN_PACKAGES):
                return
        for callback in callbacks:
            monitor = getattr(callback, "monitor", None)
            if monitor is not None and not any(fnmatch.fnmatchcase(monitor, pattern) for pattern in names):
                section = getattr(callback, "section", type(callback).__name__)
                option = "monitor" if monitor == pl_module.config.get("monitor") else f"{section}.monitor"
                require_logged(f"{option}={monitor}", monitor, names)


def require_logged(option: str, monitor: str, names: Sequence[str]) -> None:
    """Raise InputError unless ``monitor`` is among the logged ``names``; ``option`` is the option as given."""
    general = sorted(names, key=lambda name: name.count("/"))  # names of single tasks and experts come last
    hint = f"there are {join_names(general) or 'none'}{suggestion(monitor, names)}"
    require(monitor in names, f"{option}: no value of this name is logged; {hint}")
