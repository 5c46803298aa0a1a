"""List the (sample, expert) pairs that a routing uses, and mix their outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Pairs:
    """The P (sample, expert) pairs for which at least one task's weight in ``weights [B, T, E]`` is not 0.

    ``expert [P]`` and ``sample [P]`` are sorted by expert, then by sample; ``counts`` has the number of pairs of each
    of the E experts. ``number [E, B]`` is the index of a pair (0 if there is no such pair), ``nonzero [B, T, E]`` says
    which weights are not 0.
    """

    def __init__(self, weights: Tensor) -> None:
        self.nonzero = weights != 0
        used = self.nonzero.any(1).t()  # [E, B]
        self.counts: list[int] = used.sum(1).tolist()
        self.expert, self.sample = used.nonzero(as_tuple=True)
        self.number = self.sample.new_zeros(used.shape)
        self.number[used] = torch.arange(len(self.sample), device=used.device)

    def samples(self) -> Sequence[Tensor]:
        """Return for each expert the indices of its samples."""
        return torch.split(self.sample, self.counts)


def mix_pairs(outputs: Tensor, weights: Tensor, pairs: Pairs) -> Tensor:
    """Mix the ``outputs [P, ...]`` of ``pairs`` by the ``weights [B, T, E]`` that they come from into ``[B, T, ...]``.

    Weights that are 0 get no gradient.
    """
    num_samples, num_tasks, _ = weights.shape
    if num_tasks == 1:  # every pair has one nonzero weight, so the outputs need not be gathered
        sample, expert, terms = pairs.sample, pairs.expert, outputs.flatten(1)
        task = torch.zeros_like(sample)
    else:
        sample, task, expert = pairs.nonzero.nonzero(as_tuple=True)  # [N] each, for the N nonzero weights
        terms = outputs.flatten(1).index_select(0, pairs.number[expert, sample])  # [N, H]
    terms = weights[sample, task, expert].to(outputs.dtype)[:, None] * terms
    mixed = terms.new_zeros(num_samples * num_tasks, terms.shape[1]).index_add(0, sample * num_tasks + task, terms)
    return mixed.view(num_samples, num_tasks, *outputs.shape[1:])
