"""Cut questions and the texts that may answer them into rows of tokens; a long text gives several rows."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mtl.checks import InputError
from mtl.types import MISSING_CLASS

from .encoder import ROWS_PER_CHUNK, Encoder

CACHE_VERSION = 1  # of the tensors; increase it when the content changes


@dataclass(frozen=True)
class Windows:
    """R rows ``[CLS] question [SEP] part of its context [SEP]``; the rows of a question are consecutive.

    ``tokens``, ``offsets [R + 1]``, ``boundary [R]``: as in ``RaggedRows``. ``question [R]``: the index of the question
    of each row; ``context [R, 2]``: the first and the last token of the context in the row. Token j of row r is token
    ``shift[r] + j`` of the M tokens of all contexts; it begins and ends at ``characters[shift[r] + j]`` of its context,
    ``[M, 2]``. ``sizes [C]``: the number of tokens of each context; ``asked [Q]``: the context of each question.
    """

    tokens: Tensor
    offsets: Tensor
    boundary: Tensor
    question: Tensor
    context: Tensor
    shift: Tensor
    characters: Tensor
    sizes: Tensor
    asked: Tensor

    def targets(self, answers: Sequence[tuple[int, int] | None]) -> Tensor:
        """Return the target ``[R, 2]`` of each row: see ``mtl.types.Batch``.

        ``answers``: where the answer to each question begins and ends in its context. A row that does not hold all of
        an answer has no answer. One without a token, such as a lone space, is a missing label.
        """
        answer_characters = torch.tensor([answer or (0, 0) for answer in answers], dtype=torch.int64)  # [Q, 2]
        # Shift the characters of each context past those of the previous one, so that one search finds all tokens
        length = int(max(answer_characters.max(), self.characters.max() if len(self.characters) else 0)) + 1
        owner = torch.repeat_interleave(self.sizes)  # [M]
        begins, ends = (self.characters + length * owner[:, None]).t().contiguous()
        start, end = (answer_characters + length * self.asked[:, None]).t().contiguous()
        first = torch.searchsorted(ends, start, right=True)  # the first token that ends after the answer's start
        last = torch.searchsorted(begins, end) - 1  # the last one that begins before its end
        answerable = torch.tensor([answer is not None for answer in answers])
        missing = (answerable & (first > last))[self.question]
        spans = torch.stack([first, last], 1)[self.question] - self.shift[:, None]  # [R, 2]
        whole = (spans[:, 0] >= self.context[:, 0]) & (spans[:, 1] <= self.context[:, 1]) & answerable[self.question]
        return torch.where(missing[:, None], MISSING_CLASS, torch.where(whole[:, None], spans, 0))


def cut_windows(
    encoder: Encoder,
    questions: Sequence[str],
    contexts: Sequence[str],
    asked: Sequence[int],
    max_length: int,
    stride: int,
    max_question: int,
) -> dict[str, Tensor]:
    """Return the fields of ``Windows``; ``asked``: the index of the context of each question.

    Rows have at most ``max_length`` tokens. A context that is too long for one row gives rows that begin ``stride``
    tokens apart. Of a question, the first ``max_question`` tokens count.
    """
    before, between, after = special_tokens(encoder)
    ids: list[array[int]] = []
    characters = array("i")
    for encoding in encode_texts(encoder, contexts):
        ids.append(array("i", encoding.ids))
        characters.extend(chain.from_iterable(encoding.offsets))
    sizes = torch.tensor([len(row) for row in ids])
    begin = (sizes.cumsum(0) - sizes).tolist()
    tokens, lengths, boundary, question, context, shift = (array("i") for _ in range(6))
    for index, (encoding, place) in enumerate(zip(encode_texts(encoder, questions), asked, strict=True)):
        start = before + array("i", encoding.ids[:max_question]) + between
        room = max_length - len(start) - len(after)
        for low in range(0, max(1, len(ids[place]) - room + stride), stride):
            part = ids[place][low : low + room]
            tokens.extend(start + part + after)
            lengths.append(len(start) + len(part) + len(after))
            boundary.append(len(start))
            question.append(index)
            context.extend((len(start), len(start) + len(part) - 1))
            shift.append(begin[place] + low - len(start))
    return {
        "tokens": to_tensor(tokens),
        "offsets": torch.cat([torch.zeros(1, dtype=torch.int64), to_tensor(lengths).cumsum(0)]),
        "boundary": to_tensor(boundary),
        "question": to_tensor(question).long(),
        "context": to_tensor(context).view(-1, 2).long(),
        "shift": to_tensor(shift).long(),
        "characters": to_tensor(characters).view(-1, 2).long(),
        "sizes": sizes,
        "asked": torch.tensor(asked),
    }


def special_tokens(encoder: Encoder) -> tuple[array[int], array[int], array[int]]:
    """Return the special tokens before, between and after two texts."""
    pair = encoder.tokenizer.encode("a", "b")
    first, second = ([place for place, text in enumerate(pair.sequence_ids) if text == which] for which in (0, 1))
    parts = pair.ids[: first[0]], pair.ids[first[-1] + 1 : second[0]], pair.ids[second[-1] + 1 :]
    before, between, after = (array("i", part) for part in parts)
    return before, between, after


def encode_texts(encoder: Encoder, texts: Sequence[str]) -> Iterator[Any]:
    """Yield each text as tokens without special ones, and with the places of their characters."""
    for start in range(0, len(texts), ROWS_PER_CHUNK):
        try:
            chunk = list(texts[start : start + ROWS_PER_CHUNK])
            yield from encoder.tokenizer.encode_batch(chunk, add_special_tokens=False)
        except Exception as error:  # the tokenizer's errors have no common base class
            raise InputError(f"data.tokenizer={encoder.source} fails on these texts: {error}") from error


def to_tensor(values: array[int]) -> Tensor:
    """Return a copy of ``values`` as int32."""
    return torch.frombuffer(values, dtype=torch.int32).clone() if values else torch.zeros(0, dtype=torch.int32)
