"""Turn the rows of a table into the inputs of a network, with an encoding learnt from the training rows."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated

import polars as pl
import torch
from pydantic import Field
from torch import Tensor

from mtl.checks import join_names, require
from mtl.types import ROW, InputSpec, Numeric, RowEncoder

from .cells import Cells, Remarks, data_columns, ignore_hint
from .columns.base import FAR, UNSEEN
from .columns.category import CategoryColumn
from .columns.date import DateColumn
from .columns.list import ListColumn
from .columns.number import NumberColumn
from .formats import write_number
from .histograms import Histogram
from .options import OnInvalid
from .row_source import read_blocks
from .scale import Scale
from .vocabulary import Vocabulary

logger = logging.getLogger(__name__)

NUMERIC = "numeric columns"  # name of the input that holds all of them
AnyColumn = CategoryColumn | NumberColumn | DateColumn | ListColumn


@dataclass(frozen=True)
class TableEncoder(RowEncoder):
    """The encoding of each column, learnt from the training rows.

    ``columns_by_name``: in the order in which their ids and numbers are inputs. ``on_invalid``: with "missing", a cell
    that should be a number or date and is not becomes a missing value, which ``remarks`` count; with "error" it raises
    InputError. ``filled_after``: the tasks of chains in whose columns an empty cell may mean no, see
    ``find_filled_tasks``.

    ``separator`` and ``null_values`` say how text files are read. ``from_text``: the training rows came from a text
    file, so cells that equal one of ``null_values`` are empty in every column; otherwise only in columns of numbers and
    dates.
    """

    columns_by_name: dict[str, Annotated[AnyColumn, Field(discriminator="kind")]]
    on_invalid: OnInvalid = "error"
    filled_after: list[str] = field(default_factory=list)
    separator: str | None = None
    null_values: Sequence[str] = ()
    from_text: bool = True

    @cached_property
    def remarks(self) -> Remarks:
        """What is odd about the cells that were encoded."""
        return Remarks(self.on_invalid)

    def cells(self, frame: pl.DataFrame, where: str, remarks: Remarks) -> list[tuple[AnyColumn, Cells]]:
        """Return each column with its cells in ``frame``, empty ones as null. Raises InputError for missing columns."""
        frame = number_rows(frame)
        check_columns(data_columns(frame), self.columns, where)
        columns = self.columns_by_name.values()
        names = [column.name for column in columns if self.from_text or column.is_parsed]
        texts = pl.selectors.by_name(*names) & pl.selectors.string()
        frame = frame.with_columns(texts.replace(list(self.null_values), None))
        pairs = [(column, Cells(frame, column.name, where, remarks, self.empty)) for column in columns]
        for column, cells in pairs:
            cells.check_type(ignore_hint(column.name), column.kind)
        return pairs

    @property
    def empty(self) -> Sequence[str]:
        """The texts that count as empty in any rows."""
        return self.null_values if self.from_text else ()

    @property
    def columns(self) -> list[str]:
        return list(self.columns_by_name)

    @property
    def lists(self) -> dict[str, str]:
        return {column.name: column.separator for column in self.columns_by_name.values() if column.kind == "list"}

    @property
    def vocabularies(self) -> dict[str, Vocabulary]:
        """The vocabulary of each input that is ids."""
        columns = self.columns_by_name.values()
        return {name: vocabulary for column in columns for name, vocabulary in column.vocabularies.items()}

    @property
    def scales(self) -> dict[str, Scale]:
        """The scale of each column, or part of a date, that is a number."""
        return {name: scale for column in self.columns_by_name.values() for name, scale in column.scales.items()}

    @property
    def unknown(self) -> dict[str, int]:
        """The id of unknown categories, by input; the ids of the known ones are greater."""
        return {name: column.unknown for column in self.columns_by_name.values() for name in column.vocabularies}

    def written(self, column: str, number: float) -> str:
        return write_number(number, self.columns_by_name[column].format)

    @property
    def inputs(self) -> dict[str, InputSpec]:
        specs: dict[str, InputSpec] = {}
        for column in self.columns_by_name.values():
            specs |= column.inputs
        names, edges = list[str](), list[tuple[float, ...]]()
        for name, scale in self.scales.items():
            names += [name] * (1 + scale.gaps)
            edges += [scale.scaled_edges, ()][: 1 + scale.gaps]
        return specs | ({NUMERIC: Numeric(len(names), tuple(names), tuple(edges))} if names else {})

    def encode(self, frame: pl.DataFrame, where: str, task: str | None = None) -> dict[str, Tensor]:
        """Return the inputs of the rows of ``frame``: ids ``[N]``, lists ``[N, length]``, numbers ``[N, width]``.

        Categories that are unknown or rare in the training rows get id 0, in lists 1, since 0 fills them up. An empty
        cell becomes a category of its own, the mean, or an empty list. The result for a row does not depend on other
        rows. Raises InputError for a missing column and, unless ``on_invalid`` is "missing", for a cell that cannot be
        read as a number or date; the message names the row.
        """
        inputs, numbers = dict[str, Tensor](), list[Tensor]()
        for column, cells in self.cells(frame, where, self.remarks):
            ids, scaled = column.encode(cells)
            inputs |= ids
            numbers += scaled
        return inputs | ({NUMERIC: torch.stack(numbers, 1)} if numbers else {})

    def reorder(self, inputs: Mapping[str, Tensor], column: str, order: Tensor) -> dict[str, Tensor]:
        """Return the ``inputs`` of the same N rows with the cells of ``column`` in another ``order [N]``.

        They are those that ``encode`` returns if cell i of the column is cell ``order[i]`` of before.
        """
        read = self.columns_by_name[column]
        reordered = {**inputs} | {name: inputs[name][order] for name in read.vocabularies}
        if read.scales:
            spec = self.inputs[NUMERIC]
            assert isinstance(spec, Numeric)
            moved = torch.tensor([name in read.scales for name in spec.columns])
            reordered[NUMERIC] = torch.where(moved, inputs[NUMERIC][order], inputs[NUMERIC])
        return reordered

    def histograms_of(self, frame: pl.DataFrame, where: str) -> dict[str, tuple[Histogram, Histogram]]:
        """Return the histogram of each column in the training rows and in ``frame``. Raises InputError."""
        pairs = self.cells(frame, where, Remarks(self.on_invalid))  # ``encode`` reports invalid cells
        return {column.name: (column.histogram, column.count(cells)) for column, cells in pairs}

    def unusual_cells(self) -> str:
        parts = []
        for kind in (UNSEEN, FAR):
            counts = {name: count for (key, name), count in self.remarks.unusual.items() if key == kind and count}
            columns = join_names(f"{name} {count:,}" for name, count in counts.items())
            parts += [f"{kind}: {sum(counts.values()):,} ({columns})"] if counts else []
        return "; ".join(parts)

    def blocks(self, path: Path) -> Iterator[tuple[pl.DataFrame, float]]:
        """Yield blocks of the rows of a file, each with the fraction of the file read so far; then report odd cells."""
        self.remarks.unusual.clear()
        try:
            # ``encode`` knows which texts are empty
            yield from read_blocks(path, separator=self.separator, null_values=())
        finally:
            self.remarks.report_invalid()
            if unusual := self.unusual_cells():
                logger.warning("%s, %s", path, unusual)


def number_rows(frame: pl.DataFrame) -> pl.DataFrame:
    """Return ``frame`` with its rows numbered from 1, unless they are numbered already."""
    return frame if ROW in frame.columns else frame.with_row_index(ROW, offset=1)


def check_columns(
    present: Sequence[str], columns: Sequence[str], where: str, end: str = ", which the network reads"
) -> None:
    """Raise InputError if some ``columns`` are not ``present``; the message names the missing and the present ones."""
    missing = [name for name in columns if name not in present]
    similar = difflib.get_close_matches(missing[0], present, 1) if len(missing) == 1 else []
    hint = f" (did you mean {similar[0]!r}?)" if similar else ""
    names = f"column {missing[0]!r}" if len(missing) == 1 else f"columns {join_names(missing)}"
    require(not missing, f"{where} has no {names}{hint}{end}; it has {join_names(present) or 'none'}")
