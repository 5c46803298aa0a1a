"""Write pinned numbers anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def keep_equal(values: dict[str, Any], pinned: dict[str, Any], is_same: Callable[[Any, Any], bool]) -> dict[str, Any]:
    """Return ``values``, or what is ``pinned`` for them where it is the same up to rounding.

    The last digits depend on the processor: else each new line would change others.
    """
    return {
        name: pinned[name] if name in pinned and is_same(value, pinned[name]) else value
        for name, value in values.items()
    }
