"""Turn the rows of a table into the inputs of a network, with an encoding learnt from the training rows."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor

from mtl.checks import join_names, require
from mtl.types import ROW, Categorical, InputSpec, Numeric, RowEncoder

from .cells import Cells, Remarks, as_text, named
from .dates import AGE, part_names, parts_of
from .formats import write_number
from .histograms import Histogram, category_counts, number_counts
from .kinds import Kind
from .lists import UNKNOWN as UNKNOWN_ELEMENT
from .lists import ListEncoder, listed
from .options import OnInvalid
from .row_source import RowSource
from .scale import Scale, scaled
from .vocabulary import UNKNOWN, Vocabulary

logger = logging.getLogger(__name__)

FEW = 10  # rows of which nothing is said
UNSEEN, FAR = "unknown or rare categories", "numbers far outside the training rows"
NUMERIC = "numeric columns"  # name of the input that holds all of them


@dataclass(frozen=True)
class TableEncoder(RowEncoder):
    """The encoding of each column, learnt from the training rows.

    ``categorical``: the vocabulary of each categorical column. ``numeric``: the scaling of each numeric column. Both
    include the parts of dates, see ``part_names``. ``dates``: the newest date of each column of dates. ``elements``:
    the vocabulary of each column of lists or texts. ``on_invalid``: with "missing", a cell that should be a number or
    date and is not becomes a missing value, which ``remarks`` count; with "error" it raises InputError.

    ``formats``: how the dates and numbers of a column are written, see ``formats.py``; the others are standard.

    ``filled_after``: the tasks of chains in whose columns an empty cell may mean no, see ``tasks_filled_after``.

    ``separator`` and ``null_values`` say how text files are read. ``from_text``: the training rows came from a text
    file, so cells that equal one of ``null_values`` are empty in all rows. Otherwise only numbers and dates are.

    ``histograms``: of each column in the training rows; empty in checkpoints that were written before there were any.
    """

    categorical: dict[str, Vocabulary]
    numeric: dict[str, Scale]
    dates: dict[str, datetime] = field(default_factory=dict)
    elements: dict[str, ListEncoder] = field(default_factory=dict)
    on_invalid: OnInvalid = "error"
    formats: dict[str, str] = field(default_factory=dict)
    filled_after: list[str] = field(default_factory=list)
    separator: str | None = None
    null_values: Sequence[str] = ()
    from_text: bool = True
    histograms: dict[str, Histogram] = field(default_factory=dict)

    @cached_property
    def remarks(self) -> Remarks:
        """What is odd about the cells that were encoded."""
        return Remarks(self.on_invalid)

    def prepared(self, frame: pl.DataFrame, where: str, remarks: Remarks) -> pl.DataFrame:
        """Return ``frame`` with its rows numbered, empty cells as null, and the parts of its dates as columns.

        Raises InputError for missing columns and, unless ``remarks`` allow them, for cells that should be dates.
        """
        frame = numbered(frame)
        check_columns(named(frame), self.columns, where)
        texts = [name for name, kind in self._kinds.items() if self.from_text or kind in ("number", "date")]
        chosen = pl.selectors.by_name(*texts) & pl.selectors.string()
        frame = frame.with_columns(chosen.replace(list(self.null_values), None))
        for name, kind in self._kinds.items():
            Cells(frame, name, where).check_type(ignoring(name), kind)
        for name, newest in self.dates.items():
            dates = Cells(frame, name, where, remarks).dates(self.formats.get(name, ""))
            frame = frame.with_columns(parts_of(dates, newest))
        return frame

    @property
    def _kinds(self) -> dict[str, Kind]:
        kinds: dict[str, Kind] = dict.fromkeys(self.categorical, "category")
        kinds |= dict.fromkeys(self.numeric, "number")
        for name in self.dates:
            kinds = {column: kind for column, kind in kinds.items() if column not in part_names(name)}
        kinds |= dict.fromkeys(self.dates, "date")
        return kinds | {name: "text" if one.separator is None else "list" for name, one in self.elements.items()}

    def options_of(self, column: str) -> dict[str, Any]:
        """Return how ``column`` is read, as ``ColumnOptions`` say it."""
        elements = self.elements.get(column)
        return {
            "kind": self._kinds[column],
            "ids": column in self.categorical and column in self.numeric,
            "format": self.formats.get(column),
            "separator": (elements.separator or None) if elements else None,
            "target": elements.target if elements else None,
        }

    @property
    def empty(self) -> Sequence[str]:
        """The texts that count as empty in any rows."""
        return self.null_values if self.from_text else ()

    @property
    def columns(self) -> list[str]:
        return list(self._kinds)

    @property
    def lists(self) -> dict[str, str]:
        return {name: one.separator for name, one in self.elements.items() if one.separator is not None}

    @property
    def unknown(self) -> dict[str, int]:
        """The id of unknown categories, by input; the ids of the known ones are greater."""
        return {**dict.fromkeys(self.categorical, UNKNOWN), **dict.fromkeys(self.elements, UNKNOWN_ELEMENT)}

    def written(self, column: str, number: float) -> str:
        return write_number(number, self.formats.get(column, ""))

    @property
    def inputs(self) -> dict[str, InputSpec]:
        specs: dict[str, InputSpec] = {
            name: Categorical(known.size, added=known.added) for name, known in self.categorical.items()
        }
        specs |= {name: elements.spec for name, elements in self.elements.items()}
        columns = tuple(name for name, scaling in self.numeric.items() for _ in range(1 + scaling.gaps))
        edges = tuple(
            own for scaling in self.numeric.values() for own in (scaling.scaled_edges, ())[: 1 + scaling.gaps]
        )
        return specs | ({NUMERIC: Numeric(len(columns), columns, edges)} if columns else {})

    def encode(self, frame: pl.DataFrame, where: str, task: str | None = None) -> dict[str, Tensor]:
        """Return the inputs of the rows of ``frame``: ids ``[N]``, lists ``[N, length]``, numbers ``[N, width]``.

        Categories that are unknown or rare in the training rows get id 0. An empty cell becomes a category of its own,
        the mean, or an empty list. The result for a row does not depend on other rows. Raises InputError for a missing
        column and, unless ``on_invalid`` is "missing", for a cell that cannot be read as a number or date; the message
        names the row.
        """
        frame = self.prepared(frame, where, self.remarks)
        inputs = {name: known.encode(frame[name]) for name, known in self.categorical.items()}
        self._warn_of_unknown(inputs, where)
        self.remarks.unusual.update({(UNSEEN, name): int((ids == UNKNOWN).sum()) for name, ids in inputs.items()})
        inputs |= {name: elements.encode(frame[name], self.empty) for name, elements in self.elements.items()}
        parts: list[Tensor] = []
        for name, scaling in self.numeric.items():
            cells = Cells(frame, name, where, self.remarks)
            values = cells.numbers(self.formats.get(name, ""))
            self.remarks.unusual[FAR, name] += scaling.far(values)
            parts += scaled(cells, scaling, values)
        return inputs | ({NUMERIC: torch.stack(parts, 1)} if parts else {})

    def histograms_of(self, frame: pl.DataFrame, where: str) -> dict[str, tuple[Histogram, Histogram]]:
        """Return the histogram of each column in the training rows and in ``frame``. Raises InputError."""
        return self.histograms_in(self.prepared(frame, where, Remarks(self.on_invalid)), where)

    def histograms_in(self, frame: pl.DataFrame, where: str) -> dict[str, tuple[Histogram, Histogram]]:
        """Return ``histograms_of`` a ``prepared`` frame."""
        pairs = dict[str, tuple[Histogram, Histogram]]()
        for name, then in self.histograms.items():
            mean = None
            if name in self.elements:
                lists = self.elements[name]
                elements = listed(frame[name], lists.separator, self.empty).list.unique().explode().drop_nulls()
                ids, missing = lists.vocabulary.encode(elements), frame[name].null_count()
                counts = category_counts(ids, lists.vocabulary, missing, then.frequent or ())
            elif name in self.numeric:
                scaling, cells = self.numeric[name], Cells(frame, name, where, Remarks(self.on_invalid))
                values = cells.numbers(self.formats.get(name, ""))
                counts, mean = number_counts(values, scaling.edges), scaling.mean_of(values)
            elif name in self.categorical:
                texts = as_text(frame[name])
                known, missing = self.categorical[name], texts.null_count()
                counts = category_counts(known.encode(texts.drop_nulls()), known, missing, then.frequent or ())
            else:
                counts = number_counts(frame[f"{name} {AGE}"].fill_null(float("nan")), ())
            pairs[name] = then, Histogram(counts.tolist(), len(frame), then.frequent, mean)
        return pairs

    def _warn_of_unknown(self, ids: Mapping[str, Tensor], where: str) -> None:
        """Warn, once for each column, if most cells are of no known category, as if written in another way."""
        for name in ids.keys() - self.remarks.warned:
            unknown, count = int((ids[name] == UNKNOWN).sum()), len(ids[name])
            if count >= FEW and 2 * unknown > count:
                self.remarks.warned.add(name)
                here = f"{where}, column {name!r}"
                logger.warning("%s: %d of %d cells are unknown or rare categories", here, unknown, count)

    def unusual_cells(self) -> str:
        parts = []
        for what in (UNSEEN, FAR):
            counts = {name: count for (kind, name), count in self.remarks.unusual.items() if kind == what and count}
            columns = join_names(f"{name} {count:,}" for name, count in counts.items())
            parts += [f"{what}: {sum(counts.values()):,} ({columns})"] if counts else []
        return "; ".join(parts)

    def blocks(self, path: Path) -> Iterator[tuple[pl.DataFrame, float]]:
        """Yield blocks of the rows of a file, each with the share of the file read so far; then report odd cells."""
        self.remarks.unusual.clear()
        try:
            # ``encode`` knows which texts are empty
            yield from RowSource.one_file(path, separator=self.separator, null_values=()).with_progress()
        finally:
            self.remarks.report_invalid()
            if found := self.unusual_cells():
                logger.warning("%s, %s", path, found)


def ignoring(column: str) -> str:
    """Return the end of a message about a column."""
    return f", or leave it out with data.ignore=[{column}]"


def numbered(frame: pl.DataFrame) -> pl.DataFrame:
    """Return ``frame`` with its rows numbered from 1, unless they are numbered already."""
    return frame if ROW in frame.columns else frame.with_row_index(ROW, offset=1)


def check_columns(
    there: Sequence[str], columns: Sequence[str], where: str, end: str = ", which the network reads"
) -> None:
    """Raise InputError if some ``columns`` are not ``there``; the message names the missing and the given columns."""
    missing = [name for name in columns if name not in there]
    near = difflib.get_close_matches(missing[0], there, 1) if len(missing) == 1 else []
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    which = f"column {missing[0]!r}" if len(missing) == 1 else f"columns {join_names(missing)}"
    require(not missing, f"{where} has no {which}{hint}{end}; it has {join_names(there) or 'none'}")
