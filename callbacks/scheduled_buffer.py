"""Schedule the value of a scalar buffer of the module."""

from __future__ import annotations

import fnmatch
import logging
import re

from pytorch_lightning import Callback, LightningModule, Trainer
from torch import nn

from mtl.checks import require
from mtl.options import LargeCount, Name, Positive, validated
from mtl.training.module import is_logged
from mtl.training.schedules import SHAPES, Shape, Value, check_schedule

from .phase_length import Part, PhaseLength

log = logging.getLogger(__name__)

OF_ONE_GATE = re.compile(r"\.gates\.[^.]+")  # part of the name of one of several gates, see ``JoinedGates``


class ScheduledBuffer(Callback):
    """Set the scalar buffer ``target`` before each step to its scheduled value.

    The value is logged as ``train/schedule/<target>``.
    ``target`` may be a pattern such as ``network.*gate.temperature``: all matching buffers are set, including the
    buffers of all tasks where each task has its own gate. The value goes from ``start`` to ``end`` in the given
    ``shape`` over ``steps`` optimiser steps, ``epochs`` (may be fractional) or a ``fraction`` of the run, and stays at
    ``end``. It is a pure function of ``trainer.global_step``, so a resumed run continues in the right phase. Raises
    InputError if no buffer matches, unless ``required`` is false.
    """

    @validated
    def __init__(
        self,
        target: Name,
        start: Value,
        end: Value,
        shape: Shape = "linear",
        steps: LargeCount | None = None,
        epochs: Positive | None = None,
        fraction: Part | None = None,
        required: bool = True,
    ) -> None:
        check_schedule(shape, start, end)
        self.target, self.start, self.end, self.shape, self.required = target, start, end, shape, required
        self.length = PhaseLength(f"schedule of {target}", steps, epochs, fraction)
        self._buffers: list[tuple[nn.Module, str]] = []  # (module, name), since moving a module replaces its buffers

    @property
    def state_key(self) -> str:
        return f"ScheduledBuffer[{self.target}]"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        names = [name for name, buffer in pl_module.named_buffers() if buffer.dim() == 0]
        paths = [name.rpartition(".") for name in names if self._matches(name)]
        self._buffers = [(pl_module.get_submodule(owner), name) for owner, _, name in paths]
        if not self._buffers:
            log.info("this network has no %s: nothing to schedule", self.target)
        none = f"the network has no such scalar buffer; it has {', '.join(names) or 'none'}"
        require(bool(self._buffers) or not self.required, f"schedule of {self.target!r}: {none}")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if not self._buffers:
            return
        step = trainer.global_step
        value = SHAPES[self.shape](min(1.0, step / self.length.in_steps(trainer)), self.start, self.end)
        for owner, name in self._buffers:
            getattr(owner, name).fill_(value)
        if is_logged(trainer, step):
            label = self.target.removeprefix("network.").lstrip("*.").replace("*", "all")
            pl_module.log(f"train/schedule/{label}", value, on_step=True, on_epoch=False)

    def _matches(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(form, self.target) for form in (name, OF_ONE_GATE.sub("", name)))
