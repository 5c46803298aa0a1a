"""Spare Lightning the calls that do nothing: each costs as much as a small layer, and a step has hundreds."""

from __future__ import annotations

from functools import partial
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.profilers import PassThroughProfiler

STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


class _Nothing:
    """A context that does nothing, without a line of Python: formatting an empty string takes any arguments."""

    __enter__ = __exit__ = staticmethod("".format)


class NoProfiler(PassThroughProfiler):
    """Profile nothing; Lightning's own makes a new context for each of 35 actions of a step."""

    def __init__(self) -> None:
        super().__init__()
        self._nothing = _Nothing()
        self.profile: Any = partial(getattr, self, "_nothing")  # what else it is given is the default; no Python either


def drop_empty_hooks(thing: Callback | LightningModule, base: type) -> None:
    """Take off ``thing`` the hooks of a step that it has from ``base``: Lightning passes over what cannot be called."""
    unused = [name for name in STEP_HOOKS if getattr(type(thing), name) is getattr(base, name)]
    if type(thing) is ModelCheckpoint and thing._every_n_train_steps < 1 and thing._train_time_interval is None:
        unused.append("on_train_batch_end")
    vars(thing).update(dict.fromkeys(unused))


def need_hook(trainer: Trainer, callback: Callback, name: str, needed: bool) -> None:
    """Have this ``trainer`` call the hook ``name`` of its ``callback``, or pass over it if it is not ``needed``."""
    vars(callback).pop(name, None)
    if not needed and isinstance(trainer, Trainer):  # whoever calls hooks by hand finds them all
        vars(callback)[name] = None
