"""Shapes of schedules: pure functions of ``fraction`` in [0, 1], the elapsed part of the schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field

from mtl.checks import require

MAX_VALUE = 1e30  # fits into a float32 buffer
Value = Annotated[float, Field(ge=0, le=MAX_VALUE)]
Shape = Literal["constant", "linear", "log_linear", "cosine", "inverse_sqrt"]


def constant(fraction: float, start: float, end: float) -> float:
    """Return ``start`` during the schedule and ``end`` after it."""
    return start if fraction < 1 else end


def linear(fraction: float, start: float, end: float) -> float:
    """Interpolate linearly from ``start`` to ``end``."""
    return start + (end - start) * fraction


def log_linear(fraction: float, start: float, end: float) -> float:
    """Interpolate from ``start`` to ``end`` linearly in the logarithm; both must be > 0."""
    return math.exp(linear(fraction, math.log(start), math.log(end)))


def cosine(fraction: float, start: float, end: float) -> float:
    """Interpolate from ``start`` to ``end`` along half a cosine wave, which is flat at both ends."""
    return end + (start - end) * (1 + math.cos(math.pi * fraction)) / 2


def inverse_sqrt(fraction: float, start: float, end: float) -> float:
    """Return ``start`` / sqrt(1 + c ``fraction``), with c such that the last value is ``end``; both must be > 0.

    A schedule of c steps is ``start`` / sqrt(1 + step), such as from 50 to 0.5 in 9,999 steps (Maziarz et al. 2019).
    """
    return start / math.sqrt(1 + fraction * ((start / end) ** 2 - 1))


SHAPES: dict[str, Callable[[float, float, float], float]] = {
    "constant": constant,
    "linear": linear,
    "log_linear": log_linear,
    "cosine": cosine,
    "inverse_sqrt": inverse_sqrt,
}


def lr_factor_at(
    step: float, warmup: float, length: float, shape: str, end: float, rise: str = "linear", start: float = 0.0
) -> float:
    """Return the factor of the learning rate at optimiser step ``step``, counted from 0.

    It goes from ``start`` to 1 during ``warmup`` steps, in the shape ``rise``, and then to ``end`` at step ``length``,
    in the given ``shape``. With ``cosine`` for both shapes, this is one cycle (Smith & Topin 2018).
    """
    if step < warmup:
        return SHAPES[rise](step / warmup, start, 1.0)
    return SHAPES[shape](min(1.0, (step - warmup) / max(1.0, length - warmup)), 1.0, end)


def check_schedule(shape: str, start: float, end: float) -> None:
    """Raise InputError for a value of 0 that the shape does not allow."""
    message = f"schedule {shape} from {start} to {end}: both values must be greater than 0 (or use schedule=none)"
    require(shape not in ("log_linear", "inverse_sqrt") or min(start, end) >= 1 / MAX_VALUE, message)
