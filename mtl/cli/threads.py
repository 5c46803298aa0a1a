"""Set how many threads an operation on the CPU uses."""

from __future__ import annotations

from functools import cache

import torch


def use_threads(count: int | None) -> None:
    """Let torch use ``count`` threads for an operation; None: as many as at the first call in this process.

    A process may train several runs one after the other, so a run without a number must not inherit that of the last.
    """
    usual = _usual()
    torch.set_num_threads(count or usual)


@cache
def _usual() -> int:
    return torch.get_num_threads()
