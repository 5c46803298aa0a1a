"""What the validation rows teach after the training: better probabilities of classes, and intervals of regressions.

A ``Calibration`` changes no weight: it maps the outputs of a task to better ones, and stands beside the weights in the
checkpoint that is tested. ``mtl.training.fit_calibration`` fits it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtl.nn.functional import at_least_float32

STEPS = 1000  # levels of intervals are multiples of 1 / STEPS


@dataclass(frozen=True)
class Calibration:
    """Of a task with classes, a map of logits; of a regression, the ``scores`` that make its intervals.

    The map is ``scale * logit + shift``. With ``knots``, pairs of an uncalibrated and a calibrated logit in ascending
    order, it is linear between them and has slope 1 outside, so it keeps the order of rows. ``scores[j - 1]`` is added
    at both ends of an interval, which then holds at least the fraction j / STEPS of new labels; a negative one makes it
    narrower. There are scores up to the highest level that the number of validation rows guarantees.
    """

    scale: float = 1.0
    shift: float = 0.0
    knots: tuple[tuple[float, float], ...] = ()
    scores: tuple[float, ...] = ()

    def apply(self, logits: Tensor) -> Tensor:
        """Return the calibrated ``logits``, of the same shape."""
        x = at_least_float32(logits)
        if not self.knots:
            return x * self.scale + self.shift
        start, value = (
            torch.tensor(numbers, dtype=x.dtype, device=x.device) for numbers in zip(*self.knots, strict=True)
        )
        width = start.diff()
        inside = x.clamp(start[0], start[-1])
        parts = torch.minimum((inside[..., None] - start[:-1]).clamp(min=0), width)  # of each piece, left of x
        return value[0] + (parts * (value.diff() / width)).sum(-1) + (x - inside)
