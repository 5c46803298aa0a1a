"""Remove the padding from a batch of token sequences, and restore it where a layer needs it."""

from __future__ import annotations

import torch
from torch import Tensor


class Packing:
    """The N real tokens of a padded batch, given their ``mask [B, S]``.

    ``row [N]`` and ``position [N]``: the sequence of each token and its place in it. ``first [B]``: the index of the
    first token of each sequence.
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask, self.shape = mask, mask.shape
        self.index = mask.flatten().nonzero().flatten()  # [N], into the B * S places
        self.is_full = not torch.compiler.is_exporting() and len(self.index) == mask.numel()  # a shortcut
        self.row = self.index // mask.shape[1]
        self.position = self.index - self.row * mask.shape[1]  # not %: ONNX cannot export it for a variable length
        lengths = mask.sum(1)
        self.first = lengths.cumsum(0) - lengths

    def pack(self, x: Tensor) -> Tensor:
        """Return the real tokens ``[N, ...]`` of ``x [B, S, ...]``."""
        flat = x.flatten(0, 1)
        return flat if self.is_full else flat.index_select(0, self.index)

    def pad(self, x: Tensor) -> Tensor:
        """Return ``x [N, ...]`` as ``[B, S, ...]``, with 0 in place of the padding."""
        if not self.is_full:
            x = x.new_zeros(len(self.mask.flatten()), *x.shape[1:]).index_copy(0, self.index, x)
        return x.view(*self.shape, *x.shape[1:])
