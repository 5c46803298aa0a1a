"""Set up a data module."""

from __future__ import annotations

from typing import Any


def loaded(data: Any) -> Any:
    """Prepare and set up a data module, and return it."""
    data.prepare_data()
    data.setup()
    return data
