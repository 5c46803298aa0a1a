"""Columns of lists, texts and molecules, whose elements have ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import polars as pl
import torch
from torch import Tensor

from mtl.types import Bag

from ..cells import Cells, as_text
from ..histograms import Histogram, category_histogram
from ..molecules import find_bits
from ..options import ElementKind, TableOptions
from ..profile import Blocks, Profile
from ..statistics import Counts
from ..vocabulary import Vocabulary
from .base import Column, Learner

PADDING, UNKNOWN = 0, 1  # the first ids
GROUP_LETTERS = 3  # letters of a group
MAX_TEXT_VOCABULARY = 1 << 16  # words and letter groups of a column that have an id, the most frequent ones,
MAX_TEXT_ELEMENTS = 256  # and that are read from a text, if the options say nothing else


@dataclass(frozen=True, kw_only=True)
class ListColumn(Column):
    """Lists; texts, as lists of words and letter groups; molecules, as lists of bits. Id 1 is unknown, id 0 is padding.

    Only the first ``length`` elements of a list are read. ``separator``: of the elements if a cell is text; "" if a
    cell is a list. ``target``: the categorical column that has the same vocabulary, if there is one.
    """

    kind: ElementKind
    length: int
    separator: str = ""
    target: str | None = None
    unknown: ClassVar[int] = UNKNOWN

    @property
    def vocabulary(self) -> Vocabulary:
        return self.vocabularies[self.name]

    @property
    def inputs(self) -> dict[str, Bag]:
        return {self.name: Bag(self.vocabulary.size + 1, self.length, self.target, self.vocabulary.added)}

    @property
    def options(self) -> dict[str, Any]:
        return super().options | {"separator": self.separator or None, "target": self.target}

    def read(self, cells: Cells) -> tuple[dict[str, pl.Series], dict[str, pl.Series]]:
        return {self.name: self.lists(cells)}, {}

    def lists(self, cells: Cells) -> pl.Series:
        """Return each cell as a list of texts; null for an empty cell."""
        return split_lists(cells, self.kind, self.separator)

    def encode(self, cells: Cells) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return the ids of the elements of each cell, ``[N, length]`` int64."""
        lists = self.lists(cells).list.head(self.length)
        elements = lists.drop_nulls().explode(empty_as_null=False)
        ids = np.full((len(lists), self.length), PADDING, dtype=np.int64)
        sizes = lists.list.len().fill_null(0).to_numpy()
        ids[np.arange(self.length) < sizes[:, None]] = self.vocabulary.encode(elements).numpy() + UNKNOWN
        return {self.name: torch.from_numpy(ids)}, []

    def elements(self, cells: Cells) -> dict[str, pl.Series]:
        return {self.name: distinct_elements(self.lists(cells))}

    def count(self, cells: Cells) -> Histogram:
        ids = self.vocabulary.encode(self.elements(cells)[self.name])
        missing = cells.column.null_count()
        return category_histogram(ids, self.vocabulary, missing, len(cells.frame), self.histogram)


class ListLearner(Learner):
    def __init__(self, profile: Profile, options: TableOptions, sample: pl.Series) -> None:
        super().__init__(profile, options, sample)
        self.kind: ElementKind = profile.kind if profile.kind in ("text", "molecule") else "list"
        self.column_options, self.counts, self.longest = options.of(self.name), Counts(), 1
        self.min_count = options.vocabulary.min_count_of(self.kind)
        self.max_size = self.max_size or (MAX_TEXT_VOCABULARY if self.kind == "text" else None)

    def add(self, cells: Cells) -> None:
        lists = split_lists(cells, self.kind, self.column_options.separator or "")
        self.longest = max(self.longest, max_length_of(lists))
        self.counts.add(distinct_elements(lists))

    def column(self, rows: int, blocks: Blocks) -> ListColumn:
        vocabulary, options = self.vocabulary(self.counts), self.column_options
        max_length = options.max_length or (MAX_TEXT_ELEMENTS if self.kind == "text" else self.longest)
        return ListColumn(
            name=self.name,
            kind=self.kind,
            vocabularies={self.name: vocabulary},
            histogram=self.histogram(vocabulary, rows, self.missing),
            length=min(self.longest, max_length),
            separator=options.separator or "",
            target=options.target,
        )


def split_lists(cells: Cells, kind: ElementKind, separator: str) -> pl.Series:
    """Return each cell as a list of texts, without empty texts and null values; null for an empty cell.

    Raises InputError, which names the first cell that is no molecule where one is expected.
    """
    column = cells.column
    if kind == "molecule":
        bits = find_bits(as_text(column))
        cells.note_invalid(bits, "a molecule in SMILES that rdkit reads")
        return bits
    if kind == "text":
        return words_and_groups(column)
    if isinstance(column.dtype, pl.Array):
        column = column.arr.to_list()
    if not isinstance(column.dtype, pl.List):
        text = as_text(column)
        column = text.str.split(separator) if separator else text.reshape((len(text), 1)).arr.to_list()
    element = pl.element().cast(pl.String).str.strip_chars()
    return column.list.eval(element.filter(element.is_not_null() & ~element.is_in(["", *cells.null_values])))


def distinct_elements(lists: pl.Series) -> pl.Series:
    """Return the elements of lists, those of one list once each."""
    return lists.list.unique().explode().drop_nulls()


def max_length_of(lists: pl.Series) -> int:
    """Return the length of the longest list, 0 if there is none."""
    length: Any = lists.list.len().max() or 0
    return int(length)


def words_and_groups(column: pl.Series) -> pl.Series:
    """Return the words of each text in lower case, then their groups of three letters, each once; null if it is empty.

    "So good" has the words <so> and <good> and the groups <so, so>, <go, goo, ood and od>, whose marks < and > tell
    beginnings and ends of words. Words are as in fastText (Joulin et al. 2016, arXiv:1607.01759); groups let words with
    common parts, also misspelt and inflected ones, have something in common (Bojanowski et al. 2017, arXiv:1607.04606).
    """
    tokens = as_text(column).str.to_lowercase().str.extract_all(r"\w+").list.eval("<" + pl.element() + ">")
    text = pl.lit(tokens).list.join("")
    threes = [text.str.slice(start).str.extract_all("." * GROUP_LETTERS) for start in range(GROUP_LETTERS)]
    within = pl.element().filter(pl.element().str.contains(r"^.\w+.$"))  # not across two words, as in d><
    groups = [three.list.eval(within) for three in threes]
    return pl.select(pl.concat_list(tokens, *groups).list.unique(maintain_order=True)).to_series()
