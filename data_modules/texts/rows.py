"""Rows of texts: as text with labels, and as tokens in rows of different lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mtl.checks import require
from mtl.types import Batch

from ..files.identity import digest


@dataclass(frozen=True)
class Texts:
    """Rows of one text each, or of two if ``second`` is given, and their ``labels [N]``.

    ``groups [N]``, from 0: rows that belong together, such as the choices of a question. ``marks [N, 2, 2]``: the first
    character of the marked word in each of the two texts, and the one after its last.
    """

    first: list[str]
    second: list[str] | None
    labels: Tensor
    groups: Tensor | None = None
    marks: Tensor | None = None

    @staticmethod
    def of(
        columns: Sequence[list[str]], labels: Tensor, groups: Tensor | None = None, marks: Tensor | None = None
    ) -> Texts:
        """Return the rows of one or two ``columns``."""
        return Texts(columns[0], columns[1] if len(columns) > 1 else None, labels, groups, marks)

    @staticmethod
    def marked(columns: Sequence[list[str]], labels: Tensor, where: str) -> Texts:
        """Return the rows of two ``columns`` whose texts each have one word in double brackets, as in "[[word]]"."""
        clean: list[list[str]] = [[] for _ in columns]
        marks = []
        for row, texts in enumerate(zip(*columns, strict=True), 1):
            for text, column in zip(texts, clean, strict=True):
                before, _, rest = text.partition("[[")
                word, _, after = rest.partition("]]")
                is_marked = word and f"{before}[[{word}]]{after}" == text and "[[" not in word + after
                require(bool(is_marked), f"{where}, row {row}: each text must mark one word, as in 'to [[run]] home'")
                column.append(before + word + after)
                marks.append((len(before), len(before) + len(word)))
        return Texts.of(clean, labels, marks=torch.tensor(marks).view(-1, 2, 2))

    def __len__(self) -> int:
        return len(self.first)

    def select(self, index: Tensor) -> Texts:
        """Return the rows of ``index [N]``."""
        chosen = index.tolist()
        second = None if self.second is None else [self.second[row] for row in chosen]
        groups, marks = (None if value is None else value[index] for value in (self.groups, self.marks))
        return Texts([self.first[row] for row in chosen], second, self.labels[index], groups, marks)

    def digest(self) -> str:
        """Return a digest of the texts and their marks; labels and groups do not count."""
        return digest([self.first, self.second, None if self.marks is None else self.marks.tolist()])


@dataclass(frozen=True)
class RaggedRows:
    """Rows of tokens of different lengths, used in place of the ``Batch`` of a task.

    ``tokens``: the ids of all rows one after the other, int32. Row r has ``tokens[offsets[r] : offsets[r + 1]]``, of
    which the first ``boundary[r]`` are segment 0; ``offsets [N + 1]`` int64, ``boundary [N]`` int32.
    ``inputs [N, ...]``: more inputs by name, with one value per row. ``groups [N]``, ``row_ids [N]``: see ``Batch``;
    ``row_ids`` if the rows have other numbers than their places.
    """

    tokens: Tensor
    offsets: Tensor
    boundary: Tensor
    targets: dict[str, Tensor]
    pad: int
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    groups: Tensor | None = None
    row_ids: Tensor | None = None

    def __len__(self) -> int:
        return len(self.boundary)

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each row, ``[N]``."""
        return self.offsets.diff()

    def select(self, index: Tensor) -> Batch:
        """Return the rows of ``index [N]`` with ``tokens`` and ``segments [N, S]``, S the length of the longest row.

        Shorter rows end with ``pad``, in segment 0. Without rows, S is 1.
        """
        starts = self.offsets[index]
        lengths = self.offsets[index + 1] - starts
        position = torch.arange(int(lengths.max()) if len(index) else 1)
        real = position < lengths[:, None]  # [N, S]
        flat = (starts[:, None] + position).clamp(max=len(self.tokens) - 1)
        tokens = self.tokens[flat].long().masked_fill(~real, self.pad)
        segments = (real & (position >= self.boundary[index][:, None])).long()
        targets = {name: value.index_select(0, index) for name, value in self.targets.items()}
        more = {name: value.index_select(0, index) for name, value in self.inputs.items()}
        groups, row_ids = (None if value is None else value[index] for value in (self.groups, self.row_ids))
        return Batch({"tokens": tokens, "segments": segments, **more}, targets, groups=groups, row_ids=row_ids)
