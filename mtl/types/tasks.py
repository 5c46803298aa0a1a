"""What a task is: its labels, its loss, its metrics and its units; a data set is tasks and inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mtl.checks import require
from mtl.nn.calibration import STEPS, Calibration
from mtl.nn.functional import float64_if_supported
from mtl.objectives import Objective
from mtl.types.inputs import InputSpec
from mtl.types.metrics import KINDS, TaskKind, check_metrics

MISSING_CLASS = -100  # a missing class label; a missing float label is NaN


class Scorer(Protocol):
    """Compare answers found in texts with the right answers. A data module creates it from its texts.

    ``context [R, 2]``: the first and the last token in which the answer may lie, in each of the R rows, which
    ``Batch.row_ids`` number. ``max_answer``: the largest number of tokens in an answer. A scorer must be picklable.
    """

    @property
    def context(self) -> Tensor: ...
    @property
    def max_answer(self) -> int: ...

    def score(self, rows: Tensor, spans: Tensor, scores: Tensor, null_scores: Tensor) -> dict[str, float]:
        """Return each metric of a span task in [0, 1].

        ``rows [N]``: distinct rows. ``spans [N, 2]``: the first and last token of the best answer of each row;
        ``scores [N]``: its score; ``null_scores [N]``: the score of having no answer.
        """


@dataclass(frozen=True)
class TaskSpec(Objective):
    """One task: its name, its kind, its weight in the summed loss, and the loss itself (see ``Objective``).

    A task of kind ``span`` finds an answer in a text: its first and its last token. ``scorer`` computes its metrics.
    ``num_classes`` is the number of classes of a multiclass task and 1 for the other kinds. ``metrics``: names of the
    metrics to report, the main one first (empty: the default metrics of the kind). If every task names its metrics, the
    mean of the main ones is reported as ``average``, and the mean over ``small`` tasks as ``small_average``.
    ``classes``: the names of the classes, for a binary task (negative, positive); empty if they have none.

    A network predicts a regression in standard units: the loss compares its output with (target - mean) / std, with the
    logarithm of the target if ``is_log``. Targets and metrics are in the units of the labels (see ``unstandardize``)
    and in float64, since float32 has too few digits for labels such as 1.7e9 +- 20. ``pos_weight`` multiplies the
    losses of the positive rows of a binary task; ``class_weights`` (empty: all 1) multiply the losses of the rows of
    each class of a multiclass task. ``after``: the task that a binary task comes after, as a purchase comes after a
    click. The network then predicts the probability given that task, see ``mtl.chains``. ``sampling_rate``: the share
    of the negatives of a binary task that are among the rows, see ``mtl.predictions.to_predictions``.

    ``constant [outputs]``: what a network would output to predict the same for each row, such as the shares of the
    classes or the mean of the labels of the training rows; empty if unknown. Tests compare a network with it.

    ``calibration`` belongs to the weights of a checkpoint, so data leave it None.

    ``marked``: each row has two texts with a marked word in each, and the input ``marks [B, 2, 2]``, the first and the
    last token of the two words.

    ``not_negative``: no training label of the regression is negative, so intervals have no negative end.
    """

    name: str
    kind: TaskKind
    num_classes: int = 1
    weight: float = 1.0
    metrics: tuple[str, ...] = ()
    small: bool = False
    mean: float = 0.0
    std: float = 1.0
    classes: tuple[str, ...] = ()
    pos_weight: float = 1.0
    class_weights: tuple[float, ...] = ()
    after: str | None = None
    sampling_rate: float = 1.0
    marked: bool = False
    not_negative: bool = False
    constant: tuple[float, ...] = field(default=(), compare=False, repr=False)
    scorer: Scorer | None = field(default=None, compare=False, repr=False)
    calibration: Calibration | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        def check(fits: bool, message: str) -> None:
            require(fits, f"task {self.name!r}: {message}")

        binary, many, regression = (self.kind == kind for kind in ("binary", "multiclass", "regression"))
        check(self.kind in KINDS, f"kind={self.kind!r} must be one of {', '.join(KINDS)}")
        check(self.weight >= 0, f"weight={self.weight} is negative")
        fits = self.num_classes >= 2 if many else self.num_classes == 1
        check(fits, f"num_classes={self.num_classes} does not fit kind={self.kind}")
        check(self.after is None or binary, f"after={self.after} is for kind=binary, not {self.kind}")
        number, named = len(self.classes), 2 if binary else self.num_classes if many else 0
        check(number in (0, named), f"{number} names of classes, but a task of kind={self.kind} has {named}")
        self.check(f"task {self.name!r}", self.kind)
        check_metrics(f"task {self.name!r}", self.kind, self.metrics, self.quantiles)
        fits = math.isfinite(self.mean) and 0 < self.std < math.inf and (regression or (self.mean, self.std) == (0, 1))
        check(fits, f"mean={self.mean}, std={self.std}: must be finite, std positive; 0 and 1 but for regressions")
        fits = self.pos_weight == 1 or (binary and 0 < self.pos_weight < math.inf)
        check(fits, f"pos_weight={self.pos_weight} must be a positive number, of a binary task")
        fits = self.sampling_rate == 1 or (binary and self.after is None and 0 < self.sampling_rate < 1)
        check(fits, f"sampling_rate={self.sampling_rate} must be in (0, 1], of a binary task that is after no other")
        fits = len(self.constant) in (0, self.outputs)
        check(fits, f"constant={list(self.constant)} must have {self.outputs} numbers, or none")
        weights = self.class_weights
        fits = all(0 <= weight < math.inf for weight in weights) and len(weights) in (0, self.num_classes * many)
        check(fits, f"class_weights={list(weights)} must be a number of at least 0 for each class")

    @property
    def outputs(self) -> int:
        """How many numbers a network predicts for a row."""
        return max(self.num_classes, len(self.quantiles))

    def unstandardize(self, prediction: Tensor) -> Tensor:
        """Return the predictions of a regression in the units of its targets, float64, from a network's output.

        Several quantiles ``[B, Q]`` are sorted, so that they never cross (Chernozhukov et al. 2010).
        """
        values = float64_if_supported(prediction)
        # As tensors: ONNX would make plain numbers float32
        std, mean = (torch.tensor(number, dtype=values.dtype) for number in (self.std, self.mean))
        values = (values if self.outputs == 1 else values.sort(-1).values) * std + mean
        return values.exp() if self.is_log else values

    def standardize(self, values: Tensor) -> Tensor:
        """Convert ``values`` from the units of a regression's targets to standard units, float64."""
        return standardize(float64_if_supported(values), self.mean, self.std, self.is_log)

    def calibrate(self, logits: Tensor) -> Tensor:
        """Return the calibrated logits of a task with classes; other outputs are returned as they are."""
        has_logits = self.kind in ("binary", "multiclass")
        return logits if self.calibration is None or not has_logits else self.calibration.apply(logits)

    def interval_margin(self, level: float) -> float:
        """Return what widens intervals of a regression to a ``level``. Raises InputError if the rows were too few."""
        scores, step = self.calibration.scores if self.calibration else (), math.ceil(level * STEPS - 1e-9)
        most = f"levels up to {len(scores) / STEPS:g}" if scores else "no interval"
        few = f"interval={level:g}: the labelled validation rows of task {self.name!r} are enough for {most}"
        require(step <= len(scores), few)
        return scores[step - 1]

    def point_prediction(self, prediction: Tensor) -> Tensor:
        """Return one prediction ``[B]`` for each row of a regression; of quantiles ``[B, Q]`` the middle one."""
        return prediction if self.outputs == 1 else prediction.sort(-1).values[:, self.middle]


def standardize(values: Tensor, mean: Tensor | float | None, std: Tensor | float | None, is_log: bool) -> Tensor:
    """Return (values - mean) / std, of the logarithms if ``is_log``; None for a mean of 0 and a deviation of 1."""
    values = values.log() if is_log else values
    values = values if mean is None else values - mean
    return values if std is None else values / std


def has_label(task: TaskSpec, target: Tensor) -> Tensor:
    """Return which rows of ``target [B]`` (span task: ``[B, 2]``) have a label, as bool ``[B]``; also ``[N, B]``."""
    if task.kind == "span":
        return target[..., 0] != MISSING_CLASS
    return target != MISSING_CLASS if task.kind == "multiclass" else ~target.isnan()


@dataclass(frozen=True)
class DataSpec:
    """Description of a data set: inputs by name, tasks in order.

    ``ground_truth`` holds the ground truth of simulated data by name (the true experts, the group of each task), for
    networks and callbacks made for that simulation. It is empty for real data.
    """

    inputs: Mapping[str, InputSpec]
    tasks: Sequence[TaskSpec]
    ground_truth: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def task_names(self) -> list[str]:
        return [task.name for task in self.tasks]
