"""Types that data, networks, training and callbacks exchange.

Shape letters used throughout: B batch, T tasks, E experts, K selections, D features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol, Self, runtime_checkable

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from mtl.checks import LARGEST_WHOLE, require, suggestion
from mtl.nn.calibration import STEPS, Calibration
from mtl.nn.functional import float64_if_supported, has_float64
from mtl.objectives import OF_QUANTILES, Objective

TaskKind = Literal["binary", "multiclass", "regression", "span"]
KINDS: tuple[TaskKind, ...] = ("binary", "multiclass", "regression", "span")
RANKING = ("ndcg@K", "hit_rate@K", "mrr", "gauc")  # of binary tasks, rank the rows of each group; K as in ndcg@10
TOP = ("precision@K%", "recall@K%", "lift@K%")  # of binary tasks, look at the K per cent with the highest predictions
OF_PROBABILITIES = ("ece", "logloss", "normalized_entropy", "calibration_ratio", "base_rate")
METRICS: dict[TaskKind, tuple[str, ...]] = {  # metrics that a task may name; mtl.training.metrics computes them
    "binary": ("auroc", "auprc", "accuracy", "f1", "matthews", *OF_PROBABILITIES, *TOP, *RANKING),
    "multiclass": ("accuracy", "macro_f1", "matthews", "auroc", "ece", "logloss"),
    "regression": ("mse", "mae", "rmse", "r2", "pearson", "spearman"),
    "span": ("f1", "exact_match"),
}
MISSING_CLASS = -100  # a missing class label; a missing float label is NaN
ROW = "\0row"  # column of a table that numbers its rows from 1, for messages


def metric_family(name: str) -> str:
    """Return the entry of ``METRICS`` that a metric belongs to: ``ndcg@K`` for ``ndcg@10``, else its own name."""
    base, at, k = name.partition("@")
    number, percent = k.removesuffix("%"), "%" * k.endswith("%")
    fits = number.isdecimal() and 0 < int(number) <= (100 if percent else LARGEST_WHOLE)
    return f"{base}@{f'K{percent}' if fits else f'({k})'}" if at else name


def check_metrics(where: str, kind: TaskKind, names: Sequence[str], quantiles: Sequence[float] = ()) -> None:
    """Raise InputError unless tasks of ``kind`` have all metrics ``names``; ``where`` begins the message.

    ``quantiles``: see ``Objective``.
    """
    known = (*METRICS[kind], *OF_QUANTILES) if quantiles else METRICS[kind]
    unknown = [name for name in names if metric_family(name) not in known]
    accepted, hint = f"a {kind} task has {', '.join(known)}", suggestion(unknown[0], known) if unknown else ""
    require(not unknown, f"{where}: metrics=[{', '.join(names)}]: {accepted}; not {', '.join(unknown)}{hint}")


@dataclass(frozen=True)
class Categorical:
    """One id per row, an integer in ``[0, size)``; tensor ``[B]`` of int64 or int32.

    ``counts [size]``: how often each id occurs in the training rows, where the data module counts them. ``added``: how
    many of the last ids came in later runs; the width of embeddings does not depend on them.
    """

    size: int
    counts: Tensor | None = field(default=None, compare=False, repr=False)
    added: int = 0


@dataclass(frozen=True)
class Bag:
    """The elements of a list per row, ids in ``[0, size)``; tensor ``[B, length]`` of int64 or int32.

    Id 0 is padding for shorter lists. The order of the elements has no meaning. ``target``: the categorical input that
    the elements are compared with: for the items that a user has seen, the item of the row. Its ids are one less than
    those of the same elements in the list, and its size is one less than that of the list. ``added``: as for
    ``Categorical``.
    """

    size: int
    length: int
    target: str | None = None
    added: int = 0


@dataclass(frozen=True)
class Numeric:
    """``width`` real numbers per row; tensor ``[B, width]``.

    ``columns``: the column of a table that each number comes from, if they come from a table. ``edges``: for each
    number, increasing values that divide those of the training rows into bins with about as many rows each; empty for
    a number without bins, and altogether if the data module learns none.
    """

    width: int
    columns: tuple[str, ...] = field(default=(), compare=False)
    edges: tuple[tuple[float, ...], ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Image:
    """One image per row; tensor ``[B, channels, height, width]``, uint8 or float.

    ``mean`` and ``std`` refer to values in [0, 1]; networks use them to standardize images.
    """

    channels: int
    height: int
    width: int
    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class Tokens:
    """One token sequence per row; tensor ``[B, S]`` of ids in ``[0, vocab)``, with S at most ``length``.

    S is the length of the longest row of the batch; the end of shorter rows is filled with the id ``pad``.
    ``counts [vocab]``: how often each id occurs in the training rows, where the data module counts them. ``digest``
    identifies the vocabulary: weights that were trained with another one are useless.
    """

    vocab: int
    length: int
    pad: int = 0
    counts: Tensor | None = field(default=None, compare=False, repr=False)
    digest: str = ""


InputSpec = Categorical | Bag | Numeric | Image | Tokens


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
    ``gate_from``: in a run that starts from the weights of another run, the task of that run whose gate this task
    starts with; None or "random": the gate of the same name, if there is one, else random weights. ``classes``: the
    names of the classes, for a binary task (negative, positive); empty if they have none.

    A network predicts a regression in standard units: the loss compares its output with (target - mean) / std, with the
    logarithm of the target if ``is_log``. Targets and metrics are in the task's own units (see ``in_units``) and in
    float64, since float32 has too few digits for labels such as 1.7e9 +- 20. ``pos_weight`` multiplies the losses of
    the positive rows of a binary task; ``class_weights`` (empty: all 1) multiply the losses of the rows of each class
    of a multiclass task. ``after``: the task that a binary task comes after, as a purchase comes after a click. The
    network then predicts the probability given that task, see ``mtl.chains``. ``sampling_rate``: the share of the
    negatives of a binary task that are among the rows, see ``mtl.predictions.in_units``.

    ``constant [outputs]``: what a network would output to predict the same for each row, such as the shares of the
    classes or the mean of the labels of the training rows; empty if unknown. Tests compare a network with it.

    ``calibration`` belongs to the weights of a checkpoint, so data leave it None.

    ``marked``: each row has two texts with a marked word in each, and the input ``marks [B, 2, 2]``, the first and the
    last token of the two words.
    """

    name: str
    kind: TaskKind
    num_classes: int = 1
    weight: float = 1.0
    metrics: tuple[str, ...] = ()
    small: bool = False
    gate_from: str | None = None
    mean: float = 0.0
    std: float = 1.0
    classes: tuple[str, ...] = ()
    pos_weight: float = 1.0
    class_weights: tuple[float, ...] = ()
    after: str | None = None
    sampling_rate: float = 1.0
    marked: bool = False
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
        each = self.class_weights
        fits = not each or (many and len(each) == self.num_classes and all(0 <= weight < math.inf for weight in each))
        check(fits, f"class_weights={list(each)} must be a number of at least 0 for each class")

    @property
    def outputs(self) -> int:
        """How many numbers a network predicts for a row."""
        return max(self.num_classes, len(self.quantiles))

    def in_units(self, prediction: Tensor) -> Tensor:
        """Return the predictions of a regression in the units of its targets, float64, from a network's output.

        Several quantiles ``[B, Q]`` are sorted, so that they never cross (Chernozhukov et al. 2010).
        """
        values = float64_if_supported(prediction)
        # As tensors: ONNX would make plain numbers float32
        std, mean = (torch.tensor(number, dtype=values.dtype) for number in (self.std, self.mean))
        values = (values if self.outputs == 1 else values.sort(-1).values) * std + mean
        return values.exp() if self.is_log else values

    def standardized(self, values: Tensor) -> Tensor:
        """Convert ``values`` from the units of a regression's targets to standard units, float64."""
        values = float64_if_supported(values)
        return ((values.log() if self.is_log else values) - self.mean) / self.std

    def calibrated(self, logits: Tensor) -> Tensor:
        """Return the calibrated logits of a task with classes; other outputs are returned as they are."""
        has_logits = self.kind in ("binary", "multiclass")
        return logits if self.calibration is None or not has_logits else self.calibration.apply(logits)

    def margin(self, level: float) -> float:
        """Return what widens intervals of a regression to a ``level``. Raises InputError if the rows were too few."""
        scores, step = self.calibration.scores if self.calibration else (), math.ceil(level * STEPS - 1e-9)
        most = f"levels up to {len(scores) / STEPS:g}" if scores else "no interval"
        few = f"interval={level:g}: the labelled validation rows of task {self.name!r} are enough for {most}"
        require(step <= len(scores), few)
        return scores[step - 1]

    def single(self, prediction: Tensor) -> Tensor:
        """Return one prediction ``[B]`` for each row of a regression; of quantiles ``[B, Q]`` the middle one."""
        return prediction if self.outputs == 1 else prediction.sort(-1).values[:, self.middle]


