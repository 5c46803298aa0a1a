"""Read SQuAD 2.0 (Rajpurkar et al. 2018) in its official format; fetch it if it is missing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mtl.checks import require

from .download import fetch
from .reading import parsing, repair

SITE = "https://rajpurkar.github.io/SQuAD-explorer/dataset"


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
