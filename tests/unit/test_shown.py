"""Parts show their sizes, and refuse inputs of another shape with one sentence."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mtl import CometGate, MixtureOfExperts, StackedDense, TopKGate
from mtl.checks import InputError
from mtl.networks.bottom import bottom_for
from mtl.networks.heads import Heads
from mtl.types import Categorical, Numeric, TaskSpec
from tests.gate_cases import CASES, GateCase


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gates_show_sizes_and_options(case: GateCase) -> None:
    shown = str(case.build(2, 8, 4 if case.looks else None))
    assert "(tasks=2, experts=8" in shown.replace("\n  ", "")
    assert "tensor" not in shown


def test_parts_show_sizes() -> None:
    layer = MixtureOfExperts(7, 2, 8, CometGate, partial(StackedDense, units=[6], dropout=0.1))
    text = str(layer).replace("\n", "")
    assert "MixtureOfExperts(  tasks=2, experts=8, inputs=7" in text
    assert "StackedDense(    experts=8, inputs=7, outputs=6, dropout=0.1" in text
    assert "CometGate(tasks=2, experts=8, k=2, gamma=1.0)" in text
    bottom = bottom_for({"id": Categorical(9), "x": Numeric(3)}, 4)
    assert "embedded=1, numeric=1, outputs=7" in str(bottom)
    assert "{a: 1, b: 3}, inputs=6" in str(Heads([TaskSpec("a", "binary"), TaskSpec("b", "multiclass", 3)], 6))


def test_other_shapes_give_one_sentence() -> None:
    layer = MixtureOfExperts(7, 2, 8, CometGate, partial(StackedDense, units=[6]))
    with pytest.raises(InputError, match=r"x \[2, 5, 7\]: this layer takes x \[B, 7\]; flatten tokens with x.flatten"):
        layer(torch.zeros(2, 5, 7))
    with pytest.raises(InputError, match=r"x \[2, 5\]: CometGate\(tasks=2, .*\) takes x \[B, 7\]"):
        layer.gate(torch.zeros(2, 5))
    with pytest.raises(InputError, match=r"^k=9: cannot select 9 of 8 experts"):
        TopKGate(2, 8, 7, k=9)
