"""placeholder"""

from __future__ import annotations

from collections.abc import Sequence


def explain(error: Exception, words: Sequence[str]) -> str | None:
    return " ".join(str(error).split())
