"""Turn rows with columns of texts into the tokens that a network was trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import polars as pl
import torch
from pydantic import PlainSerializer, PlainValidator
from torch import Tensor

from mtl.checks import InputError, require
from mtl.types import RowEncoder

from .tables.encoder import check_columns
from .tables.reading import read_blocks
from .texts.encoder import Encoder
from .texts.rows import Texts


@dataclass(frozen=True)
class TextEncoder(RowEncoder):
    """A tokenizer, the largest number of tokens in a row of each task, and its one or two columns of texts.

    The texts of tasks in ``marked`` mark a word, see ``Texts.marked``.
    """

    tokenizer: Annotated[Encoder, PlainSerializer(Encoder.state), PlainValidator(Encoder.from_state)]
    max_length: Mapping[str, int]
    text: Mapping[str, Sequence[str]]
    separator: str = ","
    marked: Sequence[str] = ()

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(column for columns in self.text.values() for column in columns))

    def columns_of(self, task: str) -> Sequence[str]:
        return self.text[task]

    def encode(self, frame: pl.DataFrame, where: str, task: str | None = None) -> dict[str, Tensor]:
        """Return ``tokens`` and ``segments``, ``[N, S]``, of the texts of a task; an empty cell is an empty text.

        Raises InputError if a column is missing or holds no texts, or if ``task`` is None and tasks read different
        columns.
        """
        if task is None:
            different = {tuple(columns) for columns in self.text.values()}
            require(len(different) == 1, f"tasks {', '.join(self.text)} read different columns: name one of them")
            task = next(iter(self.text))
        columns = list(self.text[task])
        check_columns(frame.columns, columns, where, f", which task {task!r} reads")
        texts = []
        for name in columns:
            kind = frame[name].dtype
            if kind not in (pl.String, pl.Null):
                raise InputError(f"{where}, column {name!r} holds {kind}, not texts")
            texts.append(frame[name].cast(pl.String).fill_null("").to_list())
        if not len(frame):
            return {name: torch.zeros(0, 1, dtype=torch.int64) for name in ("tokens", "segments")}
        labels = torch.zeros(len(frame))
        rows = Texts.marked(texts, labels, where) if task in self.marked else Texts.of(texts, labels)
        found = self.tokenizer.encode(rows, self.max_length[task])
        return self.tokenizer.ragged(found, {}).select(torch.arange(len(frame))).inputs

    def blocks(self, path: Path) -> Iterator[tuple[pl.DataFrame, float]]:
        return read_blocks(path, self.separator, [""])
