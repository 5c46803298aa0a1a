"""Turn the rows of a table into the inputs of a network: learnt from the training rows, then always the same."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor

from data_modules.options import shown
from data_modules.tables.blocks import read_blocks
from data_modules.tables.columns import Scaling, Vocabulary, check_kind, is_categorical, numbers, scaled, scaling_of
from mtl.types import ROW, Categorical, InputSpec, Numeric, require

logger = logging.getLogger(__name__)

NUMERIC = "numeric columns"  # name of the input that holds all of them
LISTED = 20  # columns that a message lists


@dataclass(frozen=True)
class TableEncoder:
    """The vocabulary of each categorical column and the scaling of each numeric one, from the training rows.

    ``separator`` and ``null_values`` say how text files are read. ``from_text``: the training rows came from one, so
    cells of ``null_values`` are empty in any rows.
    """

    categorical: Mapping[str, Vocabulary]
    numeric: Mapping[str, Scaling]
    separator: str = ","
    null_values: Sequence[str] = ()
    from_text: bool = True

    @staticmethod
    def learnt(
        train: pl.DataFrame,
        where: str,
        columns: Sequence[str],
        categorical: Collection[str] = (),
        numeric: Collection[str] = (),
        min_count: int = 1,
        **reading: Any,
    ) -> TableEncoder:
        """Return the encoder of ``columns`` of the rows ``train``; those that are constant there are left out.

        A column is categorical or numeric if named there, or else as ``is_categorical`` finds. Raises InputError.
        """
        vocabularies, scalings, summary = dict[str, Vocabulary](), dict[str, Scaling](), list[str]()
        for name in columns:
            check_kind(train, name, where, ignoring(name))
            if train[name].n_unique() < 2:
                summary.append(f"{name} left out: constant in the training rows")
            elif name in categorical or (name not in numeric and is_categorical(train, name, where)):
                require(name != NUMERIC, f"{where}: rename the column {NUMERIC!r}, a name that is in use")
                vocabularies[name] = Vocabulary.of(train[name], min_count)
                summary.append(f"{name}: {vocabularies[name].size - 1} categories")
            else:
                scaling = scalings[name] = scaling_of(train, name, where)
                summary.append(f"{name}: numeric, mean {scaling.mean:.4g}, standard deviation {scaling.std:.4g}")
        require(bool(summary), f"{where}: no column is left as input")
        require(bool(vocabularies or scalings), f"{where}: every input column is constant in the training rows")
        logger.info("inputs: %s", "; ".join(summary))
        return TableEncoder(vocabularies, scalings, **reading)

    @property
    def columns(self) -> list[str]:
        """The columns that are read: all tasks read the same."""
        return [*self.categorical, *self.numeric]

    def columns_of(self, task: str) -> list[str]:
        """Return the columns that a task reads."""
        return self.columns

    @property
    def inputs(self) -> dict[str, InputSpec]:
        """The description of the inputs."""
        specs: dict[str, InputSpec] = {name: Categorical(known.size) for name, known in self.categorical.items()}
        width = sum(1 + scaling.gaps for scaling in self.numeric.values())
        return specs | ({NUMERIC: Numeric(width)} if width else {})

    def encode(self, frame: pl.DataFrame, where: str, task: str | None = None) -> dict[str, Tensor]:
        """Return the inputs of the rows of ``frame``, ``[N]`` and ``[N, width]``.

        Categories that the training rows do not have get id 0, like those that were too rare. An empty cell is a
        category of its own, or the mean. Raises InputError for a missing column, and for a cell, with its row, that is
        no number where numbers are expected.
        """
        frame = numbered(frame)
        check_columns(frame, self.columns, where)
        if self.from_text and self.null_values:
            frame = frame.with_columns(pl.selectors.string().replace(list(self.null_values), None))
        inputs: dict[str, Tensor] = {}
        for name, vocabulary in self.categorical.items():
            check_kind(frame, name, where, ignoring(name))
            inputs[name] = vocabulary.encode(frame[name])
        parts: list[Tensor] = []
        for name, scaling in self.numeric.items():
            check_kind(frame, name, where, ignoring(name))
            parts += scaled(frame, name, where, scaling, numbers(frame, name, where))
        return inputs | ({NUMERIC: torch.stack(parts, 1)} if parts else {})

    def blocks(self, path: Path) -> Iterator[tuple[pl.DataFrame, float]]:
        """Yield the rows of a file in blocks, and the share of the file that is read."""
        return read_blocks(path, self.separator, self.null_values)

    def state(self) -> dict[str, Any]:
        """Return the encoder as plain data."""
        return {
            "categorical": {name: list(known.values) for name, known in self.categorical.items()},
            "numeric": {name: asdict(scaling) for name, scaling in self.numeric.items()},
            "separator": self.separator,
            "null_values": list(self.null_values),
            "from_text": self.from_text,
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> TableEncoder:
        """Return the encoder of a ``state``."""
        return TableEncoder(
            {str(name): Vocabulary([str(value) for value in values]) for name, values in state["categorical"].items()},
            {
                str(name): Scaling(float(scaling["mean"]), float(scaling["std"]), bool(scaling["gaps"]))
                for name, scaling in state["numeric"].items()
            },
            str(state["separator"]),
            [str(value) for value in state["null_values"]],
            bool(state["from_text"]),
        )


def ignoring(column: str) -> str:
    """Return the end of a message about a column."""
    return f", or leave it out with data.ignore=[{column}]"


def numbered(frame: pl.DataFrame) -> pl.DataFrame:
    """Return ``frame`` with its rows numbered from 1, unless they are numbered already."""
    return frame if ROW in frame.columns else frame.with_row_index(ROW, offset=1)


def check_columns(frame: pl.DataFrame, columns: Sequence[str], where: str, reader: str = "the network") -> None:
    """Raise InputError, which names them and the columns that there are, if ``frame`` lacks some of ``columns``."""
    there = [name for name in frame.columns if name != ROW]
    missing = [name for name in columns if name not in there]
    if missing:
        near = difflib.get_close_matches(missing[0], there, 1)
        hint = f" (did you mean {near[0]!r}?)" if near and len(missing) == 1 else ""
        named = f"column {missing[0]!r}" if len(missing) == 1 else f"columns {listing(missing)}"
        require(False, f"{where} has no {named}{hint}, which {reader} reads; it has {listing(there) or 'none'}")


def listing(columns: Sequence[str]) -> str:
    """Return the names of columns for a message, the first ones if there are many."""
    more = f", ... ({len(columns)} columns)" if len(columns) > LISTED else ""
    return ", ".join(map(shown, columns[:LISTED])) + more
