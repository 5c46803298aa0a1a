"""The rows of an evaluation that have a label, with what was predicted for them: what metrics are computed from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mtl.types import TaskSpec

UNDEFINED = torch.tensor(torch.nan)


@dataclass(frozen=True)
class LabeledPredictions:
    """The N labelled rows of a binary, multiclass or regression task.

    ``label [N]`` are the labels. ``prediction [N]`` is a probability (binary), the most probable class (multiclass) or
    a value in the units of the labels (regression). A multiclass task also has ``confidence [N]``, the probability of
    the predicted class; ``likelihood [N]``, the probability of the label; and, if a metric needs them, all
    probabilities ``scores [N, C]``. A task with quantiles has ``pinball [N]``, the pinball loss of each row, and
    ``covered [N]``, whether the label is between the outermost quantiles or, if there is but one, not above it. A
    binary task may have ``groups [N]``: ranking metrics rank the rows of each group separately, and a negative number
    means no group. ``weight [N]`` multiplied the losses, not the metrics. ``row_id [N]``: see ``Batch``.
    ``output [N]`` or ``[N, outputs]``: what the network returned, where that is asked for.
    """

    prediction: Tensor
    label: Tensor
    confidence: Tensor = UNDEFINED
    likelihood: Tensor = UNDEFINED
    scores: Tensor = UNDEFINED
    groups: Tensor = UNDEFINED
    pinball: Tensor = UNDEFINED
    covered: Tensor = UNDEFINED
    weight: Tensor = UNDEFINED
    row_id: Tensor = UNDEFINED
    output: Tensor = UNDEFINED

    def __len__(self) -> int:
        return len(self.label)

    @property
    def error(self) -> Tensor:
        """One minus the probability of the label, or the distance from it, ``[N]``."""
        return 1 - self.likelihood if self.likelihood.dim() else (self.prediction - self.label).abs()

    def at(self, index: Tensor) -> LabeledPredictions:
        """Return the rows at these places ``[M]``."""
        return LabeledPredictions(**{name: value[index] for name, value in self.columns().items()})

    def columns(self) -> dict[str, Tensor]:
        """Return the tensors that are defined, by name."""
        return {name: value for name, value in vars(self).items() if value.dim()}


NOTHING = torch.zeros(0)
EMPTY = LabeledPredictions(NOTHING, NOTHING, row_id=NOTHING.long(), output=NOTHING)


def labelled_after(task: TaskSpec, rows: Mapping[str, LabeledPredictions]) -> LabeledPredictions:
    """Return the rows of ``task``; of a task after another, those in which that one is positive.

    A network predicts the probability given the task before, so only these rows tell whether it is right.
    """
    labelled = rows.get(task.name, EMPTY)
    if task.after is None:
        return labelled
    before = rows.get(task.after, EMPTY)
    return labelled.at(torch.isin(labelled.row_id, before.row_id[before.label == 1]))
