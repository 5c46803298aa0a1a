"""Turn the columns of a table into tensors; vocabularies and scales come from the training rows only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import polars as pl
import torch
from torch import Tensor

from mtl.checks import InputError, require
from mtl.types import ROW

from ..files.reading import quote
from .bad_cells import BadCells

FILE = "\0file"  # column of a table of several files that says which one a row is from, for messages
UNKNOWN = 0  # id of a category that the training rows do not have
MISSING = "\0missing"  # the category of empty cells; the NUL keeps it apart from any text of a file


def check_kind(frame: pl.DataFrame, name: str, where: str, hint: str) -> None:
    """Raise InputError if a column has another type than text, number or boolean, such as a date or a list."""
    kind = frame[name].dtype
    known = kind in (pl.String, pl.Boolean, pl.Null) or kind.is_numeric() or isinstance(kind, pl.Categorical | pl.Enum)
    require(known, f"{where}, column {name!r}: its type {kind} is neither text nor number; convert it{hint}")


def numbers(frame: pl.DataFrame, name: str, where: str, bad: BadCells | None = None) -> pl.Series:
    """Return a column as float64, NaN for empty cells.

    A cell that cannot be read as a number becomes NaN and is counted in ``bad``. Without ``bad`` it raises InputError;
    the message names the cell.
    """
    column, parsed = frame[name], parse(frame[name])
    finite = parsed.set(parsed.is_infinite(), None)
    wrong = (column.is_not_null() & finite.is_null()).arg_true()
    BadCells.handle(bad, name, len(wrong), len(column), "a number", lambda: cell(frame, name, wrong[0], where))
    return finite.fill_null(float("nan"))


def cell(frame: pl.DataFrame, name: str, index: int, where: str) -> str:
    """Return file, column, row and content of a cell, for messages."""
    value = frame[name][index]
    content = quote(value) if isinstance(value, str) else repr(value)
    file = frame[FILE][index] if FILE in frame.columns else where
    return f"{file}, column {name!r}, row {frame[ROW][index]}: {content}"


def parse(column: pl.Series) -> pl.Series:
    """Return ``column`` as float64, null for cells that are empty or not a number."""
    if column.dtype == pl.String:
        column = column.str.strip_chars()
    elif not (column.dtype.is_numeric() or column.dtype == pl.Boolean):
        return pl.Series(column.name, [None] * len(column), dtype=pl.Float64)
    return column.cast(pl.Float64, strict=False).fill_nan(None)


def named(frame: pl.DataFrame) -> list[str]:
    """Return the columns of the table itself: without those that only say where a row is from."""
    return [name for name in frame.columns if name not in (ROW, FILE)]


def as_text(column: pl.Series) -> pl.Series:
    """Return each cell as text, independently of the other cells; 3.0 becomes "3"."""
    if column.dtype == pl.String:
        return column.str.strip_chars()
    if column.dtype.is_float():
        return column.cast(pl.String).str.replace(r"\.0$", "")
    return column.cast(pl.String)


@dataclass(frozen=True)
class Vocabulary:
    """The categories of the training rows, with ids from 1.

    Id 0 is for unknown categories and for those with fewer than ``min_count`` training rows.
    """

    values: list[str]

    @staticmethod
    def of(column: pl.Series, min_count: int) -> Vocabulary:
        counts = as_text(column).fill_null(MISSING).value_counts()
        return Vocabulary(sorted(counts.filter(pl.col("count") >= min_count).to_series(0).to_list()))

    @property
    def size(self) -> int:
        return len(self.values) + 1

    @cached_property  # a server encodes few rows at a time
    def _ids(self) -> pl.DataFrame:
        return pl.DataFrame({"value": self.values, "id": range(1, self.size)}, schema={"value": str, "id": pl.Int64})

    def encode(self, column: pl.Series) -> Tensor:
        """Return the ids of the cells, ``[N]`` int64."""
        text = as_text(column).fill_null(MISSING).rename("value")
        ids = text.to_frame().join(self._ids, on="value", how="left", maintain_order="left")["id"].fill_null(UNKNOWN)
        return torch.from_numpy(ids.to_numpy(writable=True))


@dataclass(frozen=True)
class Scaling:
    """Scale a numeric column to mean 0 and standard deviation 1; empty cells become 0.

    If training rows have empty cells, a second column marks the empty cells by 1.
    """

    mean: float
    std: float
    gaps: bool  # whether the training rows have empty cells

    @staticmethod
    def of(values: pl.Series) -> Scaling | None:
        """Return the scaling of the training rows, None if their mean or standard deviation is not finite."""
        filled = values.drop_nans()
        mean, std = filled.mean(), filled.std(ddof=0)
        assert isinstance(mean, float)
        assert isinstance(std, float)
        if not (math.isfinite(mean) and math.isfinite(std)):
            return None
        return Scaling(mean, std if std > 0 else 1.0, len(filled) < len(values))

    def encode(self, values: pl.Series) -> list[Tensor]:
        """Return the scaled column ``[N]`` (float32), and the marks of empty cells if ``gaps``."""
        raw = torch.from_numpy(values.to_numpy(writable=True))
        empty = raw.isnan()
        scaled = ((raw - self.mean) / self.std).masked_fill(empty, 0.0).float()
        return [scaled, empty.float()] if self.gaps else [scaled]


def scaling_of(train: pl.DataFrame, name: str, where: str, values: pl.Series) -> Scaling:
    """Return the scaling of a column of the training rows, whose numbers are ``values``.

    Raises InputError, which names a cell that is too large.
    """
    scaling = Scaling.of(values)
    if scaling is None:
        largest = values.fill_nan(0.0).abs().arg_max() or 0
        raise InputError(
            f"{cell(train, name, largest, where)} is so large that the mean or the standard deviation of the column "
            f"overflows; {_advice(name)}"
        )
    return scaling


def scaled(frame: pl.DataFrame, name: str, where: str, scaling: Scaling, values: pl.Series) -> list[Tensor]:
    """Return the tensors ``[N]`` of a column whose numbers are ``values``; ``where`` names its file in messages.

    Raises InputError, which names the cell, if one is too far from the training rows.
    """
    columns = scaling.encode(values)
    if not bool(columns[0].isfinite().all()):
        index = int(columns[0].isfinite().int().argmin())
        raise InputError(
            f"{cell(frame, name, index, where)} is too far from the training rows, whose mean is "
            f"{scaling.mean:.4g} and standard deviation {scaling.std:.4g}: scaled by them it overflows; {_advice(name)}"
        )
    return columns


def _advice(name: str) -> str:
    return f"correct it, empty it, or leave the column out with data.ignore=[{name}]"
