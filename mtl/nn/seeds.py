"""Derive the seeds of random draws from the seed of a run and what is drawn, such as the rows of an epoch."""

from __future__ import annotations

import zlib

import torch

SEED_PRIME = 1_000_003  # keeps the streams of (seed, epoch) and (seed + 1, epoch - 1) apart


def derive_seed(seed: int, *parts: int | str) -> int:
    """Return a seed that depends on ``seed`` and on each of ``parts``: numbers, such as the epoch, or names."""
    for part in parts:
        number = zlib.crc32(part.encode()) if isinstance(part, str) else part
        seed = (seed * SEED_PRIME + number) % 2**63
    return seed


def make_generator(seed: int, *parts: int | str) -> torch.Generator:
    """Return a generator on the CPU that starts from ``derive_seed``."""
    return torch.Generator().manual_seed(derive_seed(seed, *parts))
