"""Say at the end of a run what its measurements suggest, and at its beginning whether its network is too large."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mtl.checks import join_names, join_some
from mtl.files.formatting import number
from mtl.predictions import class_names
from mtl.training.labeled_predictions import LabeledPredictions
from mtl.training.measurements import Measurements
from mtl.training.metrics import best_value, positives
from mtl.types import TaskSpec

MIN_RELATIVE_RISE = 0.05  # relative to the loss of the best epoch: a smaller rise may be noise
MIN_VALIDATIONS_SINCE_BEST = 3  # validations after the best epoch that tell a rise from noise
MIN_SKILL = 0.01  # of the way from a constant prediction to a perfect one: less is none
MAX_PARAMETERS_PER_ROW = 1000  # of a network, besides embeddings: larger ones were no better, see docs/training.md
Progress = Mapping[str, Mapping[str, float]]  # of each task, see EpochReport


def advice(record: Mapping[str, Any], progress: Progress) -> list[str]:
    """Return what the ``record`` of a run and the ``progress`` of its tasks suggest, at most three sentences."""
    measured = Measurements.from_plain(record["numbers"])
    others = [*_other_epochs(measured, progress), *_constant(measured, record["main_metrics"])]
    return [*_over_fitting(record, progress), *others]


def size_advice(parameters: float, rows: int, units: Sequence[int]) -> list[str]:
    """Return a sentence if a network has too many ``parameters``, besides embeddings, for the training ``rows``.

    ``units``: the sizes of its layers, ``recipe.expert_units``. The parameters grow at least in proportion to them.
    """
    factor = MAX_PARAMETERS_PER_ROW * rows / max(parameters, 1)
    if not rows or not units or factor >= 1:
        return []
    smaller = ",".join(str(max(8, 2 ** math.floor(math.log2(unit * factor)))) for unit in units)
    return [
        f"{parameters / rows:,.0f} parameters besides embeddings for each training row: a smaller network is often as "
        f"good, and faster; try recipe.expert_units=[{smaller}]"
    ]


def _over_fitting(record: Mapping[str, Any], progress: Progress) -> list[str]:
    rising = {
        task: losses
        for task, losses in progress.items()
        if losses["since"] >= MIN_VALIDATIONS_SINCE_BEST
        and _rises(losses["later_val"], losses["val"])
        and losses["last_train"] < losses["train"]
    }
    if not rising:
        return []
    first = int(min(losses["epoch"] for losses in rising.values())) + 1
    increases = losses_of({task: (losses["val"], losses["later_val"]) for task, losses in rising.items()}, "then")
    rows = record["data"]["rows"].get("train", 0)
    if isinstance(rows, dict):  # by task
        rows = sum(rows.values())
    size = f"; {record['parameters'] / rows:,.0f} parameters for each training row" if rows else ""
    return [
        f"Over-fitting from epoch {first}: the validation loss rises ({increases}) while the training loss falls. Try "
        f"a smaller network (recipe.expert_units{size}) or more recipe.dropout."
    ]


def _other_epochs(measured: Measurements, progress: Progress) -> list[str]:
    losses = {task: (least["val"], measured.value(task, "loss", "val")) for task, least in progress.items()}
    worse = {task: (least, loss) for task, (least, loss) in losses.items() if loss is not None and _rises(loss, least)}
    if not worse or len(progress) == 1:
        return []
    return [
        f"Not at their best in the tested epoch: {losses_of(worse, 'tested')}, by validation loss. Try other weights "
        "of the tasks (weighting=uncertainty), or let mtl share find out which tasks should share."
    ]


def _constant(measured: Measurements, mains: Mapping[str, str]) -> list[str]:
    tasks = []
    for task, main in mains.items():
        values = [measured.value(task, main, model=model) for model in (measured.in_use, "constant")]
        skill = skill_score(main, *values)
        if skill is not None and skill < MIN_SKILL:
            tasks.append(task)
    return [f"No better than a constant prediction: {join_some(tasks)}."] if tasks else []


def unhelpful_calibration(calibration: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a sentence on tasks whose log loss on the test rows is higher after their calibration."""
    measured = {task: values for task, values in calibration.items() if values}
    worse = [task for task, values in measured.items() if values["logloss after"] > values["logloss before"]]
    effect = "has not helped on the test rows, whose log loss is higher after it: compare both on other rows"
    return [f"The calibration of {join_some(worse)} {effect}."] if worse else []


def never_predicted(tasks: Sequence[TaskSpec], rows: Mapping[str, LabeledPredictions]) -> list[str]:
    """Return a sentence that names the classes that have labels in the test ``rows`` but are never predicted."""
    unpredicted = []
    for task in (task for task in tasks if task.kind in ("binary", "multiclass") and task.name in rows):
        labelled, names = rows[task.name], class_names(task)
        predicted = positives(labelled) if task.kind == "binary" else labelled.prediction
        labels, predictions = ({*values.unique().tolist()} for values in (labelled.label, predicted))
        missed = [names[index] for index in sorted(labels - predictions)]
        unpredicted += [f"{task.name}: {join_names(missed)}"] if missed else []
    sentence = f"Never predicted as the most probable class in the test rows: {join_some(unpredicted)}."
    return [sentence] if unpredicted else []


def skill_score(metric: str, value: float | None, constant: float | None) -> float | None:
    """Return how far ``value`` is from that of a ``constant`` prediction (0) towards a perfect one (1), or None."""
    perfect = best_value(metric)
    if value is None or constant is None or perfect is None or constant == perfect:
        return None
    return (value - constant) / (perfect - constant)


def _rises(loss: float, least: float) -> bool:
    return loss > (1 + MIN_RELATIVE_RISE) * least


def losses_of(tasks: Mapping[str, tuple[float, float]], other_name: str) -> str:
    """Return the two losses of each task, as in "click 0.31, then 0.35"."""
    values = ((task, number(loss, 3), number(other, 3)) for task, (loss, other) in tasks.items())
    return join_some(f"{task} {loss}, {other_name} {other}" for task, loss, other in values)
