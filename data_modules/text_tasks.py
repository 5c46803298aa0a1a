"""Base of data sets whose tasks are texts: tokenised once, padded to the longest row of a batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import polars as pl
import torch
from pydantic import Field, PlainSerializer, PlainValidator
from torch import Tensor

from mtl.checks import InputError, require, require_packages
from mtl.options import MANY, FilePath, Name, validated
from mtl.types import DataSpec, InputSpec, RowEncoder, TaskSpec, Tokens

from .tables.encoder import check_columns
from .tables.row_source import read_blocks
from .task_batches import TasksDataModule
from .texts import vocabulary
from .texts.encoder import Encoder, load_pretrained
from .texts.rows import RaggedRows, Texts

logger = logging.getLogger(__name__)

MAX_SMALL_ROWS = 10_000  # most training rows of a task that counts as small
PADDING_SEGMENT = 0
PhaseLength = Annotated[int, Field(ge=8, le=100_000)]  # tokens of a row


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
        content = self.tokenizer.encode(rows, self.max_length[task])
        return self.tokenizer.ragged(content, {}).select(torch.arange(len(frame))).inputs

    def blocks(self, path: Path) -> Iterator[tuple[pl.DataFrame, float]]:
        return read_blocks(path, separator=self.separator, null_values=[""])


class TextTasksDataModule(TasksDataModule):
    """Base class of data sets whose tasks are texts or pairs of texts.

    A subclass implements ``read_tasks() -> ([TaskSpec], {"train", "val", "test"} -> {task -> Texts})``, and
    ``text_columns() -> {task -> columns}``, the one or two columns of texts. Inputs: ``tokens [B, S]`` and
    ``segments [B, S]`` (0 for the first text, 1 for the second), S at most ``max_length``.

    ``tokenizer`` is a folder or a name on the Hugging Face hub; None trains a WordPiece vocabulary of ``vocabulary``
    tokens on the training texts. Tokens are kept in ``data_dir``/cache and used until a text changes.
    """

    @validated
    def __init__(
        self,
        data_dir: FilePath = Path("data"),
        tokenizer: Name | None = None,
        vocabulary: Annotated[int, Field(ge=100, le=MANY)] = 8000,
        max_length: PhaseLength = 128,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.data_dir, self.tokenizer = data_dir, tokenizer
        self.vocabulary, self.max_length = vocabulary, max_length
        self.encoder: Encoder | None = None  # after ``setup()``
        require_packages("a data set of texts", "text", "tokenizers", *(["transformers"] if tokenizer else []))

    encoder_kind = TextEncoder
    row_encoder: TextEncoder | None
    separator = ","  # of CSV files

    def text_columns(self) -> dict[str, Sequence[str]]:
        """Return the one or two columns of texts of each task."""
        raise NotImplementedError

    def read_tasks(self) -> tuple[list[TaskSpec], dict[str, dict[str, Texts]]]:
        """Return the tasks and, at least for the splits in ``wanted``, the texts of each."""
        raise NotImplementedError

    def load_tasks(self) -> tuple[DataSpec, dict[str, dict[str, RaggedRows]]]:
        start = time.perf_counter()
        specs, texts = self.read_tasks()
        if self.row_encoder is None:
            encoder = self._encoder(list(texts["train"].values()))
            lengths = {spec.name: self.length_of(spec.name) for spec in specs}
            marked = [spec.name for spec in specs if spec.marked]
            self.row_encoder = TextEncoder(encoder, lengths, self.text_columns(), self.separator, marked)
        encoder = self.encoder = self.row_encoder.tokenizer
        cache = self.data_dir / "cache"
        tasks: dict[str, dict[str, RaggedRows]] = {split: {} for split in self.wanted}
        for split in self.wanted:
            for task, rows in texts[split].items():
                same = split == "test" and "val" in tasks and rows is texts["val"][task]
                encoded = tasks["val"][task] if same else encoder.rows(rows, task, self.length_of(task), cache)
                tasks[split][task] = encoded
        for task, first in tasks[self.wanted[0]].items():
            counts = ", ".join(f"{len(tasks[split][task])} {split}" for split in self.wanted)
            length = len(first.tokens) / len(first)
            logger.info("task %s: %s rows, %.1f tokens on average", task, counts, length)
        logger.info("texts ready in %.1f s", time.perf_counter() - start)
        if self._spec is not None:  # of a checkpoint
            return DataSpec(self._spec.inputs, specs), tasks
        return DataSpec(self.inputs_of(encoder, tasks["train"]), specs), tasks

    def inputs_of(self, encoder: Encoder, train: Mapping[str, RaggedRows]) -> dict[str, InputSpec]:
        """Return the inputs of the network, with how often each token occurs in the training rows of all tasks."""
        counts = torch.stack([rows.tokens.bincount(minlength=encoder.vocab) for rows in train.values()]).sum(0)
        longest = max(map(self.length_of, train))
        return {
            "tokens": Tokens(encoder.vocab, longest, encoder.pad, counts, encoder.vocabulary_digest()),
            "segments": Tokens(2, longest, PADDING_SEGMENT),
        }

    def length_of(self, task: str) -> int:
        """Return the largest number of tokens in a row of ``task``."""
        return self.max_length

    def _encoder(self, train: list[Texts]) -> Encoder:
        if self.tokenizer is not None:
            return load_pretrained(self.tokenizer)
        return vocabulary.trained(train, self.vocabulary, self.data_dir / "cache")
