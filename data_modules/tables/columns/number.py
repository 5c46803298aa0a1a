"""Columns of numbers, which may also be categories."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import polars as pl

from mtl.checks import InputError

from ..cells import Cells, parse_numbers
from ..histograms import Histogram, number_counts
from ..options import TableOptions
from ..profile import Blocks, Profile, describe_first
from ..scale import Measures, cell_advice
from .base import Column, Learner


@dataclass(frozen=True, kw_only=True)
class NumberColumn(Column):
    """Numbers on a scale; with a vocabulary, whole numbers that have an id for each value too."""

    kind: Literal["number"] = "number"
    is_parsed: ClassVar[bool] = True

    @property
    def options(self) -> dict[str, Any]:
        return super().options | {"ids": bool(self.vocabularies)}

    def read(self, cells: Cells) -> tuple[dict[str, pl.Series], dict[str, pl.Series]]:
        return {self.name: cells.column}, {self.name: cells.numbers(self.format)}

    def count(self, cells: Cells) -> Histogram:
        values, scale = cells.numbers(self.format), self.scales[self.name]
        return Histogram(number_counts(values, scale.edges).tolist(), len(values), mean=scale.mean_of(values))


class NumberLearner(Learner):
    def __init__(self, profile: Profile, options: TableOptions, sample: pl.Series) -> None:
        super().__init__(profile, options, sample)
        self.has_ids = profile.repeats
        self.measures = Measures(parse_numbers(sample, self.format))
        self.bins: Any = 0  # counts

    def add(self, cells: Cells) -> None:
        values = cells.numbers(self.format)
        self.measures.add(values)
        self.bins = self.bins + number_counts(values, self.measures.edges)

    def column(self, rows: int, blocks: Blocks) -> NumberColumn:
        self._check_finite(blocks)
        scale = self.measures.scale(self.measures.moments.bounds)
        return NumberColumn(
            name=self.name,
            format=self.format,
            vocabularies={self.name: self.vocabulary(self.counts)} if self.has_ids else {},
            scales={self.name: scale},
            histogram=Histogram(self.bins.tolist(), rows, mean=scale.mean),
        )

    def _check_finite(self, blocks: Blocks) -> None:
        """Raise InputError, which names a cell that is too large, if the mean or the standard deviation overflows."""
        moments = self.measures.moments
        if math.isfinite(moments.mean) and math.isfinite(moments.std):
            return
        largest = max(abs(moments.smallest), abs(moments.largest))
        large = describe_first(self.name, blocks, lambda column: parse_numbers(column, self.format).abs() == largest)
        raise InputError(
            f"{large} is so large that the mean or the standard deviation of the column overflows; "
            f"{cell_advice(self.name)}"
        )
