"""Few small trees in a blend, where it does not matter how good they are or what ends their growth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mtl.table_models import lightgbm


@contextmanager
def few_trees() -> Iterator[None]:
    """Let each output have ten trees at most inside this context, and those of LightGBM four leaves."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("lightgbm", "catboost"):
            patch.setattr(f"mtl.table_models.{name}.TREES", 10)
        for options in (lightgbm.OPTIONS, lightgbm.OF_LISTS):
            patch.setitem(options, "num_leaves", 4)
        yield
