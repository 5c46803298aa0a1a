"""What every kind of column has."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import polars as pl
from torch import Tensor

from mtl.types import Bag, Categorical

from ..cells import Cells
from ..histograms import Histogram, training_histogram
from ..options import TableOptions
from ..profile import Blocks, Profile
from ..scale import Scale
from ..statistics import Counts
from ..vocabulary import UNKNOWN, Vocabulary, most_frequent, text_counts

logger = logging.getLogger(__name__)

MIN_ROWS_TO_WARN = 10  # with fewer rows, nothing is said
UNSEEN, FAR = "unknown or rare categories", "numbers far outside the training rows"


@dataclass(frozen=True, kw_only=True)
class Column(ABC):
    """How the network reads the cells of a column, learnt from the training rows.

    ``vocabularies``: of the inputs that are ids. ``scales``: of the numbers. Both have the column's name, but for the
    parts of a date. ``format``: how numbers or dates are written, see ``formats.py``. ``histogram``: of the training
    rows.
    """

    name: str
    kind: str
    format: str = ""
    vocabularies: dict[str, Vocabulary] = field(default_factory=dict)
    scales: dict[str, Scale] = field(default_factory=dict)
    histogram: Histogram

    is_parsed: ClassVar[bool] = False  # whether cells are read as numbers or dates
    unknown: ClassVar[int] = UNKNOWN  # the id of unknown categories; those of the known ones are greater

    @property
    def inputs(self) -> Mapping[str, Categorical | Bag]:
        """The inputs that are ids."""
        vocabularies = self.vocabularies.items()
        return {name: Categorical(vocabulary.size, added=vocabulary.added) for name, vocabulary in vocabularies}

    @property
    def options(self) -> dict[str, Any]:
        """How the column is read, as ``ColumnOptions`` say it."""
        return {"kind": self.kind, "ids": False, "format": self.format or None, "separator": None, "target": None}

    @abstractmethod
    def read(self, cells: Cells) -> tuple[dict[str, pl.Series], dict[str, pl.Series]]:
        """Return what becomes ids, by input, and the numbers (float64, NaN: empty), by name. Raises InputError."""

    @abstractmethod
    def count(self, cells: Cells) -> Histogram:
        """Return the histogram of the cells, with the bins of that of the training rows. Raises InputError."""

    def encode(self, cells: Cells) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return ids ``[N]`` (lists: ``[N, length]``) by input, and columns of numbers ``[N]``. Raises InputError."""
        texts, numbers = self.read(cells)
        ids = {name: vocabulary.encode(texts[name]) for name, vocabulary in self.vocabularies.items()}
        for name in ids:
            self._note(UNSEEN, name, int((ids[name] == UNKNOWN).sum()), cells)
        columns = list[Tensor]()
        for name, scale in self.scales.items():
            self._note(FAR, name, scale.far(numbers[name]), cells)
            columns += scale.encode(numbers[name], cells)
        return ids, columns

    def _note(self, kind: str, name: str, unusual: int, cells: Cells) -> None:
        """Count ``unusual`` cells; warn, once for each input, if most are: as if written in another way or unit."""
        remarks, count = cells.remarks, len(cells.frame)
        remarks.unusual[kind, name] += unusual
        expected = kind == FAR and name != self.name  # a part of a date: days go on
        if count >= MIN_ROWS_TO_WARN and 2 * unusual > count and not expected and name not in remarks.warned:
            remarks.warned.add(name)
            logger.warning("%s, column %r: %d of %d cells are %s", cells.where, name, unusual, count, kind)

    def elements(self, cells: Cells) -> dict[str, pl.Series]:
        """Return what is counted to find new categories, by input. Raises InputError."""
        texts, _ = self.read(cells)
        return {name: texts[name] for name in self.vocabularies}

    def extended(self, vocabularies: Mapping[str, Vocabulary], histogram: Histogram) -> Self:
        """Return the column with its ``vocabularies``, now with new categories, and the histogram of further rows."""
        return replace(self, vocabularies={name: vocabularies[name] for name in self.vocabularies}, histogram=histogram)


class Learner(ABC):
    """Learn how to read a column whose kind is known from blocks of training rows; ``sample``: some of its cells.

    ``counts``: how often each category occurs. ``shared_counts``: those of the columns with the same vocabulary, a
    target and its lists; empty if the column has a vocabulary of its own.
    """

    needs_rows: ClassVar[bool] = True  # whether ``add`` must see all training rows

    def __init__(self, profile: Profile, options: TableOptions, sample: pl.Series) -> None:
        self.name, self.format, self.missing = profile.name, profile.format, profile.missing
        self.options = options
        self.counts = profile.counts or Counts()
        self.shared_counts: Sequence[Counts] = ()
        self.fold = options.vocabulary.fold
        self.min_count, self.max_size = options.vocabulary.min_count, options.vocabulary.max_size

    @abstractmethod
    def add(self, cells: Cells) -> None:
        """Add a block of training rows. Raises InputError, which names the first invalid cell."""

    @abstractmethod
    def column(self, rows: int, blocks: Blocks) -> Column:
        """Return what was learnt from the ``rows`` training rows, which ``blocks`` reads again. Raises InputError."""

    def vocabulary(self, counts: Counts) -> Vocabulary:
        """Return the ``max_size`` most frequent categories of at least ``min_count`` training rows, sorted."""
        table = text_counts(self.shared_counts or [counts], self.fold)
        return Vocabulary(most_frequent(table, self.min_count, self.max_size), fold=self.fold)

    def histogram(self, vocabulary: Vocabulary, rows: int, missing: int = 0) -> Histogram:
        """Return the histogram of the categories; ``missing``: the number of empty cells that are not counted."""
        occurrences = text_counts(self.shared_counts or [self.counts], self.fold).rename({"count": "all"})
        table = text_counts([self.counts], self.fold).join(occurrences, on="value")
        return training_histogram(table, self.min_count, vocabulary, rows, missing)
