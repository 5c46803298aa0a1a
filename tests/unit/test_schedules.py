"""Shapes of schedules: where they begin, where they end, what lies between."""

from __future__ import annotations

import pytest

from mtl.checks import InputError
from mtl.training.schedules import SHAPES, check_schedule


@pytest.mark.parametrize("shape", SHAPES)
def test_ends(shape: str) -> None:
    assert SHAPES[shape](0.0, 20.0, 0.5) == pytest.approx(20.0)
    assert SHAPES[shape](1.0, 20.0, 0.5) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("shape", "middle"), [("constant", 1.0), ("linear", 50.5), ("log_linear", 10.0), ("cosine", 50.5)]
)
def test_middle(shape: str, middle: float) -> None:
    assert SHAPES[shape](0.5, 1.0, 100.0) == pytest.approx(middle)


@pytest.mark.parametrize("shape", SHAPES)
def test_monotone(shape: str) -> None:
    values = [SHAPES[shape](i / 20, 1.0, 7.0) for i in range(21)]
    assert values == sorted(values)


def test_cosine_is_flat_at_its_ends() -> None:
    cosine = SHAPES["cosine"]
    assert cosine(0.01, 0.0, 1.0) < 0.001
    assert cosine(0.99, 0.0, 1.0) > 0.999


def test_refused() -> None:
    with pytest.raises(InputError, match="constant, linear, log_linear, cosine"):
        check_schedule("bent", 0, 1)
    with pytest.raises(InputError, match="log_linear from 0 to 1"):
        check_schedule("log_linear", 0, 1)


def test_inverse_sqrt_by_step() -> None:
    for step in (0, 1, 99, 2499, 9999):
        assert SHAPES["inverse_sqrt"](step / 9999, 50.0, 0.5) == pytest.approx(50 / (step + 1) ** 0.5)
