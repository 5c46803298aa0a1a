"""Turn rows that name a user and an item into the ids that a recommender network was trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import polars as pl
import torch
from torch import Tensor

from mtl.types import RowEncoder

from .cells import Cells, as_text, data_columns, parse_numbers
from .encoder import check_columns, number_rows
from .row_source import read_blocks


@dataclass(frozen=True)
class KnownIds:
    """The ids from 0 to ``size`` - 1 of the cells of a column, for the input ``input``.

    Row i of ``names`` has id i; without names the cells are whole numbers from 1, and 1 has id 0.
    """

    input: str
    size: int
    names: Sequence[str] | None = None

    @cached_property  # a server encodes few rows at a time
    def _index(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names or [])}

    def of(self, frame: pl.DataFrame, column: str, where: str) -> Tensor:
        """Return the ids ``[N]`` of the cells of ``column``; raise InputError, which names the first unknown one."""
        if self.names is None:
            number = parse_numbers(frame[column])  # float64; null for a cell that is not a number
            is_known = (number == number.round()) & number.is_between(1, self.size)
            ids = number - 1
            accepted = f"the network knows only those that it was trained on, the whole numbers from 1 to {self.size}"
        else:
            text = frame[column] if frame[column].dtype == pl.String else as_text(frame[column])
            ids = pl.Series([self._index.get(name) for name in text], dtype=pl.Int64)
            is_known = ids.is_not_null()
            accepted = f"the network knows only the {self.size} that it was trained on, such as {self.names[0]!r}"
        unknown = ~is_known.fill_null(False)
        count = f"like {unknown.sum()} of {len(frame)} cells of these rows"
        Cells(frame, column, where).refuse(unknown, f" is unknown, {count}: {accepted}")
        return torch.from_numpy(ids.cast(pl.Int64).to_numpy(writable=True))


@dataclass(frozen=True)
class IdEncoder(RowEncoder):
    """The ids of users and items, by the columns that name them."""

    ids: Mapping[str, KnownIds]

    @property
    def columns(self) -> list[str]:
        return list(self.ids)

    def encode(self, frame: pl.DataFrame, where: str, task: str | None = None) -> dict[str, Tensor]:
        """Return the ids ``[N]`` by input. Raises InputError for a missing column and for an unknown user or item."""
        check_columns(data_columns(frame), self.columns, where)
        frame = number_rows(frame)
        return {ids.input: ids.of(frame, column, where) for column, ids in self.ids.items()}

    def blocks(self, path: Path) -> Iterator[tuple[pl.DataFrame, float]]:
        return read_blocks(path, separator=",", null_values=[""])
