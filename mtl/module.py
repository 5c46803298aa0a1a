"""Train any network on any tasks: the LightningModule."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from mtl.losses import summed_losses
from mtl.metrics import Evaluation, LossMeter
from mtl.parallel import gather, total, world_size
from mtl.types import Batch, NetworkOutput, TaskSpec

SHOW_EVERY = 0.5  # seconds between values of the progress bar


def is_logged(trainer: Any, step: int) -> bool:
    """Say whether the loggers write what is logged in optimiser step ``step``, counted from 0."""
    return bool((step + 1) % max(1, trainer.log_every_n_steps) == 0)


class MultiTaskModule(LightningModule):
    """Minimise the weighted sum of task losses plus the network's auxiliary losses.

    ``optimizer(params) -> Optimizer``. ``config`` is the configuration as a plain dict; it travels in every checkpoint.

    Logged per epoch: ``{train,val,test}/loss`` (task losses times weights, without auxiliary losses; on val it is what
    early stopping and the best checkpoint watch), ``<stage>/<task>/loss`` and ``/<metric>``, ``train/aux/<name>``. Per
    step: ``train/step_loss``, the weighted sum on the batch.
    """

    def __init__(
        self,
        network: nn.Module,
        tasks: Sequence[TaskSpec],
        optimizer: Callable[..., torch.optim.Optimizer],
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.tasks = {task.name: task for task in tasks}
        self.config = dict(config or {})
        self._optimizer = optimizer
        self._shown_at = -math.inf
        self.train_meter = LossMeter(tasks)
        self.aux_totals: dict[str, Tensor] = {}
        self.aux_batches = 0
        self.evaluation = Evaluation(tasks)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning notes the hook it calls 40 times in a step, and torch would look for parameters in it each time
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def forward(self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None) -> NetworkOutput:
        output: NetworkOutput = self.network(inputs, tasks)
        return output

    def training_step(self, batch: Batch | list[Batch], batch_index: int) -> dict[str, Any]:
        """Return the loss of a batch, or of a super-batch: that of its batches added, auxiliary losses averaged."""
        batches = [batch] if isinstance(batch, Batch) else batch
        losses, shown, routing = [], [], None
        for part in batches:
            output = self(part.inputs, list(part.targets))
            loss, value = self._task_losses(output, part)
            losses.append(loss + sum(output.losses.values()) / len(batches))
            shown.append(value)
            for name, term in output.losses.items():
                self.aux_totals[name] = self.aux_totals.get(name, 0.0) + term.detach() / len(batches)
            routing = output.routing
        self.aux_batches += 1
        self._show_step_loss(torch.stack(shown).sum(), sum(map(len, batches)))
        return {"loss": torch.stack(losses).sum(), "routing": routing}

    def _show_step_loss(self, value: Tensor, rows: int) -> None:
        """Log the loss of a step that the loggers write, and of others once in a while, for the progress bar.

        What is logged costs Lightning as much time as many a small layer, and of all steps most is thrown away.
        """
        trainer = self._trainer  # None where a step is called by hand
        written = trainer is None or is_logged(trainer, trainer.global_step)
        now = time.monotonic()
        if written or now - self._shown_at > SHOW_EVERY:
            self._shown_at = now
            self.log("train/step_loss", value, prog_bar=True, batch_size=rows)

    def _task_losses(self, output: NetworkOutput, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the task losses: this process's share, for the gradient, and that of all."""
        names, totals, counts = summed_losses(self.tasks, output.predictions, batch.targets)
        _, weights = self.train_meter.constants(tuple(names), totals)
        # A task's loss is its mean over the labels of all processes; DDP averages what each has of it
        everywhere = total(torch.stack([totals, counts.to(totals.dtype)]))
        labels = everywhere[1].clamp(min=1)
        self.train_meter.update(names, totals, counts)
        return world_size() * (weights * totals / labels).sum(), (weights * everywhere[0] / labels).sum()

    def on_train_epoch_start(self) -> None:
        self.train_meter.reset()
        self.aux_totals, self.aux_batches = {}, 0

    def on_train_epoch_end(self) -> None:
        self.log_dict({f"train/{name}": value for name, value in self.train_meter.compute().items()})
        means = {
            f"train/aux/{name}": total(value) / world_size() / self.aux_batches
            for name, value in self.aux_totals.items()
        }
        self.log_dict(means)

    def validation_step(self, batch: Batch, batch_index: int) -> dict[str, Any]:
        return self._evaluate(batch)

    def test_step(self, batch: Batch, batch_index: int) -> dict[str, Any]:
        return self._evaluate(batch)

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer; parameters whose ``parameter_options`` the network gives have groups of their own.

        ``lr_factor`` multiplies the learning rate; other options replace the optimizer's.
        """
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        asked: dict[nn.Parameter, dict[str, float]] = getattr(self.network, "parameter_options", dict)()
        defaults = self._optimizer([nn.Parameter(torch.zeros(1))]).defaults
        groups: dict[tuple[tuple[str, float], ...], list[nn.Parameter]] = {}
        for parameter in parameters:
            own = {"lr_factor": 1.0, **asked.get(parameter, {})}
            own = {
                name: value for name, value in own.items() if name == "lr_factor" or defaults.get(name, value) != value
            }
            groups.setdefault(tuple(sorted(own.items())), []).append(parameter)
        if len(groups) == 1:
            optimizer = self._optimizer(parameters)
        else:
            optimizer = self._optimizer([{"params": members} for members in groups.values()])
            for group, key in zip(optimizer.param_groups, groups, strict=True):
                own = dict(key)
                group["lr"] *= own.pop("lr_factor")
                group.update(own)
        optimizer.register_load_state_dict_post_hook(_lay_as_parameters)
        return optimizer

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if gradient_clip_val:  # without, Lightning finds out in 20 calls that there is nothing to do
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["config"] = self.config
        # What this epoch has summed up so far, by process: a run that goes on inside an epoch reports the same means
        sums = {"meter": self.train_meter.sums, "aux": self.aux_totals, "batches": self.aux_batches}
        checkpoint["epoch_sums"] = gather(sums)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        everyone = checkpoint.get("epoch_sums", [])
        if len(everyone) != self.trainer.world_size:  # of a run on other processes: their sums have no home here
            return
        sums = everyone[self.trainer.global_rank]
        self.train_meter.sums.copy_(sums["meter"])
        self.aux_totals = {name: value.to(self.device) for name, value in sums["aux"].items()}
        self.aux_batches = sums["batches"]

    def _evaluate(self, batch: Batch) -> dict[str, Any]:
        output = self(batch.inputs, list(batch.targets))
        self.evaluation.update(output.predictions, batch.targets)
        return {"routing": output.routing}

    def _log_evaluation(self, stage: str) -> None:
        results = self.evaluation.compute()
        self.evaluation.reset()
        self.log_dict({f"{stage}/{name}": value for name, value in results.items() if name != "loss"})
        self.log(f"{stage}/loss", results["loss"], prog_bar=True)


def _lay_as_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Bring loaded state into the memory order of its parameter, which fused optimizers take for granted."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


# Lightning looks at the parameters in every step: with this it finds them, without, Python works them out anew
MultiTaskModule.training_step.__dict__["__signature__"] = inspect.signature(MultiTaskModule.training_step)
