"""Read SQuAD 2.0 (Rajpurkar et al. 2018) in its official format; fetch it if it is missing."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from mtl.checks import require

from .download import fetch
from .reading import parsing, quote, repair

logger = logging.getLogger(__name__)

SITE = "https://rajpurkar.github.io/SQuAD-explorer/dataset"
MISPLACED = 0.01  # the largest share of questions that may be left out because an answer's position is wrong


@dataclass(frozen=True)
class Source:
    """An official file: its name, its sha256, and its number of questions."""

    name: str
    sha256: str
    questions: int


SOURCES = {
    "train": Source("train-v2.0.json", "68dcfbb971bd3e96d5b46c7177b16c1a4e7d4bdef19fb204502738552dede002", 130_319),
    "dev": Source("dev-v2.0.json", "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8", 11_873),
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
        """The first and last position of the first answer in ``context``; None if there is no answer."""
        return next(((start, start + len(text)) for text, start in self.answers), None)


def prepare(root: Path, download: bool, base_url: str | None = None) -> None:
    """Put the files into ``root``; do nothing if they are there. Raises InputError."""
    for source in SOURCES.values():
        if not (root / source.name).exists():
            fetch(f"{base_url or SITE}/{source.name}", root / source.name, source.sha256, download)


def read(file: Path) -> list[Question]:
    """Return the questions of a file. Raises InputError.

    A few questions with a wrong position of an answer are left out.
    """
    questions, misplaced = list[Question](), list[str]()
    with parsing(file):
        for number, article in enumerate(json.loads(file.read_bytes())["data"]):
            for paragraph in article["paragraphs"]:
                context = paragraph["context"]
                for entry in paragraph["qas"]:
                    answers = tuple((answer["text"], answer["answer_start"]) for answer in entry["answers"])
                    if all(start >= 0 and context.startswith(text, start) for text, start in answers):
                        questions.append(Question(entry["question"] + "", context + "", number, answers))
                    else:
                        misplaced.append(f"{entry['id']}")
    total = len(questions) + len(misplaced)
    what = f"{file}: {len(misplaced)} of {total} questions have an answer that is not at its answer_start"
    require(len(misplaced) <= MISPLACED * total > 0, f"{what}. {repair(file)}")
    if misplaced:
        logger.warning("%s, such as %s; they are left out", what, quote(misplaced[0]))
    return questions
