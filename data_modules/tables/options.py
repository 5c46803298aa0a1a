"""The user's options for a table: how columns are read, how rows are split, which categories have ids."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mtl.options import Count, Dropout, Fraction, LargeCount, Name, NonNegative, StrictModel, Text, matching

from .formats import ACCEPTED, DATE_FORMATS, NUMBER_FORMATS
from .label_options import LabelOptions, as_options

NULL_VALUES = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NULL", "null", "None")
MIN_ROWS_PER_WORD = 2  # a word of a single training row teaches only that row's label
OnInvalid = Literal["error", "missing"]
ElementKind = Literal["list", "text", "molecule"]  # whose cells become several ids
ColumnKind = Literal["category", "number", "date", ElementKind]
ELEMENT_KINDS = get_args(ElementKind)
Separator = Annotated[
    str,
    matching(r"[\x01-\x09\x0b\x0c\x0e-!#-\x7f]", "one ASCII character, neither a double quote nor a line break"),
]


THREE_FRACTIONS = "three positive numbers (train, val, test) that sum to 1"


def _check_sum(fractions: tuple[float, float, float]) -> tuple[float, float, float]:
    if not math.isclose(sum(fractions), 1.0):
        raise ValueError(f"must be {THREE_FRACTIONS}")
    return fractions


Fractions = Annotated[tuple[Fraction, Fraction, Fraction], Field(strict=False), AfterValidator(_check_sum)]


def _check_format(text: str) -> str:
    if text not in DATE_FORMATS and not any(number in text for number in NUMBER_FORMATS):
        raise ValueError(f"must be {ACCEPTED}")
    return text


class ColumnOptions(StrictModel):
    """How a column is read, where that is not inferred.

    ``kind``: what it holds. ``ids``: whole numbers that are read as numbers and as categories. ``format``: how its
    dates or numbers are written, see ``formats.py``; this may also be given for a column of labels or weights.
    ``separator``: of the elements of a list; None: its cells are lists. ``target``: the categorical column whose
    vocabulary a list shares, and with whose cell networks compare its elements. ``max_length``: how many elements of a
    list, or words and letter groups of a text, are read; None: as many as the longest training row has.
    """

    kind: ColumnKind | None = None
    ids: bool = False
    format: Annotated[str, AfterValidator(_check_format)] | None = None
    separator: str | None = None
    target: Name | None = None
    max_length: Count | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        needed: dict[str, tuple[bool, list[str | None]]] = {
            "ids": (self.ids, ["number"]),
            "format": (self.format is not None, ["number", "date", None]),
            "separator": (self.separator is not None, ["list"]),
            "target": (self.target is not None, ["list"]),
            "max_length": (self.max_length is not None, ["list", "text"]),
        }
        for option, (is_set, kinds) in needed.items():
            if is_set and self.kind not in kinds:
                raise ValueError(f"{option} is for kind={' or '.join(kind for kind in kinds if kind)}")
        return self


Columns = Mapping[Name, Annotated[ColumnOptions, BeforeValidator(as_options)]]
TaskOptions = Annotated[LabelOptions, BeforeValidator(as_options)]


class SplitOptions(StrictModel):
    """How the rows of ``data.path`` become train, val and test.

    ``by``: random; time, in the order of the times in ``column``, training rows first; group, with all rows of a cell
    of ``column`` in one split; scaffold, with all molecules of a ``column`` that share a scaffold in one split, the
    largest groups in train; column, where the cells of ``column`` are train, val or test. ``fractions``: of train,
    val and test. ``gap``: the rows of so many days at the start of each later split are in no split; if the column
    holds numbers, in its units.
    """

    by: Literal["random", "time", "group", "scaffold", "column"] = "random"
    column: Name | None = None
    fractions: Fractions = (0.8, 0.1, 0.1)
    gap: NonNegative = 0.0

    @model_validator(mode="after")
    def _check_column(self) -> Self:
        if (self.by == "random") != (self.column is None):
            lacks = "name the column, as in data.split.column=NAME"
            raise ValueError(lacks if self.column is None else "column is for by=time, group, scaffold or column")
        if self.gap and self.by != "time":
            raise ValueError("gap is for by=time")
        return self


class VocabularyOptions(StrictModel):
    """Which categories have ids of their own; the others share that of unknown ones.

    ``min_count``: the number of training rows that a category needs. ``max_size``: the number of ids of a column, for
    its most frequent categories. ``unknown_rate``: the fraction of the ids in a training step that become the unknown
    one, so that its embedding is trained too. ``fold``: categories that differ only in case or spaces are one.
    """

    min_count: LargeCount = 1
    max_size: Count | None = None
    unknown_rate: Dropout = 0.0
    fold: bool = False

    def min_count_of(self, kind: str) -> int:
        """Return the number of training rows that a category of a column of ``kind`` needs."""
        return max(self.min_count, MIN_ROWS_PER_WORD) if kind == "text" else self.min_count


class CsvOptions(StrictModel):
    """How text files are read: ``separator`` (None: recognised), and the cells that count as empty."""

    separator: Separator | None = None
    null_values: Sequence[Text] = NULL_VALUES


@dataclass(frozen=True)
class TableOptions:
    """What the user says of the inputs of a table.

    ``on_invalid``: whether a cell that cannot be read as a number, date or molecule is an error or a missing value.
    """

    columns: Mapping[str, ColumnOptions] = field(default_factory=dict)
    vocabulary: VocabularyOptions = field(default_factory=VocabularyOptions)
    on_invalid: OnInvalid = "error"

    def of(self, name: str) -> ColumnOptions:
        """Return the options of a column."""
        return self.columns.get(name, ColumnOptions())

    @property
    def targets(self) -> dict[str, str]:
        """The categorical column that the elements of a list are compared with, by list."""
        return {name: options.target for name, options in self.columns.items() if options.target is not None}

    @property
    def named(self) -> list[str]:
        """The columns whose kind is given: those, too, that lists are compared with."""
        named = [name for name, options in self.columns.items() if options.kind is not None]
        return list(dict.fromkeys([*named, *self.targets.values()]))
