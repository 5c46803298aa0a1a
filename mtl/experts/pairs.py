"""List the (sample, expert) pairs that a routing asks for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """Hold the pairs of a sample and an expert that some task weighs, each once, sorted by expert, then sample.

    ``sample [P]``, ``expert [P]``; ``counts``: how many pairs each of the E experts has. Where an expert has many, they
    are filled up to a multiple of a block with pairs of sample 0, whose outputs nobody takes. The N nonzero weights
    appear twice: listed by pair (``by_pair``) and by task and sample (``by_output``).
    """

    sample: Tensor
    expert: Tensor
    counts: list[int]
    by_pair: Entries
    by_output: Entries

    @staticmethod
    def of(weights: Tensor, block: int = 1) -> Pairs:
        """List the nonzero entries of ``weights [B, T, E]``, of an expert with two ``block`` or more in whole ones."""
        nonzero = weights != 0
        used = nonzero.any(1).t()  # [E, B]
        counts = [-(-count // block) * block if count >= 2 * block else count for count in used.sum(1).tolist()]
        starts = [sum(counts[:e]) for e in range(len(counts) + 1)]
        number = used.cumsum(1).add_(torch.tensor(starts[:-1], device=weights.device)[:, None] - 1)  # which pair it is
        expert, inside = used.nonzero(as_tuple=True)
        sample = torch.zeros(starts[-1], dtype=torch.int64, device=weights.device)
        sample[number[expert, inside]] = inside
        e, b, t = nonzero.permute(2, 0, 1).nonzero(as_tuple=True)
        pair, output = number[e, b], t * len(weights) + b
        by_pair = Entries(output, pair, b, t, e, starts[-1])
        t, b, e = nonzero.transpose(0, 1).nonzero(as_tuple=True)
        pair, output = number[e, b], t * len(weights) + b
        by_output = Entries(pair, output, b, t, e, weights.shape[0] * weights.shape[1])
        owner = torch.arange(len(counts), device=weights.device).repeat_interleave(
            torch.tensor(counts, device=weights.device), output_size=starts[-1]
        )
        return Pairs(sample, owner, counts, by_pair, by_output)


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
        self.starts = torch.bincount(target, minlength=num_targets).cumsum(0).roll(1)  # where each target's begin
        if num_targets:
            self.starts[0] = 0

    def weights(self, weights: Tensor) -> Tensor:
        """Return the listed ones ``[N]`` of ``weights [B, T, E]``."""
        return weights[self.sample, self.task, self.expert]

    def sum(self, values: Tensor, weights: Tensor) -> Tensor:
        """Return for each target the weighted sum of its sources: ``values [sources, H]``, ``weights [N]``."""
        if not len(self.source):
            return values.new_zeros(self.num_targets, values.shape[-1])
        return torch.embedding_bag(values, self.source, self.starts, mode=0, per_sample_weights=weights)[0]
