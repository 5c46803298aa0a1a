"""Pool the embeddings of the elements of a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from mtl.nn.dropout import dropout_mask
from mtl.options import Dropout

Pooling = Literal["mean", "sum", "sqrtn"]
UNKNOWN = 1  # with sums, ids up to this one: padding, and elements that the training rows do not have


class BagLayer(nn.Module):
    """Pool the rows of a table that the n elements of a list choose: their mean, or a layer with a ReLU,

        relu(s sum_i w_i + b),    s = 1, or 1 / sqrt(n) with "sqrtn"

    The sum is a dense layer on a vector of zeros and ones, as fingerprints of molecules and bags of words are.
    Elements that the training rows do not have are a row of the mean, but no part of a sum. ``dropout``: the share of
    the elements that a training step leaves out; those that stay count 1 / (1 - dropout) in a sum.
    """

    def __init__(self, dim: int, pooling: Pooling, dropout: Dropout) -> None:
        super().__init__()
        self.pooling, self.dropout = pooling, dropout
        self.bias = None if pooling == "mean" else nn.Parameter(torch.zeros(dim))

    def forward(self, ids: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Map ``ids [B, length]``, 0 for padding, to ``[B, dim]``; ``embed`` pools the rows of the table."""
        if self.bias is not None:
            ids = ids.masked_fill(ids <= UNKNOWN, 0)
        count = (ids != 0).sum(1, keepdim=True).clamp(min=1)  # also of those that dropout leaves out
        if self.training and self.dropout:
            key, rows = torch.randint(2**62, (), device="cpu"), torch.arange(len(ids), device=ids.device)
            ids = ids.masked_fill(dropout_mask(key, rows, ids.shape[1], self.dropout) == 0, 0)
        x = embed(ids)
        if self.bias is None:
            return x
        x = x * count.rsqrt().to(x.dtype) if self.pooling == "sqrtn" else x
        return torch.relu((x / (1 - self.dropout) if self.training else x) + self.bias)
