"""The numbers that a run measures: what each one is of, how they are logged, and how results.json keeps them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import polars as pl
import torch

from mtl.loggers.base import MAX_LISTED_TASKS

NETWORK = "network"  # the model that is trained
BLEND = "blend"  # the weighted mean of the network and models of a table
LEAD = " - "  # in the name under which the lead of the model in use over another one is kept


class Key(NamedTuple):
    """What a number measures. Its text is SPLIT/TASK/METRIC, or SPLIT/METRIC of all tasks; MODEL:... of another model.

    ``split``: train, val, test, or training for the training as a whole. ``task``: "" for all of them. ``metric`` has
    no slash; the name of a task may have one.
    """

    split: str
    task: str
    metric: str
    model: str = NETWORK

    def __str__(self) -> str:
        name = "/".join(part for part in (self.split, self.task, self.metric) if part)
        return name if self.model == NETWORK else f"{self.model}:{name}"

    @staticmethod
    def of(text: str) -> Key:
        """Return the key with this text."""
        model, colon, name = text.partition(":")
        if not colon or "/" in model:  # a colon in the name of a task
            model, name = NETWORK, text
        split, _, name = name.partition("/")
        task, _, metric = name.rpartition("/")
        return Key(split, task, metric, model)


class Measurement(NamedTuple):
    """A value, NaN if it is undefined on the rows, and its standard error over the rows, where it was measured."""

    value: float
    sem: float | None = None


class Measurements(dict[Key, Measurement]):
    """The numbers of a run, by what they measure."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return ``values``, numbers by the text of their keys."""
        return cls({Key.of(name): Measurement(float(value)) for name, value in values.items()})

    def rounded(self) -> Self:
        """Return the numbers in the precision of float32, as monitors have them.

        The last digits of float64 differ between runs that are otherwise equal, since sums depend on where tensors lie
        in memory.
        """
        numbers = ((key, _float32(value), sem and _float32(sem)) for key, (value, sem) in self.items())
        return type(self)({key: Measurement(value, sem) for key, value, sem in numbers})

    def value(self, task: str, metric: str, split: str = "test", model: str = NETWORK) -> float | None:
        """Return a value; None if it was not measured, or is undefined."""
        value = self.get(Key(split, task, metric, model), Measurement(math.nan)).value
        return None if math.isnan(value) else value

    @property
    def in_use(self) -> str:
        """The name of the model that predicts: the blend if there is one, else the network."""
        is_blend = (key.model == BLEND and key.split == "test" for key in reversed(self))  # the blend is measured last
        return BLEND if any(is_blend) else NETWORK

    def lead_error(self, task: str, metric: str, model: str) -> float | None:
        """Return the standard error of the value ``in_use`` minus that of ``model``; None if it was not measured."""
        return self.get(Key("test", task, metric, f"{self.in_use}{LEAD}{model}"), Measurement(math.nan)).sem

    def models(self, split: str = "test") -> list[str]:
        """Return the names of the network and of the other models that were measured."""
        names = (key.model for key in self if key.split == split and LEAD not in key.model)
        return list(dict.fromkeys([NETWORK, *names]))

    def by_model(self) -> pl.DataFrame:
        """Return the test metrics: the columns task, metric, network and the other models; null is undefined.

        A row is a metric of the network.
        """
        keys = [key for key in self if (key.split, key.model) == ("test", NETWORK) and key.task]
        pairs = [(key.task, key.metric) for key in keys if key.metric != "loss" and not is_routing(key.metric)]
        models = self.models()
        rows = [(*pair, *(self.value(*pair, model=model) for model in models)) for pair in pairs]
        schema = {"task": pl.String, "metric": pl.String, **dict.fromkeys(models, pl.Float64)}
        return pl.DataFrame(rows, schema, orient="row")

    def plain(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the content of results.json: by split, model and name a value, or [value, standard error].

        An undefined number is None.
        """
        content: dict[str, dict[str, dict[str, Any]]] = {}
        for key, (value, sem) in self.items():
            defined = None if math.isnan(value) else value
            names = content.setdefault(key.split, {}).setdefault(key.model, {})
            names[f"{key.task}/{key.metric}".lstrip("/")] = defined if sem is None else [defined, sem]
        return content

    @classmethod
    def from_plain(cls, content: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Self:
        """Return the numbers in the content of results.json; see ``plain``."""
        numbers = cls()
        for split, models in content.items():
            for model, names in models.items():
                for name, number in names.items():
                    task, _, metric = name.rpartition("/")
                    value, sem = number if isinstance(number, list | tuple) else (number, None)
                    numbers[Key(split, task, metric, model)] = Measurement(math.nan if value is None else value, sem)
        return numbers


def _float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def is_routing(metric: str) -> bool:
    """Return whether a number of a task is no metric of its predictions, but one of the experts that it uses."""
    return metric.startswith(("experts_per_sample", "expert_share_"))


def log_measurements(
    trainer: Any, module: Any, measurements: Measurements, loggers: Iterable[Any] | None = None
) -> None:
    """Add ``measurements`` to those of the run, and log those of the network; further arguments as of ``log_values``.

    ``module``: a ``MultiTaskModule``, whose ``measured`` are the numbers of the run.
    """
    module.measured.update(measurements)
    values = {str(key): measurement.value for key, measurement in measurements.items() if key.model == NETWORK}
    log_values(trainer, values, loggers=loggers)


def log_values(
    trainer: Any, values: Mapping[str, Any], step: int | None = None, loggers: Iterable[Any] | None = None
) -> None:
    """Put ``values`` into ``trainer.callback_metrics``, where monitors read them, and log them in one row.

    All processes must have the same values. ``step``: by default the latest training step, or the number of steps
    before a test. ``loggers``: by default the trainer's. Lightning's ``log_dict`` would do the same with objects for
    each name, which take about 1 ms per name and epoch.
    """
    if not values:
        return
    numbers = {name: torch.tensor(float(value)) for name, value in values.items()}
    trainer.callback_metrics.update(numbers)
    if trainer.sanity_checking:
        return
    if step is None:
        step = trainer.global_step if trainer.testing else max(0, trainer.global_step - 1)
    row = {name: number.item() for name, number in numbers.items()}
    monitors = {getattr(callback, "monitor", None) for callback in getattr(trainer, "callbacks", ())}
    tasks = getattr(getattr(trainer, "lightning_module", None), "tasks", ())
    few = of_few_tasks(row, list(tasks), monitors)
    for logger in trainer.loggers if loggers is None else loggers:
        logged = row if getattr(logger, "takes_all_tasks", False) else few
        logger.log_metrics({**logged, "epoch": trainer.current_epoch}, step)
        logger.save()


def of_few_tasks(row: Mapping[str, float], tasks: Sequence[str], monitors: Collection[str | None]) -> dict[str, float]:
    """Return ``row`` with the values of at most ``MAX_LISTED_TASKS`` tasks, and the distribution over all ``tasks``.

    Of more tasks, it has those of the first ones, the values that are among ``monitors``, and of each metric mean,
    median and quartiles over the tasks where it is defined, such as ``val/mean_auroc`` and ``val/quartile_1_auroc``.
    """
    if len(tasks) <= MAX_LISTED_TASKS:
        return dict(row)
    names, others = {*tasks}, {*tasks[MAX_LISTED_TASKS:]}
    few, values = dict[str, float](), dict[tuple[str, str], list[float]]()
    for name, value in row.items():
        split, task, metric, _ = Key.of(name)
        parts = name.split("/")
        ends = {"/".join(parts[start:]) for start in range(1, len(parts))}  # of train/weight/TASK, say
        if name in monitors or len(parts) < 3 or not (ends | {task, task.partition("/")[2]}) & others:
            few[name] = value
        if task in names and math.isfinite(value):
            values.setdefault((split, metric), []).append(value)
    for (split, metric), numbers in values.items():
        statistics = np.mean(numbers), *np.quantile(numbers, [0.25, 0.5, 0.75])
        for statistic, number in zip(("mean", "quartile_1", "median", "quartile_3"), statistics, strict=True):
            few[f"{split}/{statistic}_{metric}"] = float(number)
    return few
