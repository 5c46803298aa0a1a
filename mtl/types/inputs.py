"""What the inputs of a network are, and how rows of a file become inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol, Self

from pydantic import TypeAdapter
from torch import Tensor

_adapter = cache(TypeAdapter)  # to make one takes far longer than to use it, and each checkpoint needs it
ROW = "\0row"  # column of a table that numbers its rows from 1, for messages


@dataclass(frozen=True)
class Categorical:
    """One id per row, an integer in ``[0, size)``; tensor ``[B]`` of int64 or int32.

    ``counts [size]``: how often each id occurs in the training rows, where the data module counts them. ``added``: how
    many of the last ids came in later runs; the width of embeddings does not depend on them.
    """

    size: int
    counts: Tensor | None = field(default=None, compare=False, repr=False)
    added: int = 0


@dataclass(frozen=True)
class Bag:
    """The elements of a list per row, ids in ``[0, size)``; tensor ``[B, length]`` of int64 or int32.

    Id 0 is padding for shorter lists, id 1 an element that the training rows do not have. The order of the elements has
    no meaning. ``target``: the categorical input that the elements are compared with: for the items that a user has
    seen, the item of the row. Its ids are one less than those of the same elements in the list, and its size is one
    less than that of the list. ``added``: as for ``Categorical``.
    """

    size: int
    length: int
    target: str | None = None
    added: int = 0


@dataclass(frozen=True)
class Numeric:
    """``width`` real numbers per row; tensor ``[B, width]``.

    ``columns``: the column of a table that each number comes from, if they come from a table. ``edges``: for each
    number, increasing values that divide those of the training rows into bins with about as many rows each; empty for
    a number without bins, and altogether if the data module learns none.
    """

    width: int
    columns: tuple[str, ...] = field(default=(), compare=False)
    edges: tuple[tuple[float, ...], ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Image:
    """One image per row; tensor ``[B, channels, height, width]``, uint8 or float.

    ``mean`` and ``std`` refer to values in [0, 1]; networks use them to standardize images.
    """

    channels: int
    height: int
    width: int
    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class Tokens:
    """One token sequence per row; tensor ``[B, S]`` of ids in ``[0, vocab)``, with S at most ``length``.

    S is the length of the longest row of the batch; the end of shorter rows is filled with the id ``pad``.
    ``counts [vocab]``: how often each id occurs in the training rows, where the data module counts them. ``digest``
    identifies the vocabulary: weights that were trained with another one are useless.
    """

    vocab: int
    length: int
    pad: int = 0
    counts: Tensor | None = field(default=None, compare=False, repr=False)
    digest: str = ""


InputSpec = Categorical | Bag | Numeric | Image | Tokens


class RowEncoder(Protocol):
    """Turn rows of a user's file into the inputs of a network, exactly as in training.

    ``frame`` is a ``polars.DataFrame``; it is typed ``Any`` since networks do not need polars.
    """

    @property
    def columns(self) -> Sequence[str]:
        """The columns that the tasks read, in order."""

    @property
    def lists(self) -> Mapping[str, str]:
        """The columns whose cells are lists, with the separator of elements in cells that are text; "" without one."""
        return {}

    def written(self, column: str, number: float) -> str:
        """Return a number as the cells of a column of a text file write it, such as 3 or 0.5."""
        return str(number).removesuffix(".0")

    def columns_of(self, task: str) -> Sequence[str]:
        """Return the columns that one task reads; tasks that read the same columns have the same inputs."""
        return self.columns

    def encode(self, frame: Any, where: str, task: str | None = None) -> dict[str, Tensor]:
        """Return the inputs by name, ``[N, ...]``, of the rows of ``frame``; other columns are ignored.

        ``where`` names the rows in messages. ``task``: the task to return inputs for, if tasks read different columns.
        Raises InputError, which names column and row, if a column is missing or a cell cannot be read.
        """

    def unusual_cells(self) -> str:
        """Describe in one line the cells encoded so far that the training rows say little about, with their numbers."""
        return ""

    def histograms_of(self, frame: Any, where: str) -> Mapping[str, tuple[Any, Any]]:
        """Return the histograms of each column in the training rows and in ``frame``; empty if they are not known."""
        return {}

    def blocks(self, path: Path) -> Iterator[tuple[Any, float]]:
        """Yield blocks of the rows of a CSV or Parquet file, each with the share of the file read so far."""

    def state(self) -> dict[str, Any]:
        """Return everything that ``encode`` depends on as plain data: text, numbers, lists and dicts.

        Here, the fields of a dataclass.
        """
        state: dict[str, Any] = _adapter(type(self)).dump_python(self, mode="json")
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the encoder that returned ``state``."""
        return _adapter(cls).validate_python(state)
