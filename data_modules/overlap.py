"""Recognise rows that a network was trained on, by a sample of hashes that a checkpoint can hold."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from torch import Tensor

from mtl.types import Batch

logger = logging.getLogger(__name__)

MOST = 4_096  # hashes: of more training rows, those with the smallest ones
Hash = Annotated[int, Field(ge=0, lt=1 << 64)]
FEW = 0.05  # a smaller share of rows may be equal by chance, and hardly changes a metric
MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of SplitMix64 (Steele, Lea and Flood 2014)


def hashes(rows: Batch) -> Any:
    """Return a hash of the inputs and labels of each row, ``[N]`` uint64, the same with any version of any package.

    It is the mixture of a sum of the columns, each multiplied by an odd number of its own.
    """
    columns = np.concatenate([bits(values) for values in [*rows.inputs.values(), *rows.targets.values()]], 1)
    own = mixed(np.arange(columns.shape[1], dtype=np.uint64)) | np.uint64(1)
    found: Any = columns @ own
    return mixed(found)


def bits(values: Tensor) -> Any:
    """Return ``values [N, ...]`` as numbers ``[N, width]`` of 64 bits."""
    array = values.reshape(len(values), -1).cpu().numpy() + 0  # 0.0 for -0.0
    if array.dtype.kind == "f":
        array = array.view(np.int64 if array.dtype == np.float64 else np.int32)
    return array.astype(np.int64).view(np.uint64)


def mixed(values: Any) -> Any:
    """Return SplitMix64's mixture of ``values``, uint64."""
    step, first, second = (np.uint64(number) for number in MIX)
    values = values + step
    values = (values ^ (values >> np.uint64(30))) * first
    values = (values ^ (values >> np.uint64(27))) * second
    return values ^ (values >> np.uint64(31))


def sample_of(train: Batch, *others: Batch) -> list[int]:
    """Return the smallest hashes of rows that are in ``train`` and not in ``others``, at most ``MOST``, sorted.

    Rows that other splits have too, as in a table of few columns, cannot tell the splits apart.
    """
    own, rest = np.sort(hashes(train)), np.concatenate([hashes(each) for each in others])
    for size in (4 * MOST, len(own)):  # a few are mostly enough
        kept: list[int] = np.setdiff1d(own[:size], rest)[:MOST].tolist()
        if len(kept) == MOST:
            break
    return kept


def warn_of_overlap(rows: Batch, sample: Collection[int], where: str) -> None:
    """Warn if more than a few ``rows`` are in a ``sample_of`` training rows; ``where`` names them."""
    share = shared_share(rows, sample)
    if share >= FEW:
        logger.warning(
            "%s: the network was trained on about %.0f %% of these rows: what it gets right says little about new ones",
            *(where, 100 * share),
        )


def shared_share(rows: Batch, sample: Collection[int]) -> float:
    """Return the share of ``rows`` that are in a ``sample_of`` training rows; 0 if the sample cannot tell."""
    if not sample:
        return 0.0
    known, found = np.array(sample, dtype=np.uint64), hashes(rows)
    if len(known) == MOST:  # larger hashes may be those of training rows too
        found = found[found <= known[-1]]
    return float(np.isin(found, known).mean()) if len(found) else 0.0
