"""Turn a column of lists, or of texts, into the ids of their elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import torch
from torch import Tensor

from mtl.types import Bag

from .cells import as_text
from .vocabulary import Vocabulary

PADDING, UNKNOWN = 0, 1  # the first ids
GROUP = 3  # letters of a group


@dataclass(frozen=True)
class ListEncoder:
    """The vocabulary of the lists in the training rows, with ids from 2; id 1 is unknown, and id 0 is padding.

    Only the first ``length`` elements of a list are read. ``separator``: the separator of the elements if a cell is
    text; "" if a cell is a list; None if the elements are the ``words_and_groups`` of a text. ``target``: the
    categorical column that has the same vocabulary, if there is one.
    """

    vocabulary: Vocabulary
    length: int
    separator: str | None
    target: str | None = None

    @property
    def spec(self) -> Bag:
        return Bag(self.vocabulary.size + 1, self.length, self.target, self.vocabulary.added)

    def encode(self, column: pl.Series, empty: Sequence[str] = ()) -> Tensor:
        """Return the ids of the elements of each cell, ``[N, length]`` int64."""
        lists = listed(column, self.separator, empty).list.head(self.length)
        elements = lists.drop_nulls().explode(empty_as_null=False)
        ids = np.full((len(lists), self.length), PADDING, dtype=np.int64)
        sizes = lists.list.len().fill_null(0).to_numpy()
        ids[np.arange(self.length) < sizes[:, None]] = self.vocabulary.encode(elements).numpy() + UNKNOWN
        return torch.from_numpy(ids)


def listed(column: pl.Series, separator: str | None, empty: Sequence[str]) -> pl.Series:
    """Return each cell as a list of texts, without empty texts and texts in ``empty``; null for an empty cell.

    ``separator``: see ``ListEncoder``.
    """
    if separator is None:
        return words_and_groups(column)
    if isinstance(column.dtype, pl.Array):
        column = column.arr.to_list()
    if not isinstance(column.dtype, pl.List):
        text = as_text(column)
        column = text.str.split(separator) if separator else text.reshape((len(text), 1)).arr.to_list()
    element = pl.element().cast(pl.String).str.strip_chars()
    return column.list.eval(element.filter(element.is_not_null() & ~element.is_in(["", *empty])))


def words_and_groups(column: pl.Series) -> pl.Series:
    """Return the words of each text in lower case, then their groups of three letters, each once; null if it is empty.

    "So good" has the words <so> and <good> and the groups <so, so>, <go, goo, ood and od>, whose marks < and > tell
    beginnings and ends of words. Words are as in fastText (Joulin et al. 2016, arXiv:1607.01759); groups let words with
    common parts, also misspelt and inflected ones, have something in common (Bojanowski et al. 2017, arXiv:1607.04606).
    """
    words = as_text(column).str.to_lowercase().str.extract_all(r"\w+").list.eval("<" + pl.element() + ">")
    text = pl.lit(words).list.join("")
    threes = [text.str.slice(start).str.extract_all("." * GROUP) for start in range(GROUP)]
    within = pl.element().filter(pl.element().str.contains(r"^.\w+.$"))  # not across two words, as in d><
    groups = [three.list.eval(within) for three in threes]
    return pl.select(pl.concat_list(words, *groups).list.unique(maintain_order=True)).to_series()
