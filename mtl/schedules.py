"""Give the value of a scheduled quantity at a point of its course: pure functions of ``fraction`` in [0, 1]."""

from __future__ import annotations

import math
from collections.abc import Callable

from mtl.types import require


def constant(fraction: float, start: float, end: float) -> float:
    """Return ``start`` throughout, and ``end`` once the course is over."""
    return start if fraction < 1 else end


def linear(fraction: float, start: float, end: float) -> float:
    """Return the point between ``start`` and ``end`` on a straight line."""
    return start + (end - start) * fraction


def log_linear(fraction: float, start: float, end: float) -> float:
    """Return the point between ``start`` and ``end`` on a straight line in the logarithm; both must be > 0."""
    return math.exp(linear(fraction, math.log(start), math.log(end)))


def cosine(fraction: float, start: float, end: float) -> float:
    """Return the point between ``start`` and ``end`` on half a cosine wave: flat at both ends."""
    return end + (start - end) * (1 + math.cos(math.pi * fraction)) / 2


SHAPES: dict[str, Callable[[float, float, float], float]] = {
    "constant": constant,
    "linear": linear,
    "log_linear": log_linear,
    "cosine": cosine,
}


def check_schedule(shape: str, start: float, end: float) -> None:
    """Raise InputError for a shape that does not exist or ends that it cannot join."""
    require(shape in SHAPES, f"schedule shape {shape!r}: accepted are {', '.join(SHAPES)}")
    positive = shape != "log_linear" or (start > 0 and end > 0)
    require(
        positive,
        f"schedule log_linear from {start} to {end}: both ends must be greater than 0 (schedule=null for none)",
    )
