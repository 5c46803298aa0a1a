"""Move a scalar buffer of the module along a schedule."""

from __future__ import annotations

import fnmatch
import logging

import torch
from pytorch_lightning import Callback, LightningModule, Trainer

from callbacks.length import Length
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
        self._names: list[str] = []

    @property
    def state_key(self) -> str:
        return f"ScheduledBuffer[{self.target}]"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        names = [name for name, buffer in pl_module.named_buffers() if buffer.dim() == 0]
        self._names = [name for name in names if fnmatch.fnmatchcase(name, self.target)]
        if not self._names:
            log.info("schedule of %s: this network has no such value, nothing to move", self.target)
        require(
            bool(self._names) or not self.required,
            f"schedule of {self.target!r}: the network has no such scalar; it has {', '.join(names) or 'none'}",
        )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if not self._names:
            return
        value = self.value(trainer.global_step, self.length.in_steps(trainer))
        for name in self._names:
            buffer = pl_module.get_buffer(name)
            buffer.fill_(torch.tensor(value, dtype=buffer.dtype))
        if is_logged(trainer, trainer.global_step):
            shown = self.target.removeprefix("network.").replace("*", "all")
            pl_module.log(f"schedule/{shown}", value, on_step=True, on_epoch=False)

    def value(self, step: int, length: float) -> float:
        """Return the value at optimiser step ``step`` of a course of ``length`` steps."""
        return SHAPES[self.shape](min(1.0, step / length), self.start, self.end)
