"""Train a network to imitate a finished one, its teacher (MoEBERT: Zuo et al. 2022, section 3.3)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor, nn

from mtl.distributed import batch_mean
from mtl.nn.functional import at_least_float32
from mtl.types import NetworkOutput, TaskSpec
from mtl.types.task_tensors import TaskTensors, find_places, group_by, stack_tasks


class Distillation:
    """Compare a network with its frozen ``teacher``: ``weight`` * (sum_l MSE(H_l, T_l) + sum_t P_t).

    H_l and T_l ``[N, D]`` are the states of the N real tokens in the network and in the teacher, after the embeddings
    (l = 0) and after each layer. P_t is ``prediction_losses`` of task t, averaged over all rows, labelled or not.
    ``layers`` and ``predictions`` switch the two parts. ``tasks`` are the tasks of the network; ``teacher_tasks`` are
    the same tasks for the teacher, perhaps with another mean and standard deviation.

    This is not an ``nn.Module``, so that the teacher is in no checkpoint or optimizer and ``train()`` does not switch
    on its dropout.
    """

    def __init__(
        self,
        teacher: nn.Module,
        tasks: Sequence[TaskSpec],
        weight: float = 1.0,
        layers: bool = True,
        predictions: bool = True,
        teacher_tasks: Sequence[TaskSpec] | None = None,
    ) -> None:
        self.teacher = teacher.eval().requires_grad_(False)
        self.tasks = {task.name: task for task in tasks}
        self.teacher_tasks = {task.name: task for task in teacher_tasks or tasks}
        self.weight, self.layers, self.predictions = weight, layers, predictions

    def losses(self, inputs: Mapping[str, Tensor], output: NetworkOutput) -> dict[str, Tensor]:
        """Return the scalar parts of the loss by name; ``output`` is the network's output for the batch ``inputs``."""
        with torch.no_grad():
            target: NetworkOutput = self.teacher(inputs, list(output.predictions))
        losses = {}
        if self.layers:
            losses["distillation_layers"] = self.weight * batch_mean(state_losses(output.hidden, target.hidden))
        if self.predictions:
            names = list(output.predictions)
            groups = group_by(names, self._group_key).values()
            blocks = []
            for group in groups:
                prediction, goal = (stack_tasks(part.predictions, group) for part in (output, target))
                blocks.append(prediction_losses(self.tasks[group[0]], prediction, self._converted(group[0], goal)))
            by_task = stack_tasks(TaskTensors(find_places(groups, names), blocks), names)  # [B, T]
            losses["distillation_predictions"] = self.weight * batch_mean(by_task.T.contiguous().sum(0))
        return losses

    def _group_key(self, name: str) -> Hashable:
        """Return what tasks have in common that are compared in one operation."""
        task, teacher_task = self.tasks[name], self.teacher_tasks[name]
        rescaled = name if (task.mean, task.std) != (teacher_task.mean, teacher_task.std) else ""
        return task.kind, task.outputs, rescaled

    def _converted(self, name: str, prediction: Tensor) -> Tensor:
        """Convert the teacher's prediction of a task to the network's mean and standard deviation of the labels."""
        task, teacher_task = self.tasks[name], self.teacher_tasks[name]
        if (task.mean, task.std) == (teacher_task.mean, teacher_task.std):
            return prediction
        return task.standardize(teacher_task.unstandardize(prediction)).to(at_least_float32(prediction).dtype)


def state_losses(hidden: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
    """Return the squared error ``[N]`` of each token: the mean over features, summed over the states ``[N, D]``."""
    pairs = ((at_least_float32(state), at_least_float32(goal)) for state, goal in zip(hidden, target, strict=True))
    return torch.stack([(state - goal).square().mean(-1) for state, goal in pairs]).sum(0)


def prediction_losses(task: TaskSpec, prediction: Tensor, target: Tensor) -> Tensor:
    """Return the difference between a network's predictions of a task and its teacher's, for each row, ``[B]``.

    Regression: the squared error, in standard units. Classes: the symmetric KL divergence
    1/2 sum_c (p_c - q_c) (log p_c - log q_c), with p and q the softmax of the logits ``prediction`` and ``target``; the
    two classes of a binary task have the logits 0 and ``prediction [B]``. Span: the same over the positions of
    ``[B, S, 2]``, the mean for first and last token.
    """
    prediction, target = at_least_float32(prediction), at_least_float32(target)
    if task.kind == "regression":
        errors = (prediction - target).square()
        return errors if task.outputs == 1 else errors.mean(-1)  # over quantiles
    if task.kind == "binary":
        prediction, target = (torch.stack([torch.zeros_like(x), x], -1) for x in (prediction, target))
    if task.kind == "span":
        prediction, target = prediction.mT, target.mT  # [B, 2, S]
    log_p, log_q = prediction.log_softmax(-1), target.log_softmax(-1)  # [B, C]
    divergence = 0.5 * ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1)
    return divergence.mean(-1) if task.kind == "span" else divergence
