"""Dropout whose masks are a function of a key, the sample and the expert.

An expert that is computed for some of the samples drops the same units as if it were computed for all of them. This
is what makes sparse execution equal to dense execution in training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Masks:
    """Draw the dropout masks of one forward pass through ``num_experts`` experts.

    ``p``: probability to drop a unit, the same in every layer. ``samples [B]``: the index of each row in the batch, if
    the rows are a part of the batch (None: all rows of the batch, in order). ``first``: the number, in the whole
    layer, of the first of these experts.
    """

    def __init__(
        self,
        p: float,
        num_experts: int,
        samples: Tensor | None = None,
        keys: dict[int, Tensor] | None = None,
        first: int = 0,
    ) -> None:
        self.p, self.num_experts, self.samples, self.first = p, num_experts, samples, first
        self._keys: dict[int, Tensor] = {} if keys is None else keys

    def __call__(self, h: Tensor, layer: int = 0, subset: Sequence[int] | None = None) -> Tensor:
        """Return ``h [B, E, H]`` after the dropout of ``layer``; E counts the experts of ``subset``, if given."""
        experts = torch.arange(h.shape[1], device=h.device)
        if subset is not None:
            experts = torch.tensor(list(subset), dtype=torch.int64, device=h.device)
        rows = self._rows(torch.arange(len(h), device=h.device)[:, None], experts).flatten()  # [B E]
        return h * dropout_mask(self._key(layer), rows, h.shape[-1], self.p, h.dtype).view_as(h)

    def of_pairs(self, h: Tensor, layer: int, sample: Tensor, expert: Tensor) -> Tensor:
        """Return ``h [P, H]`` after the dropout of ``layer``; row p is of ``sample[p]`` and ``expert[p]``."""
        return h * dropout_mask(self._key(layer), self._rows(sample, expert), h.shape[-1], self.p, h.dtype)

    def of_rows(self, samples: Tensor) -> Masks:
        """Return the same masks for the rows with the indices ``samples [N]`` alone."""
        of_batch = samples if self.samples is None else self.samples[samples]
        return Masks(self.p, self.num_experts, of_batch, self._keys, self.first)

    def from_expert(self, first: int) -> Masks:
        """Return the same masks for experts that are counted from number ``first`` on."""
        return Masks(self.p, self.num_experts, self.samples, self._keys, self.first + first)

    def _rows(self, sample: Tensor, expert: Tensor) -> Tensor:
        """Return the ids of pairs of a row and an expert."""
        return (sample if self.samples is None else self.samples[sample]) * self.num_experts + expert + self.first

    def _key(self, layer: int) -> Tensor:
        """Return the key of ``layer``, 62 random bits ``[]``, drawn when it is first asked for.

        It is drawn on the CPU: the same seed gives the same masks on any device. It stays a tensor, since compiled code
        cannot read the number that it drew.
        """
        if layer not in self._keys:
            self._keys[layer] = torch.randint(2**62, (), device="cpu")
        return self._keys[layer]


def dropout_mask(key: Tensor | int, rows: Tensor, width: int, p: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a dropout mask ``[N, width]``: 1 / (probability to keep an element) where an element is kept, else 0.

    Row n of the mask is a function of ``key`` and the id ``rows[n]`` (int64) alone. A 64-bit hash (splitmix64: Steele
    et al. 2014) gives the noise: one bit per element if ``p`` is 1/2, else one byte, or two bytes if ``p`` is not a
    multiple of 1/256; p is exact to 2^-16. Drawing a float per element would take as long as the matrix products.
    """
    levels = 256 if (p * 256).is_integer() else 65536  # the number of noise values of an element
    threshold = round(p * levels)  # the number of noise values that drop the element
    scale = levels / (levels - threshold) if threshold < levels else 0.0
    one_bit = 2 * threshold == levels
    num_words = -(-width // (64 if one_bit else 8 if levels == 256 else 4))  # 64-bit words a row
    z = (rows[:, None] * num_words + torch.arange(num_words, device=rows.device)).mul_(_GOLDEN).add_(key)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, None)):
        # int64 shifts copy the sign bit into the upper bits: mask them off
        z.bitwise_xor_((z >> shift).bitwise_and_((1 << (64 - shift)) - 1))
        if factor is not None:
            z.mul_(factor)
    if one_bit:  # a table of the eight bits of each byte value
        numbers = torch.arange(256, device=rows.device)
        bits = (numbers[:, None] >> numbers[:8] & 1).to(dtype) * scale  # [256, 8]
        return bits.index_select(0, z.view(torch.uint8).flatten().int()).view(len(z), 64 * num_words)[:, :width]
    # noise >= threshold, as an addition and a shift: a CPU does these for many elements at once
    if levels == 256:
        noise = z.view(torch.uint8).to(torch.int16).add_(levels - threshold) >> 8
    else:
        noise = (z.view(torch.int16).to(torch.int32).bitwise_and_(levels - 1)).add_(levels - threshold) >> 16
    return noise[:, :width].to(dtype) * scale


def _signed(value: int) -> int:
    """Return the int64 with the same 64 bits as the unsigned ``value``."""
    return value - 2**64 if value >= 2**63 else value


_GOLDEN, _MIX_1, _MIX_2 = (_signed(v) for v in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
