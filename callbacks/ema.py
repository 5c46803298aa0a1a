"""Average the weights over training, and evaluate and save the average."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from mtl.distributed import local_shard
from mtl.nn.functional import at_least_float32
from mtl.options import Fraction, validated

from .phase_length import did_step


class WeightAverage(Callback):
    """Keep an exponential moving average of the trained parameters; ``decay=None`` keeps none.

    After optimiser step t, counted from 0, average = d average + (1 - d) parameters with d = min(``decay``, (1 + t) /
    (10 + t)), as in TensorFlow's ``ExponentialMovingAverage``: a short run, too, forgets its initial weights.

    Validation, test and the ``state_dict`` of every checkpoint use the average; training goes on with the parameters,
    which are saved as this callback's state, so that a resumed run is exact. Buffers are not averaged: temperatures,
    permutations and tables have their current values in both.

    Lightning's ``WeightAveraging`` is not used: it also averages integer and boolean buffers, copies weights before the
    Trainer converts them to its precision, and tests a checkpoint with the parameters instead of their average.
    """

    @validated
    def __init__(self, decay: Fraction | None = None) -> None:
        self.decay = decay
        self._parameters: dict[str, nn.Parameter] = {}
        self._average: dict[str, Tensor] = {}  # in float32 at least: bfloat16 would round most changes away
        self._trained: dict[str, Tensor] = {}  # the values of the parameters while they hold the average
        self._hook: Any = None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint["callbacks"].get(self.state_key)
        if saved and trainer.state.fn == TrainerFn.FITTING:
            self._trained = saved["parameters"]
            self._average = {name: checkpoint["state_dict"][name] for name in self._trained}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start from the current weights, or restore the weights of a checkpoint, even with ``decay=None``."""
        self._parameters = {name: p for name, p in pl_module.named_parameters() if p.requires_grad}
        parameters = self._parameters.items()
        average = {name: local_shard(self._average.get(name, p), p).to(p.device) for name, p in parameters}
        self._restore()
        self._average = {}
        if self.decay is not None:
            self._average = {name: at_least_float32(value.detach()).clone() for name, value in average.items()}
            self._hook = pl_module.register_state_dict_post_hook(partial(_replace, self._average))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.decay is None or not did_step(trainer, batch_idx):
            return
        step = trainer.global_step - 1
        update = get_ema_multi_avg_fn(min(self.decay, (1 + step) / (10 + step)))
        parameters = [at_least_float32(p.detach()) for p in self._parameters.values()]
        update(list(self._average.values()), parameters, step)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._average:
            self._trained = {name: p.detach().clone() for name, p in self._parameters.items()}
            self._set(self._average)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the average in the network, for a test without a checkpoint."""
        if self._average:
            self._set(self._average)
            self._average = {}
            self._hook.remove()

    def state_dict(self) -> dict[str, Any]:
        return {"parameters": {name: p.detach() for name, p in self._parameters.items()}} if self._average else {}

    def _restore(self) -> None:
        self._set(self._trained)
        self._trained = {}

    @torch.no_grad()
    def _set(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self._parameters[name].copy_(local_shard(value, self._parameters[name]))


def _replace(average: dict[str, Tensor], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put ``average`` into a state dict; a hook, since Lightning calls no callback when it saves only the weights."""
    state.update({f"{prefix}{name}": value for name, value in average.items()})
