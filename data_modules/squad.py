"""SQuAD 2.0: find the answer to a question in a text, or that there is none (Rajpurkar et al. 2018)."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from mtl.checks import require
from mtl.options import Address, Count, FilePath, validated
from mtl.types import DataSpec, TaskSpec

from .files.cache import cached
from .files.download import fetch
from .files.identity import digest
from .files.reading import parsing, repair
from .splits import SPLITS, sample_rows
from .text_tasks import PhaseLength, TextTasksDataModule
from .texts.encoder import Encoder
from .texts.rows import RaggedRows, Texts
from .texts.squad_metrics import AnswerScorer
from .texts.squad_windows import CACHE_VERSION, Windows, cut_windows

logger = logging.getLogger(__name__)

TASK = "squad"
VAL_FRACTION = 0.1  # of the training articles, for validation
MAX_SPECIAL_TOKENS = 4  # the largest number of special tokens in a row
SITE = "https://rajpurkar.github.io/SQuAD-explorer/dataset"
FILES = {  # the name of each official file and its sha256
    "train": ("train-v2.0.json", "68dcfbb971bd3e96d5b46c7177b16c1a4e7d4bdef19fb204502738552dede002"),
    "dev": ("dev-v2.0.json", "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8"),
}


@dataclass(frozen=True)
class Question:
    """A question about a text, ``context``, of an article.

    ``answers``: each right answer, and the index of its first character in ``context``; empty if there is none.
    """

    text: str
    context: str
    article: int
    answers: tuple[tuple[str, int], ...]

    @property
    def span(self) -> tuple[int, int] | None:
        """Where the first answer begins and ends in ``context``; None if there is no answer."""
        return next(((start, start + len(text)) for text, start in self.answers), None)


class SquadDataModule(TextTasksDataModule):
    """Serve the task ``squad``, of kind ``span``: the first and the last token of the answer to a question in a text.

    The official files are expected in ``data_dir``/squad. The answers of the test file are not public. By default, the
    questions of a tenth of the training articles, drawn with ``seed``, validate, and the development file is the test.
    With ``published_split``, the development file both validates and tests, as in papers: the result is then selected
    on the questions it is reported for. ``max_rows`` takes at most that many training questions, drawn with ``seed``.

    A row is a question (its first ``max_question`` tokens) and its text; a text that is too long for ``max_length``
    gives several rows, which begin ``stride`` tokens apart. An answer has at most ``max_answer`` tokens. Inputs:
    ``tokens`` and ``segments``. The metrics find the texts by ``Batch.row_ids``.
    """

    @validated
    def __init__(
        self,
        data_dir: FilePath,
        max_length: PhaseLength = 384,
        stride: Count = 128,
        max_question: Count = 64,
        max_answer: Count = 30,
        max_rows: Annotated[int, Field(ge=2, le=10**9)] | None = None,
        published_split: bool = False,
        download: bool = True,
        base_url: Address | None = None,
        **common: Any,
    ) -> None:
        super().__init__(data_dir, max_length=max_length, **common)
        self.stride, self.max_question, self.max_answer = stride, max_question, max_answer
        longest = self.max_length - self.max_question - MAX_SPECIAL_TOKENS
        require(
            self.stride <= longest,
            f"data.stride={self.stride}: of max_length={self.max_length} tokens, max_question={self.max_question} and "
            f"{MAX_SPECIAL_TOKENS} special tokens leave {max(0, longest)} for the text: stride must not be larger",
        )
        self.max_rows, self.published_split = max_rows, published_split
        self.download, self.base_url = download, base_url or SITE
        self.folder = self.data_dir / "squad"

    def prepare_data(self) -> None:
        for name, sha256 in FILES.values():
            if not (self.folder / name).exists():
                fetch(f"{self.base_url}/{name}", self.folder / name, sha256, self.download)

    def source_files(self) -> dict[str, Path]:
        return {name: self.folder / name for name, _ in FILES.values()}

    def load_tasks(self) -> tuple[DataSpec, dict[str, dict[str, RaggedRows]]]:
        start = time.perf_counter()
        train, val, test = self._read()
        parts = [train, test] if self.published_split else [train, val, test]
        questions = [question for part in parts for question in part]
        contexts = list(dict.fromkeys(question.context for question in train))
        texts = Texts(contexts + [question.text for question in train], None, torch.zeros(0))
        encoder = self.encoder = self._encoder([texts])
        windows = self._windows(encoder, questions)
        golds = [[text for text, _ in question.answers] for question in questions]
        scorer = AnswerScorer(windows, [question.context for question in questions], golds, self.max_answer)
        targets = windows.targets([question.span for question in questions])
        bounds = torch.tensor([0, *map(len, parts)]).cumsum(0)
        ends = torch.searchsorted(windows.question, bounds).tolist()  # rows of a question follow one another
        served = [slice_rows(windows, targets, low, high, encoder.pad) for low, high in pairwise(ends)]
        rows = dict(zip(SPLITS, [*served, served[-1]], strict=False))  # val is test if both have the same questions
        counts = ", ".join(f"{len(rows[split])} {split}" for split in SPLITS)
        seconds = time.perf_counter() - start
        logger.info("task %s: %s rows of %d questions, ready in %.1f s", TASK, counts, len(questions), seconds)
        tasks = {split: {TASK: rows[split]} for split in SPLITS}
        spec = TaskSpec(TASK, "span", metrics=("f1", "exact_match"), scorer=scorer)
        return DataSpec(self.inputs_of(encoder, tasks["train"]), [spec]), tasks

    def _read(self) -> tuple[list[Question], list[Question], list[Question]]:
        """Return the questions of train, val and test."""
        train, dev = (read_questions(self.folder / name) for name, _ in FILES.values())
        generator = self.generator(TASK)
        train = [train[index] for index in sample_rows(len(train), self.max_rows, generator).tolist()]
        if self.published_split:
            return train, dev, dev
        articles = sorted({question.article for question in train})
        require(len(articles) >= 2, f"{self.folder}: validation needs some of the training articles; there is only one")
        count = max(1, round(VAL_FRACTION * len(articles)))
        held = {articles[index] for index in sample_rows(len(articles), count, generator).tolist()}
        val = [question for question in train if question.article in held]
        return [question for question in train if question.article not in held], val, dev

    def _windows(self, encoder: Encoder, questions: Sequence[Question]) -> Windows:
        """Return the rows of ``questions``; they are kept in ``data_dir``/cache."""
        contexts = {context: index for index, context in enumerate(dict.fromkeys(q.context for q in questions))}
        asked = [contexts[question.context] for question in questions]
        asking = [question.text for question in questions]
        sizes = (self.max_length, self.stride, self.max_question)
        content = cached(
            self.data_dir / "cache" / "tokens" / "windows.pt",
            lambda: cut_windows(encoder, asking, list(contexts), asked, *sizes),
            (CACHE_VERSION, digest([asking, list(contexts), asked]), encoder.digest(), *sizes),
        )
        return Windows(**content)


def slice_rows(rows: Windows, targets: Tensor, low: int, high: int, pad: int) -> RaggedRows:
    """Return the rows from ``low`` to ``high``, without a copy."""
    offsets = rows.offsets[low : high + 1]
    tokens = rows.tokens[int(offsets[0]) : int(offsets[-1])]
    boundary, row_ids = rows.boundary[low:high], torch.arange(low, high)
    return RaggedRows(tokens, offsets - offsets[0], boundary, {TASK: targets[low:high]}, pad, row_ids=row_ids)


def read_questions(file: Path) -> list[Question]:
    """Return the questions of a file whose answers are where it says. Raises InputError."""
    questions = list[Question]()
    with parsing(file):
        for number, article in enumerate(json.loads(file.read_bytes())["data"]):
            for paragraph in article["paragraphs"]:
                context = paragraph["context"]
                for entry in paragraph["qas"]:
                    answers = tuple((answer["text"], answer["answer_start"]) for answer in entry["answers"])
                    if all(start >= 0 and context.startswith(text, start) for text, start in answers):
                        questions.append(Question(entry["question"] + "", context + "", number, answers))
    require(bool(questions), f"{file} has no questions whose answers are where it says. {repair(file)}")
    return questions
