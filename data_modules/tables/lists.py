"""Turn a column of lists into the ids of their elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import torch
from torch import Tensor

from mtl.types import Bag

from .columns import CategoryEncoder, as_text

PADDING, UNKNOWN = 0, 1  # the first ids


@dataclass(frozen=True)
class ListEncoder:
    """The vocabulary of the lists in the training rows, with ids from 2; id 1 is unknown, and id 0 is padding.

    Only the first ``length`` elements of a list are read. ``separator``: the separator of the elements if a cell is
    text; "" if a cell is a list. ``target``: the categorical column that has the same vocabulary, if there is one.
    """

    vocabulary: CategoryEncoder
    length: int
    separator: str
    target: str | None = None

    @property
    def spec(self) -> Bag:
        return Bag(self.vocabulary.size + 1, self.length, self.target)

    def encode(self, column: pl.Series, empty: Sequence[str] = ()) -> Tensor:
        """Return the ids of the elements of each cell, ``[N, length]`` int64."""
        lists = listed(column, self.separator, empty).list.head(self.length)
        elements = lists.drop_nulls().explode(empty_as_null=False)
        ids = np.full((len(lists), self.length), PADDING, dtype=np.int64)
        sizes = lists.list.len().fill_null(0).to_numpy()
        ids[np.arange(self.length) < sizes[:, None]] = self.vocabulary.encode(elements).numpy() + UNKNOWN
        return torch.from_numpy(ids)


def is_list(column: pl.Series) -> bool:
    kind = column.dtype
    if not isinstance(kind, pl.List | pl.Array):
        return False
    inner = kind.inner
    return (
        inner in (pl.String, pl.Boolean, pl.Null)
        or bool(inner and inner.is_integer())
        or isinstance(inner, pl.Categorical | pl.Enum)
    )


def listed(column: pl.Series, separator: str, empty: Sequence[str]) -> pl.Series:
    """Return each cell as a list of texts, without empty texts and texts in ``empty``; null for an empty cell."""
    if isinstance(column.dtype, pl.Array):
        column = column.arr.to_list()
    if not isinstance(column.dtype, pl.List):
        text = as_text(column)
        column = text.str.split(separator) if separator else text.reshape((len(text), 1)).arr.to_list()
    element = pl.element().cast(pl.String).str.strip_chars()
    return column.list.eval(element.filter(element.is_not_null() & ~element.is_in(["", *empty])))
