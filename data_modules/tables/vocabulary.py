"""The categories of training rows and their ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import polars as pl
import torch
from torch import Tensor

from .cells import MISSING, as_text
from .formats import dates_in_format
from .statistics import Counts

UNKNOWN = 0  # id of a category that the training rows do not have


def canonical_value(text: pl.Series, booleans: bool) -> pl.Series:
    """Return the number or date that a text stands for, in one spelling; null if it is neither.

    So 07, +7, 7.00 and 7e0 are 7, and 2026-03-01 is that day's midnight. Digits are kept: two whole numbers beyond 2^53
    stay different. ``booleans``: true is 1, and false is 0.
    """
    if booleans:
        text = text.replace({"true": "1", "false": "0"})
    parts = text.str.extract_groups(r"^\+?(-?)0*(\d+?)(?:\.(\d*?)0*)?$").struct.unnest()
    sign, whole, fraction = parts.get_columns()
    digits = (sign + whole + ("." + fraction).replace(".", "").fill_null("")).replace("-0", "0")
    number = text.cast(pl.Float64, strict=False)
    other = as_text(number.set(~number.is_finite(), None))  # such as 7e0 and .5
    dates = dates_in_format(text, "").dt.to_string("%Y-%m-%d %H:%M:%S")
    return digits.fill_null(other).fill_null(dates)


def fold_spelling(text: Any) -> Any:
    """Return texts, a Series or an expression, in lower case, with single spaces inside and none around them."""
    return text.str.to_lowercase().str.replace_all(r"\s+", " ").str.strip_chars()


@dataclass(frozen=True)
class Vocabulary:
    """The categories of the training rows, with ids from 1.

    Id 0 is for all others: unknown ones, those with fewer than ``min_count`` training rows, and those beyond the
    ``max_size`` most frequent. A cell that is spelled like no category has the id of the only one that stands
    for the same number, date or boolean, if there is one: pandas reads the hours 00 to 23 as whole numbers.
    ``fold``: categories have the spelling of ``fold_spelling``, and so have the cells before they are looked up.
    """

    values: list[str]
    added: int = 0  # how many, at the end, came after the network was built
    fold: bool = False

    @property
    def size(self) -> int:
        return len(self.values) + 1

    @cached_property  # a server encodes few rows at a time
    def _ids(self) -> pl.DataFrame:
        return pl.DataFrame({"value": self.values, "id": range(1, self.size)}, schema={"value": str, "id": pl.Int64})

    @cached_property
    def _booleans(self) -> bool:
        return {*self.values} <= {MISSING, "true", "false"} or {*self.values} <= {MISSING, "0", "1"}

    @cached_property
    def _by_value(self) -> pl.DataFrame:
        meanings = self._ids.with_columns(of=canonical_value(self._ids["value"], self._booleans))
        return meanings.filter(pl.col("of").is_unique() & pl.col("of").is_not_null()).select("of", "id")

    def encode(self, column: pl.Series) -> Tensor:
        """Return the ids of the cells, ``[N]`` int64."""
        cells = as_text(column).fill_null(MISSING).rename("value")
        text: pl.DataFrame = (fold_spelling(cells) if self.fold else cells).to_frame()
        ids = text.join(self._ids, on="value", how="left", maintain_order="left")["id"]
        others = text.filter(ids.is_null() & (text["value"] != MISSING)).unique()
        if len(others):
            others = others.with_columns(of=canonical_value(others["value"], self._booleans))
            same_value = others.join(self._by_value, on="of").select("value", "id")
            ids = text.join(pl.concat([self._ids, same_value]), on="value", how="left", maintain_order="left")["id"]
        return torch.from_numpy(ids.fill_null(UNKNOWN).to_numpy(writable=True))


def text_counts(counts: Sequence[Counts], fold: bool) -> pl.DataFrame:
    """Return how often each category occurs, as text, in the columns value and count; ``fold``: see ``Vocabulary``."""
    tables = [part.table() for part in counts]
    texts = [table.select(value=as_text(table["value"]).fill_null(MISSING), count="count") for table in tables]
    spelling = fold_spelling(pl.col("value")) if fold else pl.col("value")
    return pl.concat(texts).group_by(spelling).agg(pl.col("count").sum())


def most_frequent(table: pl.DataFrame, min_count: int, max_size: int | None) -> list[str]:
    """Return the ``max_size`` most frequent categories of those that occur ``min_count`` times in ``table``, sorted."""
    frequent = table.filter(pl.col("count") >= min_count).sort(-pl.col("count").cast(pl.Int64), "value")
    return sorted(frequent["value"].head(len(frequent) if max_size is None else max_size).to_list())
