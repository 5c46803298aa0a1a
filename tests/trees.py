"""Few small trees in a blend, and a rough linear model, where it does not matter how good they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mtl.table_models import lightgbm


@contextmanager
def few_trees() -> Iterator[None]:
    """Inside this context, let outputs have ten trees at most, of four leaves, and linear models few iterations."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("lightgbm", "catboost"):
            patch.setattr(f"mtl.table_models.{name}.TREES", 10)
        patch.setattr("mtl.table_models.linear.STEPS", 5)
        for options in (lightgbm.OPTIONS, lightgbm.OF_LISTS):
            patch.setitem(options, "num_leaves", 4)
        yield
