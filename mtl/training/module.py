"""Train any network on any tasks: the LightningModule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor

from mtl.chains import check_chains, joint_logits
from mtl.checks import join_names, require
from mtl.distributed import all_reduce_sum, gather
from mtl.loggers.base import run_loggers
from mtl.networks.base import MultiTaskNetwork, check_network
from mtl.nn.functional import has_float64
from mtl.options import LossReduction
from mtl.predictions import readable
from mtl.training.distillation import Distillation
from mtl.training.epoch import EpochMeter
from mtl.training.evaluation import Evaluation
from mtl.training.labeled_predictions import LabeledPredictions
from mtl.training.losses import LossSums
from mtl.training.measurements import NETWORK, Measurements, log_measurements, log_values
from mtl.training.optimizers import build_optimizer, clip_gradients, make_embeddings_sparse
from mtl.training.weighting import FixedWeighting, TaskLosses, Weighting
from mtl.types import Batch, NetworkOutput, Routing, TaskSpec
from mtl.types.batch import to_batch
from mtl.types.task_tensors import map_tasks

log = logging.getLogger(__name__)

MAX_OFFSET = 1e4  # |mean| / std of labels, above which float32 rounds them by more than 1e-3 std


def is_logged(trainer: Any, step: int) -> bool:
    """Return whether the loggers write the values of optimiser step ``step``, counted from 0."""
    return bool((step + 1) % max(1, trainer.log_every_n_steps) == 0)


class MultiTaskModule(LightningModule):
    """Minimise the weighted sum of task losses plus the network's auxiliary losses.

    ``optimizer(params) -> Optimizer``. ``config`` is the configuration as a plain dict; every checkpoint contains it.
    ``distillation`` adds the comparison with a teacher for the tasks of each batch, logged as auxiliary losses.
    ``weighting`` combines the task losses into one loss, by default their sum. ``embedding_optimizer`` trains the
    embedding tables, with sparse gradients, and ``optimizer`` the rest. ``loss_reduction``: what the summed loss of a
    task is divided by: its number of labels in the batch (``tasks``), so that all tasks count alike, or the mean of
    these numbers over the tasks that have labels there (``labels``), so that all labels do.

    Logged per epoch: ``{train,val,test}/loss`` (the weighted sum of task losses, without auxiliary losses; early
    stopping and the best checkpoint monitor ``val/loss``), ``<stage>/<task>/loss``, ``<stage>/<task>/<metric>``,
    ``train/aux/<name>``, and ``{val,test}/average`` and ``small_average``, the means of the tasks' main metrics, if
    there are any (see ``mtl.training.metrics.averages``). Logged per step: ``train/step_loss``, the weighted sum on the
    batch, and ``train/weight/<task>`` if the weighting changes its weights. Logged losses use the fixed weights alone.
    Monitors, results and loggers use these names.
    """

    def __init__(
        self,
        network: MultiTaskNetwork,
        tasks: Sequence[TaskSpec],
        optimizer: Callable[..., torch.optim.Optimizer],
        config: Mapping[str, Any] | None = None,
        distillation: Distillation | None = None,
        weighting: Weighting | None = None,
        embedding_optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        loss_reduction: LossReduction = "tasks",
    ) -> None:
        super().__init__()
        check_network(network)
        check_chains(tasks, "task ")
        self.network = network
        self.tasks = {task.name: task for task in tasks}
        self.config = dict(config or {})
        self.distillation = distillation
        self.weighting = weighting or FixedWeighting(network, len(tasks))
        self.loss_reduction = loss_reduction
        network.expand_representation = self.weighting.reads_representation
        self._optimizer = optimizer
        self._embedding_optimizer = embedding_optimizer
        self._embedding_tables = make_embeddings_sparse(network) if embedding_optimizer else []
        self.train_meter = EpochMeter(tasks)
        self._loss_sums = LossSums(dict(self.tasks))
        self.evaluation = Evaluation(tasks)
        self.measured = Measurements()  # the latest of each number, also of models beside the network
        # Of the latest test, in the first process: by split and model, the labelled rows of each task
        self.predictions: dict[tuple[str, str], dict[str, LabeledPredictions]] = {}
        self.other_models: Any = None  # a table's ``FittedModels``, beside the network after the training
        self.undefined: set[str] = set()  # values that are undefined in the latest evaluation
        self.loaded_epoch: int | None = None  # of the checkpoint that was loaded last
        self._named: set[str] = set()  # undefined values that a warning has named
        self._metrics: dict[str, float] = {}  # the latest values, in a run that is resumed
        self._latest: list[Batch] = []  # of the training step, if the weighting compares steps
        self._is_shown = True  # whether the values of this training step are to be logged

    def forward(self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None) -> NetworkOutput:
        return self.network(inputs, tasks)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Return the loss of a batch or a list of batches: task losses are added, and a network's own averaged."""
        is_list = isinstance(batch, list) and all(isinstance(part, Batch) for part in batch)
        batches = [self.converted(part) for part in (batch if is_list else [batch])]
        parts: list[TaskLosses] = []
        routings: dict[str, list[Routing]] = {}  # by layer, one for each batch
        for part in batches:
            output = self(part.inputs, list(part.targets))
            terms = self.task_losses(output, part)
            parts.append(terms)
            terms.auxiliary.append(sum(output.losses.values(), terms.global_losses.new_zeros(())) / len(batches))
            self.train_meter.add_auxiliary(output.losses, len(batches))
            if self.distillation is not None:
                losses = self.distillation.losses(part.inputs, output)
                terms.auxiliary.extend(losses.values())
                self.train_meter.add_auxiliary(losses)
            for name, routing in output.routings.items():
                routings.setdefault(name, []).append(routing)
        self.train_meter.batches += 1
        if self.weighting.needs_losses_after_step:
            self._latest = batches
        if self._is_shown:  # self.log takes as long as a small network
            total = torch.stack([terms.global_losses.sum() for terms in parts]).sum()
            self.log("train/step_loss", total, prog_bar=True, batch_size=sum(map(len, batches)))
        return {"loss": self.weighting(parts, self.global_step), "routings": routings}

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        super().optimizer_step(*args, **options)
        if self.weighting.needs_losses_after_step:
            with torch.no_grad(), self.trainer.precision_plugin.train_step_context():
                outputs = [self(part.inputs, list(part.targets)) for part in self._latest]
                pairs = zip(outputs, self._latest, strict=True)
                losses = [self.task_losses(output, part, count_in_epoch=False) for output, part in pairs]
                self.weighting.after_step(losses)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.weighting.before_step(self.global_step)
        if self.weighting.current_weights is not None and is_logged(self.trainer, self.global_step):
            weights = zip(self.tasks, self.weighting.current_weights.tolist(), strict=True)
            log_values(self.trainer, {f"train/weight/{n}": w for n, w in weights}, step=self.global_step)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Decide whether a logger or the progress bar shows this step, or it is the last of the epoch."""
        rate: int = getattr(self.trainer.progress_bar_callback, "refresh_rate", 0)
        in_bar = rate > 0 and (batch_idx + 1) % rate == 0
        self._is_shown = in_bar or is_logged(self.trainer, self.trainer.global_step) or self.trainer.is_last_batch

    def logged_names(self) -> list[str]:
        """Return the names that this module logs in training and validation; ``*`` stands for any text."""
        names = [*(f"val/{name}" for name in self.evaluation.names()), "train/step_loss", "train/loss"]
        return [*names, *(f"train/{task}/loss" for task in self.tasks), "train/aux/*", "train/weight/*"]

    def setup(self, stage: str) -> None:
        """Raise InputError if regression labels vary too little for float32 and the device has no float64."""
        device = self.trainer.strategy.root_device
        for task in self.tasks.values():
            require(
                has_float64(device) or abs(task.mean) <= MAX_OFFSET * task.std,
                f"task {task.name!r}: labels with mean {task.mean:.10g} and standard deviation {task.std:.4g} need "
                f"float64, which {device} does not have: use trainer.accelerator=cpu, or subtract the mean",
            )

    def configure_model(self) -> None:
        """Let a strategy that divides parameters among the processes do so."""
        if hasattr(self.trainer.strategy, "shard_parameters"):
            self.trainer.strategy.shard_parameters()

    def on_fit_start(self) -> None:
        if self.distillation is not None:  # Lightning moves and converts only what is part of this module
            like = next(self.network.parameters())
            self.distillation.teacher.to(like.device, like.dtype)

    def on_train_start(self) -> None:
        progress, length = self.trainer.fit_loop.epoch_loop.batch_progress, self.trainer.num_training_batches
        done = progress.current.ready
        require(
            progress.is_last_batch or done < length,
            f"{done} batches of an epoch are done, and an epoch has now {length} of them: resume with a larger "
            "trainer.limit_train_batches, or leave it out",
        )
        # After a validation within the epoch, callbacks read its values at the end of the epoch
        self.trainer.callback_metrics.update({name: torch.tensor(value) for name, value in self._metrics.items()})
        self._metrics = {}
        for logger in run_loggers(self.loggers):
            logger.resume_at(self.trainer.global_step)

    def task_losses(self, output: NetworkOutput, batch: Batch, count_in_epoch: bool = True) -> TaskLosses:
        """Return the weighted losses of the tasks of a batch; ``count_in_epoch``: they count in the means of the epoch.

        The loss of an ensemble is the mean of its members' losses.
        """
        predictions, targets, weights, members = output.predictions, batch.targets, batch.weights, 1
        if output.members:  # one pass computes the losses of all members
            members = len(next(iter(output.members.values())))
            predictions = map_tasks(output.members, lambda value: value.flatten(0, 1), dim=1)
            targets, weights = (
                map_tasks(values, lambda value: value.repeat(members, *[1] * (value.dim() - 1)))
                for values in (targets, weights)
            )
        predictions = joint_logits(self.tasks, predictions)
        names, totals, counts = self._loss_sums(predictions, targets, weights)
        if members > 1:
            totals, counts = totals / members, counts // members
        if count_in_epoch:
            self.train_meter.update(names, totals, counts)
        # A task's loss is the mean over the labels of all processes
        global_losses = all_reduce_sum(torch.stack([totals, counts.to(totals.dtype)]))
        labels = global_losses[1]
        if self.loss_reduction == "labels":
            labels = labels.sum() / labels.count_nonzero().clamp(min=1)
        selected, labels = self.train_meter.select(tuple(names), totals), labels.clamp(min=1)
        shares, means = selected.weights * totals / labels, selected.weights * global_losses[0] / labels
        return TaskLosses(selected.task_ids, selected.index, shares, means, global_losses[1], [], output)

    def on_train_epoch_start(self) -> None:
        self.train_meter.reset()

    def on_train_epoch_end(self) -> None:
        self.weighting.end_epoch()
        log_values(self.trainer, self.train_meter.means())

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        batch = self.converted(batch)
        output = self(batch.inputs, list(batch.targets))
        self.evaluation.update(output.predictions, batch.targets, batch.row_ids, batch.weights, batch.groups)
        return {"routings": output.routings, "predictions": output.predictions}

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the predictions of ``mtl.predictions.readable`` for the tasks of a batch."""
        batch = self.converted(batch)
        output = self(batch.inputs, list(batch.targets))
        return readable(self.tasks, output.predictions)

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizers = self._optimizer, self._embedding_optimizer
        return build_optimizer(self.network, self.weighting, *optimizers, self._embedding_tables)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        sharded = hasattr(self.trainer.strategy, "shard_parameters")
        if gradient_clip_val and (sharded or self._embedding_tables):
            clip_gradients(self.parameters(), gradient_clip_val, gradient_clip_algorithm, sharded)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["data"] = checkpoint.pop(self._data_key(), {})  # one key, whatever class the data module is of
        checkpoint["config"] = self.config
        # Each process's sums over the epoch so far, so that a run resumed within an epoch reports the same means
        checkpoint["epoch_sums"] = gather(self.train_meter.state())
        checkpoint["logged"] = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        checkpoint["undefined"] = sorted(self.undefined)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[self._data_key()] = checkpoint.get("data", {})
        self.loaded_epoch = checkpoint.get("epoch")
        self.train_meter.load_states(checkpoint["epoch_sums"], self.trainer.global_rank, self.trainer.world_size)
        self._metrics, self.undefined = checkpoint.get("logged", {}), set(checkpoint.get("undefined", ()))

    def _data_key(self) -> str:
        """Return the key under which Lightning saves and looks for the state of the data module."""
        return type(getattr(self.trainer, "datamodule", None)).__qualname__

    def converted(self, batch: Any) -> Batch:
        """Return a batch, or a pair of dicts as in ``to_batch``, with inputs in the precision of the network."""
        return to_batch(batch, self.tasks).with_inputs_as(self.dtype)  # type: ignore[arg-type]  # it is never a str

    def _log_evaluation(self, stage: str) -> None:
        results = self.evaluation.compute()
        if stage == "test":
            self.predictions[stage, NETWORK] = self.evaluation.gathered()
        self.evaluation.reset()
        self.undefined = {f"{stage}/{name}" for name in self.evaluation.undefined(results)}
        new = self.undefined - self._named
        if new and not self.trainer.sanity_checking:
            log.warning("undefined, since the rows lack the labels for them: %s", join_names(sorted(new)))
            self._named |= new
        values = {f"{stage}/{name}": value for name, value in results.items()}
        returned = self.trainer.state.fn in (TrainerFn.VALIDATING, TrainerFn.TESTING)
        log_measurements(self.trainer, self, Measurements.of(values), loggers=() if returned else self.trainer.loggers)
        if returned:  # Trainer.validate and Trainer.test return what Lightning logs
            self.log_dict({name: value for name, value in values.items() if name != f"{stage}/loss"})
        self.log(f"{stage}/loss", results["loss"], prog_bar=True, logger=None if returned else False)
