"""Bad options of callbacks: one sentence that names the option, when the callback is made."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from mtl.callbacks.best_checkpoint import BestCheckpoint
from mtl.callbacks.early_stopping import EarlyStop
from mtl.callbacks.ema import WeightAverage
from mtl.callbacks.example_images import ExampleImages
from mtl.callbacks.hardening import PermutationHardening
from mtl.callbacks.last_checkpoint import LastCheckpoint
from mtl.callbacks.lr_schedule import LearningRate, PlateauRate
from mtl.callbacks.progress import Progress
from mtl.callbacks.routing_monitor import RoutingMonitor
from mtl.callbacks.scheduled_buffer import ScheduledBuffer

from mtl.checks import InputError

NO_COUNT: list[Any] = [0, -1, 1.5, "abc", True, math.nan, math.inf, [3], 10**30]
NO_NUMBER: list[Any] = ["abc", True, math.nan, math.inf, -math.inf, [3], 10**400]


def schedule(**options: Any) -> ScheduledBuffer:
    return ScheduledBuffer("gate.temperature", **{"start": 1.0, "end": 0.1} | options)


CASES: list[tuple[Callable[..., Any], str, list[Any]]] = [
    (EarlyStop, "patience", [*NO_COUNT[1:], None]),
    (EarlyStop, "min_delta", [*NO_NUMBER, -0.5, None]),
    (EarlyStop, "mode", ["foo", None, 3, []]),
    (EarlyStop, "monitor", ["", None, 3]),
    (EarlyStop, "stopping_threshold", NO_NUMBER),
    (lambda **options: BestCheckpoint("x", **options), "save_top_k", [*NO_COUNT[2:], 0, -5, None]),
    (lambda **options: BestCheckpoint("x", **options), "mode", ["foo", None]),
    (lambda **options: BestCheckpoint("x", **options), "monitor", ["", None, 3]),
    (lambda **options: BestCheckpoint("x", **options), "save_weights_only", ["perhaps", 1]),
    (lambda **options: LastCheckpoint("x", **options), "every_steps", NO_COUNT),
    (lambda **options: LastCheckpoint("x", **options), "every_minutes", [*NO_NUMBER, 0, -1]),
    (lambda **options: RoutingMonitor("x", **options), "pictures_every", NO_COUNT),
    (lambda **options: RoutingMonitor("x", **options), "pictures", ["perhaps", 1, None]),
    (lambda **options: RoutingMonitor("x", **options), "max_shares", [*NO_COUNT[1:], None]),
    (lambda **options: ExampleImages("x", **options), "count", [*NO_COUNT[1:], None]),
    (Progress, "refresh_rate", [*NO_COUNT[1:], None]),
    (PermutationHardening, "steps", NO_COUNT),
    (PermutationHardening, "epochs", [*NO_NUMBER, 0, -1]),
    (PermutationHardening, "fraction", [*NO_NUMBER, 0, -1, 1.1]),
    (schedule, "steps", NO_COUNT),
    (schedule, "epochs", [*NO_NUMBER, 0, -1]),
    (schedule, "fraction", [*NO_NUMBER, 0, -1, 2]),
    (lambda **options: schedule(steps=5, **options), "start", [*NO_NUMBER, 1e308, None]),
    (lambda **options: schedule(steps=5, **options), "end", [*NO_NUMBER, -1e308, None]),
    (lambda **options: schedule(steps=5, **options), "shape", ["bent", None, 3, []]),
    (lambda **options: schedule(steps=5, **options), "required", ["maybe", None]),
    (LearningRate, "shape", ["bent", None]),
    (LearningRate, "warmup", [*NO_NUMBER, -0.1, 2, None]),
    (LearningRate, "warmup_steps", NO_COUNT[1:]),
    (LearningRate, "end_factor", [*NO_NUMBER, 1.5, None]),
    (PlateauRate, "factor", [*NO_NUMBER, 0, 1]),
    (PlateauRate, "patience", NO_COUNT),
    (WeightAverage, "decay", [*NO_NUMBER, -0.1, 1.1]),
]


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        pytest.param(make, name, value, id=f"{number}-{name}-{str(value)[:12]}")
        for number, (make, name, values) in enumerate(CASES)
        for value in values
    ],
)
def test_a_bad_option_is_one_sentence(make: Callable[..., Any], name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"{name}.*: must be "):
        make(**{name: value})


def test_good_values_pass() -> None:
    EarlyStop(patience=0, min_delta=0.1, mode="max", stopping_threshold=0.9)
    LastCheckpoint("x", every_steps=3, every_minutes=0.5)
    BestCheckpoint("x", save_top_k=-1)
    RoutingMonitor("x", pictures_every=None, max_shares=0)
    schedule(fraction=1)
    schedule(epochs=0.5, shape="inverse_sqrt", start=1e-30, end=1e30)
