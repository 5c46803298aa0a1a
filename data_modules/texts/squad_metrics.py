"""Score answers as SQuAD 2.0 does (Rajpurkar et al. 2018): exact match and F1 of words, also of having no answer."""

from __future__ import annotations

import re
import statistics
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .squad_windows import Windows

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


def split_answer(answer: str) -> list[str]:
    """Return the words of an answer in lower case, without ASCII punctuation and articles."""
    return ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split()


def exact_match(answer: str, gold: str) -> float:
    """Return 1 if the two have the same words, else 0."""
    return float(split_answer(answer) == split_answer(gold))


def f1(answer: str, gold: str) -> float:
    """Return the F1 of the words of ``answer`` and ``gold``; if one has no words, 1 if both have none, else 0."""
    answer_words, gold_words = split_answer(answer), split_answer(gold)
    if not answer_words or not gold_words:
        return float(answer_words == gold_words)
    return 2 * (Counter(answer_words) & Counter(gold_words)).total() / (len(answer_words) + len(gold_words))


@dataclass(frozen=True, eq=False)
class AnswerScorer:
    """Score the answers to the questions of ``windows``: the ``Scorer`` of a task of kind ``span``.

    ``texts[question]``: the context; ``golds[question]``: the right answers, none if it has no answer.
    """

    windows: Windows
    texts: Sequence[str]
    golds: Sequence[Sequence[str]]
    max_answer: int

    @property
    def context(self) -> Tensor:
        return self.windows.context

    def answers(self, rows: Tensor, spans: Tensor, scores: Tensor, null_scores: Tensor) -> dict[int, str]:
        """Return the answer to each question that is in ``rows [N]``, "" for none; arguments as in ``score``.

        The answer is the best one in all rows of the question. It is "" if the lowest score of having no answer is at
        least the score of the best answer: the lowest, since rows without the answer rightly score high.
        """
        best: dict[int, tuple[float, int, int]] = {}
        nothing: dict[int, float] = {}
        order = rows.argsort()  # so that the first row wins a tie, independently of the processes
        questions = self.windows.question[rows]
        characters = self.windows.characters[(spans + self.windows.shift[rows][:, None]).clamp(min=0)]  # [N, 2, 2]
        ends = characters[:, 0, 0], characters[:, 1, 1]
        columns = (questions, scores, null_scores, *ends)
        for question, score, null, start, end in zip(*(column[order].tolist() for column in columns), strict=True):
            nothing[question] = min(nothing.get(question, null), null)
            if question not in best or score > best[question][0]:
                best[question] = score, start, end
        return {
            question: self.texts[question][start:end] if score > nothing[question] else ""
            for question, (score, start, end) in best.items()
        }

    def score(self, rows: Tensor, spans: Tensor, scores: Tensor, null_scores: Tensor) -> dict[str, float]:
        """Return the means of F1 and exact match over the questions that are in ``rows``: see ``mtl.types.Scorer``."""
        pairs = []
        for question, answer in self.answers(rows, spans, scores, null_scores).items():
            pairs.append((answer, [gold for gold in self.golds[question] if split_answer(gold)] or [""]))
        measures = {"f1": f1, "exact_match": exact_match}
        return {
            name: statistics.fmean(max(measure(answer, gold) for gold in golds) for answer, golds in pairs)
            for name, measure in measures.items()
        }
