"""Evaluate a trained network on rows with labels, and rank columns by what it loses if they are shuffled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl
import torch

from mtl.chains import with_earlier
from mtl.runs.console import with_progress_bar
from mtl.training.evaluation import Evaluation, predict_batches
from mtl.training.metrics import higher_is_better
from mtl.types import Batch, TaskSpec

IMPORTANCE = {"task": pl.String, "column": pl.String, "metric": pl.String, "importance": pl.Float64, "std": pl.Float64}


def evaluation_of(
    model: Any, batches: Iterable[Batch], tasks: Sequence[TaskSpec], batch_size: int = 4096
) -> Evaluation:
    """Return the evaluation of ``tasks`` on the rows of ``batches``, which have labels for them alone."""
    evaluation = Evaluation(tasks).to(model.device)

    def parts() -> Iterator[Batch]:
        for batch in batches:
            for start in range(0, len(batch), batch_size):
                yield batch.select(torch.arange(start, min(start + batch_size, len(batch))))

    for part, output in predict_batches(model.network, parts(), model.device):
        evaluation.update(output.predictions, part.targets, part.row_ids, part.weights, part.groups)
    return evaluation


def importance(model: Any, batch: Batch, tasks: Sequence[TaskSpec], repeats: int, seed: int) -> pl.DataFrame:
    """See ``TrainedModel.importance``; ``batch``: rows with labels."""
    draw, mains = np.random.default_rng(seed), Evaluation(tasks).main_metrics()
    predicted = [task.name for task in with_earlier(tasks, {task.name: task for task in model.spec.tasks})]
    targets, weights = ({n: of[n] for n in predicted if n in of} for of in (batch.targets, batch.weights))
    batch = Batch(batch.inputs, targets, weights, batch.groups)
    before, losses = evaluation_of(model, [batch], model.spec.tasks).compute(), dict[tuple[str, str], list[float]]()
    for column in with_progress_bar(model.columns, "shuffling columns"):
        for _ in range(repeats):
            inputs = model.encoder.reorder(batch.inputs, column, torch.from_numpy(draw.permutation(len(batch))))
            shuffled = Batch(inputs, targets, weights, batch.groups)
            after = evaluation_of(model, [shuffled], model.spec.tasks).compute()
            for task, metric in mains.items():
                name, sign = f"{task}/{metric}", 1.0 if higher_is_better(metric) else -1.0
                lost = sign * (before.get(name, math.nan) - after.get(name, math.nan))
                losses.setdefault((task, column), []).append(lost)
    rows = [(*key, mains[key[0]], float(np.mean(lost)), float(np.std(lost))) for key, lost in losses.items()]
    table = pl.DataFrame(rows, IMPORTANCE, orient="row")
    return table.sort(pl.col("task").cast(pl.Enum(list(mains))), -pl.col("importance"))
