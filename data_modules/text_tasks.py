"""Base of data sets whose tasks are texts: tokenised once, padded to the longest row of a batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from mtl.options import MANY, FilePath, Name, validated
from mtl.types import DataSpec, InputSpec, TaskSpec, Tokens

from .task_batches import TasksDataModule
from .text_encoder import TextEncoder
from .texts import vocabulary
from .texts.encoder import Encoder, pretrained, require_extra
from .texts.rows import RaggedRows, Texts

logger = logging.getLogger(__name__)

SMALL = 10_000  # most training rows of a task that counts as small
PADDING_SEGMENT = 0
Length = Annotated[int, Field(ge=8, le=100_000)]  # tokens of a row


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
        max_length: Length = 128,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.data_dir, self.tokenizer = Path(data_dir), tokenizer
        self.vocabulary, self.max_length = vocabulary, max_length
        self.encoder: Encoder | None = None  # after ``setup()``
        require_extra("tokenizers", *(["transformers"] if tokenizer else []))

    encoder_kind = TextEncoder
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
                tasks[split][task] = (
                    tasks["val"][task] if same else encoder.rows(rows, task, self.length_of(task), cache)
                )
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
        counts = sum(rows.tokens.bincount(minlength=encoder.vocab) for rows in train.values())
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
            return pretrained(self.tokenizer)
        return vocabulary.trained(train, self.vocabulary, self.data_dir / "cache")
