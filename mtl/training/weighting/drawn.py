"""Draw random numbers that depend on seed and step alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

SPREAD = 1_000_003  # a prime: keeps the streams of (seed, step) and (seed + 1, step - 1) apart


@contextmanager
def drawn_at(seed: int, step: int, like: Tensor) -> Iterator[None]:
    """Seed the generators of the CPU and of ``like``'s device by ``seed`` and ``step``; restore them afterwards.

    All processes then draw the same numbers, whatever else they have drawn, and so does a resumed run.
    """
    with torch.random.fork_rng([like.device] if like.is_cuda else []):
        torch.manual_seed((seed * SPREAD + step) % 2**63)
        yield
