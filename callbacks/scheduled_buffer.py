"""Move a scalar buffer of the module along a schedule."""

from __future__ import annotations

import fnmatch
import logging

from pytorch_lightning import Callback, LightningModule, Trainer
from torch import nn

from callbacks.length import Length
from mtl.hooks import need_hook
from mtl.module import is_logged
from mtl.schedules import SHAPES, check_schedule
from mtl.types import require

log = logging.getLogger(__name__)


class ScheduledBuffer(Callback):
    """Set the buffer ``target`` before each step to its scheduled value, and log it as ``schedule/<target>``.

    ``target`` may be a pattern such as ``network.layers.*.gate.temperature``, for several buffers with one course.
    The course runs from ``start`` to ``end`` in the given ``shape`` over ``steps`` optimiser steps, over ``epochs``
    (need not be whole), or over a ``fraction`` of the run, and stays at ``end``. The value is a pure function of
    ``trainer.global_step``, so a resumed run goes on where it was. A network without such a buffer is an error,
    unless not ``required``.
    """

    def __init__(
        self,
        target: str,
        start: float,
        end: float,
        shape: str = "linear",
        steps: int | None = None,
        epochs: float | None = None,
        fraction: float | None = None,
        required: bool = True,
    ) -> None:
        check_schedule(shape, start, end)
        self.target, self.start, self.end, self.shape, self.required = target, start, end, shape, required
        self.length = Length(f"schedule of {target}", steps, epochs, fraction)
        self._buffers: list[tuple[nn.Module, str]] = []  # by owner: a module that moves has others in their place

    @property
    def state_key(self) -> str:
        return f"ScheduledBuffer[{self.target}]"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        names = [name for name, buffer in pl_module.named_buffers() if buffer.dim() == 0]
        paths = [name.rpartition(".") for name in names if fnmatch.fnmatchcase(name, self.target)]
        self._buffers = [(pl_module.get_submodule(owner), name) for owner, _, name in paths]
        need_hook(trainer, self, "on_train_batch_start", bool(self._buffers))
        if not self._buffers:
            log.info("schedule of %s: this network has no such value, nothing to move", self.target)
        require(
            bool(self._buffers) or not self.required,
            f"schedule of {self.target!r}: the network has no such scalar; it has {', '.join(names) or 'none'}",
        )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if not self._buffers:
            return
        step = trainer.global_step
        value = self.value(step, self.length.in_steps(trainer))
        for owner, name in self._buffers:
            getattr(owner, name).fill_(value)
        if is_logged(trainer, step):
            shown = self.target.removeprefix("network.").replace("*", "all")
            pl_module.log(f"schedule/{shown}", value, on_step=True, on_epoch=False)

    def value(self, step: int, length: float) -> float:
        """Return the value at optimiser step ``step`` of a course of ``length`` steps."""
        return SHAPES[self.shape](min(1.0, step / length), self.start, self.end)
