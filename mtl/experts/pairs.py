"""List the (sample, expert) pairs that a routing asks for."""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from mtl.products import rounded, weighted_sums


class Pairs:
    """Hold the pairs of a sample and an expert for which some of ``weights [B, T, E]`` is not 0, each once.

    They are sorted by expert, then sample. ``sample [P]``, ``expert [P]``; ``counts``: how many pairs each of the E
    experts has. With ``fill`` they are filled up to ``mtl.products.rounded`` numbers, with pairs of sample 0 whose
    outputs nobody takes. The N nonzero weights are listed twice: by pair (``by_pair``), and by task and sample
    (``by_output``).
    """

    def __init__(self, weights: Tensor, fill: bool = False) -> None:
        self._nonzero = weights != 0
        used = self._nonzero.amax(1).t()  # [E, B]; what any(1) says, for many tasks in half the time
        counts = used.sum(1).tolist()
        self.counts = rounded(counts) if fill else counts
        expert, sample = used.nonzero(as_tuple=True)
        place = torch.arange(len(sample), device=weights.device)
        if self.counts != counts:
            filled = accumulate((all_ - some for all_, some in zip(self.counts, counts, strict=True)), initial=0)
            place += torch.tensor(list(filled), device=place.device)[expert]  # how many were added before
        self.sample = torch.zeros(sum(self.counts), dtype=torch.int64, device=weights.device)
        self.sample[place] = sample
        self._number = place.new_empty(used.shape)  # [E, B]: which pair it is, where it is one
        self._number[expert, sample] = place

    @cached_property
    def expert(self) -> Tensor:
        counts = torch.tensor(self.counts, device=self.sample.device)
        return torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=len(self.sample))

    @cached_property
    def by_pair(self) -> Entries:
        e, b, t = self._nonzero.permute(2, 0, 1).nonzero(as_tuple=True)
        return Entries(t * len(self._nonzero) + b, self._number[e, b], b, t, e, len(self.sample))

    @cached_property
    def by_output(self) -> Entries:
        t, b, e = self._nonzero.transpose(0, 1).nonzero(as_tuple=True)
        num_samples, num_tasks, _ = self._nonzero.shape
        return Entries(self._number[e, b], t * num_samples + b, b, t, e, num_tasks * num_samples)


class Entries:
    """Hold a listing of the nonzero weights, each going from a ``source [N]`` to a ``target [N]`` (ascending).

    A source is a pair and a target an output (a task of a sample), or the other way round; ``sample``, ``task``,
    ``expert [N]`` say which weight it is.
    """

    def __init__(
        self, source: Tensor, target: Tensor, sample: Tensor, task: Tensor, expert: Tensor, num_targets: int
    ) -> None:
        self.source, self.target, self.sample, self.task, self.expert = source, target, sample, task, expert
        self.num_targets = num_targets
        counts = torch.bincount(target, minlength=num_targets)
        self.starts = counts.cumsum(0).sub_(counts)  # where each target's begin

    def weights(self, weights: Tensor) -> Tensor:
        """Return the listed ones ``[N]`` of ``weights [B, T, E]``."""
        return weights[self.sample, self.task, self.expert]

    def sum(self, values: Tensor, weights: Tensor) -> Tensor:
        """Return for each target the weighted sum of its sources: ``values [sources, H]``, ``weights [N]``."""
        return weighted_sums(values, self.source, self.starts, weights)

    def dots(self, sources: Tensor, targets: Tensor) -> Tensor:
        """Return the product ``[N]`` of each source with its target, rows of ``[sources, H]`` and ``[targets, H]``."""
        if not len(self.source):
            return sources.new_zeros(0)
        # What the gradient of ``sum`` to its weights is, without the two gathered copies that a product would take
        gradient = torch.ops.aten._embedding_bag_per_sample_weights_backward
        result: Tensor = gradient(targets, sources, self.source, self.starts, self.target, 0)
        return result
