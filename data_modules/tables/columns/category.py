"""Columns of categories, each of which has an id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import polars as pl

from ..cells import Cells, as_text
from ..histograms import Histogram, category_histogram
from ..profile import Blocks
from .base import Column, Learner


@dataclass(frozen=True, kw_only=True)
class CategoryColumn(Column):
    """Categories; an empty cell is one of its own."""

    kind: Literal["category"] = "category"

    def read(self, cells: Cells) -> tuple[dict[str, pl.Series], dict[str, pl.Series]]:
        return {self.name: cells.column}, {}

    def count(self, cells: Cells) -> Histogram:
        texts = as_text(cells.column)
        ids = self.vocabularies[self.name].encode(texts.drop_nulls())
        return category_histogram(ids, self.vocabularies[self.name], texts.null_count(), len(texts), self.histogram)


class CategoryLearner(Learner):
    needs_rows: ClassVar[bool] = False  # the values are counted already

    def add(self, cells: Cells) -> None:
        pass

    def column(self, rows: int, blocks: Blocks) -> CategoryColumn:
        vocabulary = self.vocabulary(self.counts)
        histogram = self.histogram(vocabulary, rows)
        return CategoryColumn(name=self.name, vocabularies={self.name: vocabulary}, histogram=histogram)
