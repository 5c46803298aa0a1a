"""Cells of inputs that cannot be read: an error, or missing values that are counted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from mtl.checks import InputError

logger = logging.getLogger(__name__)

ERROR, MISSING = "error", "missing"
CHOICES = (ERROR, MISSING)  # of data.on_bad


@dataclass
class BadCells:
    """Count, by column, the cells that are taken for missing values; ``report`` gives one warning for each column."""

    found: dict[str, tuple[int, str]] = field(default_factory=dict)

    @staticmethod
    def handle(bad: BadCells | None, name: str, count: int, rows: int, accepted: str, first: Callable[[], str]) -> None:
        """Add ``count`` cells of column ``name`` to ``bad``, or raise InputError if there is None to count them.

        ``rows``: of how many rows; ``first()`` describes the first cell; ``accepted`` says what it should be.
        """
        if count == 0:
            return
        if bad is None:
            raise InputError(
                f"{first()} is not {accepted}; {count} of {rows} cells of these rows are not. Correct or empty them"
            )
        before, example = bad.found.get(name) or (0, f"{first()} is not {accepted}")
        bad.found[name] = (before + count, example)

    def report(self) -> None:
        """Log one warning for each column with bad cells, and forget them."""
        for count, example in self.found.values():
            more = f" Like {count - 1:,} more cells of the column it" if count > 1 else " It"
            logger.warning("%s.%s is taken for a missing value (data.on_bad=%s)", example, more, MISSING)
        self.found.clear()
