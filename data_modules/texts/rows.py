"""Rows of texts: as text with labels, and as tokens in rows of different lengths."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mtl.types import Batch


@dataclass(frozen=True)
class Texts:
    """Rows of one text each, or of two if ``second`` is given, and their ``labels [N]``."""

    first: list[str]
    second: list[str] | None
    labels: Tensor

    @staticmethod
    def of(columns: Sequence[list[str]], labels: Tensor) -> Texts:
        """Return the rows of one or two ``columns``."""
        return Texts(columns[0], columns[1] if len(columns) > 1 else None, labels)

    def __len__(self) -> int:
        return len(self.first)

    def select(self, index: Tensor) -> Texts:
        """Return the rows of ``index [N]``."""
        chosen = index.tolist()
        second = None if self.second is None else [self.second[row] for row in chosen]
        return Texts([self.first[row] for row in chosen], second, self.labels[index])

    def digest(self) -> str:
        """Return a digest of the texts; the labels do not count."""
        found = hashlib.sha256()
        for column in (self.first, self.second or []):
            # With their lengths, so that texts with other boundaries have another digest
            found.update("".join(f"{len(text)}:{text}" for text in column).encode("utf-8", "surrogatepass"))
            found.update(b"|")
        return found.hexdigest()


@dataclass(frozen=True)
class RaggedRows:
    """Rows of tokens of different lengths, used in place of the ``Batch`` of a task.

    ``tokens``: the ids of all rows one after the other, int32. Row r has ``tokens[offsets[r] : offsets[r + 1]]``, of
    which the first ``boundary[r]`` are segment 0; ``offsets [N + 1]`` int64, ``boundary [N]`` int32.
    ``inputs [N]``: more inputs by name, with one value per row.
    """

    tokens: Tensor
    offsets: Tensor
    boundary: Tensor
    targets: dict[str, Tensor]
    pad: int
    inputs: Mapping[str, Tensor] = field(default_factory=dict)

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
        return Batch({"tokens": tokens, "segments": segments, **more}, targets)