class RowEncoder(Protocol):
    """Turn rows of a user's file into the inputs of a network, exactly as in training.

    ``frame`` is a ``polars.DataFrame``; it is typed ``Any`` since networks do not need polars.
    """

    @property
    def columns(self) -> Sequence[str]:
        """The columns that the tasks read, in order."""

    @property
    def lists(self) -> Mapping[str, str]:
        """The columns whose cells are lists, with the separator of elements in cells that are text; "" without one."""
        return {}

    def written(self, column: str, number: float) -> str:
        """Return a number as the cells of a column of a text file write it, such as 3 or 0.5."""
        return str(number).removesuffix(".0")

    def columns_of(self, task: str) -> Sequence[str]:
        """Return the columns that one task reads; tasks that read the same columns have the same inputs."""
        return self.columns

    def encode(self, frame: Any, where: str, task: str | None = None) -> dict[str, Tensor]:
        """Return the inputs by name, ``[N, ...]``, of the rows of ``frame``; other columns are ignored.

        ``where`` names the rows in messages. ``task``: the task to return inputs for, if tasks read different columns.
        Raises InputError, which names column and row, if a column is missing or a cell cannot be read.
        """

    def unusual_cells(self) -> str:
        """Describe in one line the cells encoded so far that the training rows say little about, with their numbers."""
        return ""

    def histograms_of(self, frame: Any, where: str) -> Mapping[str, tuple[Any, Any]]:
        """Return the histograms of each column in the training rows and in ``frame``; empty if they are not known."""
        return {}

    def blocks(self, path: Path) -> Iterator[tuple[Any, float]]:
        """Yield blocks of the rows of a CSV or Parquet file, each with the share of the file read so far."""

    def state(self) -> dict[str, Any]:
        """Return everything that ``encode`` depends on as plain data: text, numbers, lists and dicts.

        Here, the fields of a dataclass.
        """
        state: dict[str, Any] = TypeAdapter(type(self)).dump_python(self, mode="json")
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the encoder that returned ``state``."""
        return TypeAdapter(cls).validate_python(state)


def labelled(task: TaskSpec, target: Tensor) -> Tensor:
    """Return which rows of ``target [B]`` (span task: ``[B, 2]``) have a label, as bool ``[B]``."""
    if task.kind == "span":
        return target[:, 0] != MISSING_CLASS
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


class Batch:
    """A batch: ``inputs[name]: [B, ...]`` and ``targets[task]: [B]``, with only the tasks that this batch is for.

    The target of a span task is ``[B, 2]``: the answer's first and last token, counted from 0 in the row; both are 0,
    the first token of the row, where there is no answer. A missing label is NaN in float targets and ``MISSING_CLASS``
    in class targets and (twice) in spans.

    ``weights[task] [B]`` multiply the losses of the rows, if given; their mean over the labelled rows of a split should
    be 1, so that the mean loss of the split is the weighted mean. ``groups [B]``, int64: the group, such as the user,
    whose rows the metrics of ``RANKING`` compare; negative if a row has none. ``row_ids [B]``, int64: the number of
    each row in its split, or in the rows of its task if tasks have rows of their own; in evaluation.

    This is not a dataclass, since Lightning converts all numbers in dataclasses to the trainer's precision, which would
    round labels and weights (257 becomes 256 in bfloat16). ``with_inputs_as`` converts only the inputs.
    """

    def __init__(
        self,
        inputs: dict[str, Tensor],
        targets: dict[str, Tensor],
        weights: dict[str, Tensor] | None = None,
        groups: Tensor | None = None,
        row_ids: Tensor | None = None,
    ) -> None:
        self.inputs, self.targets, self.weights, self.groups = inputs, targets, weights or {}, groups
        self.row_ids = row_ids

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def select(self, index: Tensor) -> Batch:
        """Return the rows of ``index [N]`` as a new batch."""
        return self._map(lambda value: value.index_select(0, index))

    def is_on(self, device: torch.device) -> bool:
        """Return whether all tensors are on ``device``."""
        single = (value for value in (self.groups, self.row_ids) if value is not None)
        parts = chain(self.inputs.values(), self.targets.values(), self.weights.values(), single)
        return all(value.device == device for value in parts)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch on ``device``; Lightning calls this before each step."""
        narrow = not has_float64(torch.device(device))

        def moved(value: Tensor) -> Tensor:
            value = value.float() if narrow and value.dtype == torch.float64 else value
            return value.to(device, non_blocking=non_blocking)

        return self._map(moved)

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory; the DataLoader calls this when asked to pin."""
        return self._map(Tensor.pin_memory)

    def with_inputs_as(self, dtype: torch.dtype) -> Batch:
        """Return the batch with floating-point inputs of type ``dtype``, and all else as it is."""
        inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in self.inputs.items()}
        return Batch(inputs, self.targets, self.weights, self.groups, self.row_ids)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with each of its tensors changed."""
        inputs, targets, weights = (
            {name: change(value) for name, value in part.items()} for part in (self.inputs, self.targets, self.weights)
        )
        groups, row_ids = (None if value is None else change(value) for value in (self.groups, self.row_ids))
        return Batch(inputs, targets, weights, groups, row_ids)


