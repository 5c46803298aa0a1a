"""Define the contract of experts: one class that computes all experts of a layer."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtl.experts.assignments import Assignments, mix_assigned
from mtl.nn.dropout import Masks
from mtl.options import Count, Dropout, validated


class Experts(nn.Module, ABC):
    """E experts of one layer. A subclass implements ``outputs``; mixing, dense and sparse, follows from it.

    ``output_dim`` H: the number of outputs of an expert. ``dropout``: the probability of dropping a unit; ``outputs``
    applies the ``masks`` that it is given (see ``mtl.nn.dropout.Masks``), and no dropout if it is given None. The first
    dimension of every parameter and buffer must be E, since pruning selects experts along it. ``own_norm``: the outputs
    are normalized, with the input already added, as at the end of a Transformer's layer.
    """

    input_dim: Any = None  # for ``print``, if the subclass sets it
    own_norm = False

    @validated
    def __init__(self, num_experts: Count, output_dim: int, dropout: Dropout = 0.0) -> None:
        super().__init__()
        self.num_experts, self.output_dim, self.dropout = num_experts, output_dim, dropout

    def extra_repr(self) -> str:
        """Return the sizes of the experts, as ``print(experts)`` shows them."""
        dropout = f", dropout={self.dropout}" if self.dropout else ""
        return f"experts={self.num_experts}, inputs={self.input_dim}, outputs={self.output_dim}{dropout}"

    @abstractmethod
    def outputs(self, x: Tensor, subset: Sequence[int] | None = None, masks: Masks | None = None) -> Tensor:
        """Map ``x [B, ...]`` to the outputs ``[B, E, ...]`` of all experts, or of those in ``subset``, in that order.

        An expert without dropout may leave ``masks`` out of its signature.
        """

    def forward(self, x: Tensor, subset: Sequence[int] | None = None) -> Tensor:
        """Return ``outputs``, with dropout in training."""
        return self._outputs(x, subset, self.masks())

    def masks(self) -> Masks | None:
        """Return the dropout masks of one forward pass, None if nothing is dropped."""
        return Masks(self.dropout, self.num_experts) if self.training and self.dropout > 0 else None

    def mixture(
        self, x: Tensor, weights: Tensor, subset: Sequence[int] | None = None, masks: Masks | None = None
    ) -> Tensor:
        """Return the mixtures ``[B, T, ...]`` of the outputs on ``x``.

        ``weights``: ``[B, T, E]``, or ``[T, E]`` for all samples. With a ``subset``, E is its length.
        """
        return mix(self._outputs(x, subset, masks), weights)

    def sparse_mixture(self, x: Tensor, weights: Tensor, pairs: Assignments, masks: Masks | None = None) -> Tensor:
        """Return ``mixture`` by ``weights [B, T, E]``, computing only the (sample, expert) ``pairs`` in use."""
        parts = []
        for expert, rows in enumerate(pairs.samples()):  # an expert without samples runs on 0 rows, for a gradient of 0
            expert_masks = None if masks is None else masks.of_rows(rows)
            parts.append(self._outputs(x.index_select(0, rows), [expert], expert_masks).squeeze(1))
        return mix_assigned(torch.cat(parts), weights, pairs)

    @torch.no_grad()
    def subset(self, used: Sequence[int]) -> Self:
        """Return a copy with only the experts ``used``."""
        part = copy.deepcopy(self)
        for module in part.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter[list(used)].clone(), parameter.requires_grad))
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer[list(used)].clone())
            if isinstance(module, Experts):
                module.num_experts = len(used)
        return part

    def _outputs(self, x: Tensor, subset: Sequence[int] | None, masks: Masks | None) -> Tensor:
        return self.outputs(x, subset) if masks is None else self.outputs(x, subset, masks)


def mix(outputs: Tensor, weights: Tensor) -> Tensor:
    """Mix the experts' ``outputs [B, E, ...]`` by ``weights [B, T, E]`` or ``[T, E]`` into ``[B, T, ...]``."""
    flat = outputs.flatten(2) if outputs.dim() > 2 else outputs[..., None]
    if weights.dim() == 2 and flat.shape[-1] == 1:  # one product instead of one for each sample
        mixed = F.linear(flat[..., 0], weights.to(outputs.dtype))
        return mixed.view(len(outputs), len(weights), *outputs.shape[2:])
    mixed = torch.matmul(weights.to(outputs.dtype), flat)
    return mixed.reshape(*mixed.shape[:2], *outputs.shape[2:])
