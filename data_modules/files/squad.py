"""Read SQuAD 2.0 (Rajpurkar et al. 2018) in its official format; fetch it if it is missing."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtl.checks import InputError, require

from .cache import locked
from .download import fetch
from .reading import quote, read_bytes

logger = logging.getLogger(__name__)

SITE = "https://rajpurkar.github.io/SQuAD-explorer/dataset"
FETCH_AGAIN = "delete the file to have it fetched again"
NAMES = {str: "a text", int: "a whole number", list: "a list"}
MISPLACED = 0.01  # the largest share of questions that are left out because an answer is not at its place


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
        """Where the first of the answers begins and ends in ``context``; None if there is none."""
        return next(((start, start + len(text)) for text, start in self.answers), None)


def prepare(root: Path, download: bool, base_url: str | None = None) -> None:
    """Put the files into ``root``; do nothing if they are there. Raises InputError."""
    if all((root / source.name).exists() for source in SOURCES.values()):
        return
    with locked(root / ".fetch.lock", f"fetching SQuAD into {root}"):
        for source in SOURCES.values():
            file = root / source.name
            by_hand = f"put the official {source.name} into {root}"
            if not file.exists():
                require(download, f"{file} is missing and data.download=false: set it to true, or {by_hand}")
                fetch(f"{base_url or SITE}/{source.name}", file, sha256=source.sha256, by_hand=by_hand)


def read(file: Path) -> list[Question]:
    """Return the questions of a file. Raises InputError, which names the first bad article or question.

    Questions with an answer that is not at its place are left out if they are few.
    """
    try:
        content = json.loads(read_bytes(file))
    except (ValueError, RecursionError) as error:  # also of bytes that are not UTF-8
        raise InputError(f"{file} is not a JSON file ({error}): {FETCH_AGAIN}") from None
    questions: list[Question] = []
    misplaced: list[str] = []
    for number, article in enumerate(_list(content, "data", str(file))):
        for paragraph in _list(article, "paragraphs", f"{file}, article {number + 1}"):
            context = _get(paragraph, "context", str, f"{file}, article {number + 1}, a paragraph")
            for entry in _list(paragraph, "qas", f"{file}, article {number + 1}, a paragraph"):
                identity = _get(entry, "id", str, f"{file}, article {number + 1}, a question")
                here = f"{file}, question {quote(identity)}"
                text = _get(entry, "question", str, here)
                answers = [
                    (_get(answer, "text", str, f"{here}, an answer"), _get(answer, "answer_start", int, here))
                    for answer in _list(entry, "answers", here)
                ]
                if all(start >= 0 and context.startswith(answer, start) for answer, start in answers):
                    questions.append(Question(text, context, number, tuple(answers)))
                else:
                    misplaced.append(here)
    total = len(questions) + len(misplaced)
    require(total > 0, f"{file} has no questions: {FETCH_AGAIN}")
    if misplaced:
        what = f"{misplaced[0]}: an answer is not at its answer_start in the context"
        require(len(misplaced) <= MISPLACED * total, f"{what}; so it is in {len(misplaced)} of {total} questions")
        logger.warning("%s; %d of %d questions are left out for that", what, len(misplaced), total)
    return questions


def _get(entry: Any, key: str, kind: type, where: str) -> Any:
    """Return ``entry[key]``; raise InputError unless ``entry`` is a mapping that has it as a ``kind``."""
    if not isinstance(entry, dict):
        raise InputError(f"{where} is {quote(str(entry))}: must be a mapping with {key!r}; {FETCH_AGAIN}")
    require(key in entry, f"{where} has no {key!r}; {FETCH_AGAIN}")
    value = entry[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InputError(f"{where}: {key!r} is {quote(str(value))}: must be {NAMES[kind]}; {FETCH_AGAIN}")
    return value


def _list(entry: Any, key: str, where: str) -> list[Any]:
    found: list[Any] = _get(entry, key, list, where)
    return found