@dataclass(frozen=True)
class Routing:
    """The output of a gate.

    ``weights``: ``[B, T, E]``, or ``[T, E]`` from a static gate; >= 0.
    ``losses``: auxiliary terms by name, multiplied by their weight, summed over tasks, averaged over the batch.
    ``selectors``: ``[..., T, K, E]``, one distribution over the experts per selection, if the gate has selectors.
    ``tasks``: the indices of the T tasks, None if these are all tasks.
    ``exact_zeros``: the gate's promise that no gradient passes through a weight that is exactly 0, so that its expert
    need not be computed. A gate that also learns from experts that it has switched off (straight-through) leaves it
    False: all experts are then computed, unless no gradient is taken.
    ``measured``: (gate, whole numbers) of each gate that adapts to what it measures in training, see ``AdaptiveGate``.
    """

    weights: Tensor
    losses: dict[str, Tensor] = field(default_factory=dict)
    selectors: Tensor | None = None
    exact_zeros: bool = False
    tasks: Sequence[int] | None = None
    measured: tuple[tuple[Any, Tensor], ...] = ()


@dataclass(frozen=True)
class NetworkOutput:
    """The output of a network: ``predictions[task]`` is ``[B]`` (logit or value), ``[B, C]`` (class logits) or,
    with ``C = TaskSpec.outputs`` above 1, ``[B, C]`` (quantiles).

    The values of a regression are in standard units, see ``TaskSpec.in_units``. The predictions of a span task are
    ``[B, S, 2]``: the logits of each token to be the first and the last token of the answer; padding has the lowest
    value of the dtype.
    ``routings``: one for each mixture or routed layer, in order; its name is the layer's path in the network, so that
    ``network.get_submodule(name)`` is the layer. ``losses``: the auxiliary terms to add to the task losses.
    ``hidden``: the states of each layer, embeddings first, for distillation (where gates route by task, those of the
    batch's last task); empty if the network has none to compare. ``members``: the predictions of the K members of an
    ensemble by task, ``[K, B, ...]``, each of which has a loss of its own; empty for a single network.
    ``representation [B, t, H]``: what the heads of the t tasks read, if it is the mixture of the last routing, or the
    same for all tasks where there is no routing, then perhaps as ``[B, 1, H]``.
    """

    predictions: dict[str, Tensor]
    routings: Mapping[str, Routing] = field(default_factory=dict)
    losses: dict[str, Tensor] = field(default_factory=dict)
    hidden: tuple[Tensor, ...] = ()
    members: Mapping[str, Tensor] = field(default_factory=dict)
    representation: Tensor | None = None


@runtime_checkable
class OwnsTaskParameters(Protocol):
    """A module that knows which of its parameters belong to single tasks."""

    def task_parameters(self) -> dict[nn.Parameter, Sequence[int]]:
        """Return the parameters, also of its parts, that single tasks reach, or whose rows they reach.

        Each comes with the indices of the tasks that it belongs to.
        """


@runtime_checkable
class Exportable(Protocol):
    """A module that has another form in an exported program, which cannot choose operations by values."""

    def constant(self) -> nn.Module:
        """Return the module in that form, with the same outputs in evaluation."""


@runtime_checkable
class Prunable(Protocol):
    """A module from which the part that one task uses can be cut out."""

    def only(self, task: int) -> nn.Module:
        """Return the part of the task with index ``task``, with the same outputs in evaluation. Raises InputError."""


def sum_losses(routings: Mapping[str, Routing]) -> dict[str, Tensor]:
    """Return the auxiliary losses of all routings by name; losses of the same name are added."""
    losses: dict[str, Tensor] = {}
    for routing in routings.values():
        for name, value in routing.losses.items():
            losses[name] = losses[name] + value if name in losses else value
    return losses
