"""List the (sample, expert) pairs that a routing uses, and mix their outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Assignments:
    """The P (sample, expert) pairs for which at least one task's weight in ``weights [B, T, E]`` is not 0.

    ``expert [P]`` and ``sample [P]`` are sorted by expert, then by sample; ``counts`` has the number of pairs of each
    of the E experts. ``number [E, B]`` is the index of each pair, undefined where there is none. ``nonzero [B, T, E]``
    says which weights are not 0, and ``terms`` how many.
    """

    def __init__(self, weights: Tensor) -> None:
        self.nonzero = weights != 0
        used = self.nonzero.any(1).t()  # [E, B]
        # The only time that the CPU waits for the device: with these sizes, all else is queued
        sizes: list[int] = torch.cat([used.sum(1), self.nonzero.sum()[None]]).tolist()
        *self.counts, self.terms = sizes
        self.expert, self.sample = indices(used, sum(self.counts))
        self.number = used.flatten().cumsum(0).view(used.shape) - 1

    def samples(self) -> Sequence[Tensor]:
        """Return for each expert the indices of its samples."""
        return torch.split(self.sample, self.counts)


def indices(mask: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return the indices ``[count]`` in each dimension of the ``count`` true elements of ``mask``."""
    if mask.device.type == "mps":  # without a kernel for it
        return mask.nonzero(as_tuple=True)
    return mask.nonzero_static(size=count).unbind(1)


def mix_assigned(outputs: Tensor, weights: Tensor, pairs: Assignments) -> Tensor:
    """Mix the ``outputs [P, ...]`` of ``pairs`` by the ``weights [B, T, E]`` that they come from into ``[B, T, ...]``.

    Weights that are 0 get no gradient.
    """
    num_samples, num_tasks, _ = weights.shape
    if num_tasks == 1:  # every pair has one nonzero weight, so the outputs need not be gathered
        sample, expert, terms = pairs.sample, pairs.expert, outputs.flatten(1)
        task = torch.zeros_like(sample)
    else:
        sample, task, expert = indices(pairs.nonzero, pairs.terms)  # [N] each, for the N nonzero weights
        terms = outputs.flatten(1).index_select(0, pairs.number[expert, sample])  # [N, H]
    terms = weights[sample, task, expert].to(outputs.dtype)[:, None] * terms
    mixed = terms.new_zeros(num_samples * num_tasks, terms.shape[1]).index_add(0, sample * num_tasks + task, terms)
    return mixed.view(num_samples, num_tasks, *outputs.shape[1:])
