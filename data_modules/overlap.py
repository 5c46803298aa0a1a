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
    """Return a hash of the inputs and labels of each row, ``[N]`` uint64, the same with any version of any package."""
    found = np.zeros(len(rows), dtype=np.uint64)
    for values in [*rows.inputs.values(), *rows.targets.values()]:
        for column in bits(values).T:
            found = mixed(found ^ column)
    return found


def bits(values: Tensor) -> Any:
    """Return ``values [N, ...]`` as numbers ``[N, width]`` of 64 bits."""
    array = values.reshape(len(values), -1).cpu().numpy()
    wide = array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
    return np.ascontiguousarray(wide + 0).view(np.uint64)  # + 0: 0.0 for -0.0


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
    own, rest = np.unique(hashes(train)), [hashes(each) for each in others]
    kept: list[int] = np.setdiff1d(own, np.concatenate(rest))[:MOST].tolist()
    return kept


def warn_of_overlap(rows: Batch, sample: Collection[int], where: str) -> None:
    """Warn if more than a few ``rows`` are in a ``sample_of`` training rows; ``where`` names them."""
    share = shared_share(rows, sample)
    if share >= FEW:
        logger.warning(
            "%s: the network was trained on %.0f %% of these rows: what it gets right says little about new ones",
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
