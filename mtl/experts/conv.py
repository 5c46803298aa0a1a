"""Convolutional experts, stacked: all experts of a layer are one parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import TypedDict

from mtl.checks import InputError, require
from mtl.experts.assignments import Assignments
from mtl.experts.base import Experts
from mtl.experts.dense import StackedDense
from mtl.nn.dropout import Masks
from mtl.nn.linear import matching
from mtl.options import Count, CountOrZero, Dropout, validated

Kernel = tuple[Tensor, Tensor]  # weight [O, I, k, k] and bias [O] of one expert


class Convolution(TypedDict):
    """The options of one convolution; by default ``pool`` is 1 and ``padding`` 0."""

    channels: Count
    kernel: Count
    pool: NotRequired[Count]
    padding: NotRequired[CountOrZero]


class StackedConv(Experts):
    """Convolutions, each with max-pooling and relu, then dense layers, for each of E experts.

    ``input_dim`` (C, H, W); ``convolutions``: see ``Convolution``; ``units`` and ``dropout`` of the dense layers after
    flattening: see ``StackedDense``. Weights ``[E, O, I, k, k]`` Glorot uniform, biases ``[E, O]`` zero.
    """

    @validated
    def __init__(
        self,
        num_experts: Count,
        input_dim: Count | Sequence[Count],
        convolutions: Sequence[Convolution],
        units: Sequence[Count] = (),
        dropout: Dropout = 0.0,
    ) -> None:
        if isinstance(input_dim, int):
            raise InputError("convolutional experts need images as input; experts=dense takes other inputs")
        require(len(convolutions) >= 1, "convolutions=[]: convolutional experts need at least one convolution")
        channels, height, width = input_dim
        super().__init__(num_experts, 0, dropout)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        self.pools: list[int] = []
        self.paddings: list[int] = []
        for index, layer in enumerate(convolutions):
            out, kernel = layer["channels"], layer["kernel"]
            pool, padding = layer.get("pool", 1), layer.get("padding", 0)
            bound = (6.0 / ((channels + out) * kernel * kernel)) ** 0.5
            weight = torch.empty(num_experts, out, channels, kernel, kernel).uniform_(-bound, bound)
            self.weights.append(nn.Parameter(weight))
            self.biases.append(nn.Parameter(torch.zeros(num_experts, out)))
            self.pools.append(pool)
            self.paddings.append(padding)
            channels = out
            height, width = ((side + 2 * padding - kernel + 1) // pool for side in (height, width))
            message = f"convolutions[{index}]: images of {tuple(input_dim)[1:]} pixels are too small for this layer"
            require(height >= 1 and width >= 1, message)
        self.dense = StackedDense(num_experts, channels * height * width, units, dropout)
        self.output_dim = self.dense.output_dim

    def outputs(self, x: Tensor, subset: Sequence[int] | None = None, masks: Masks | None = None) -> Tensor:
        """Map ``x [B, C, H, W]`` to ``[B, E, H]``."""
        return self.dense.outputs(self.features(x, subset), subset, masks)

    def sparse_mixture(self, x: Tensor, weights: Tensor, pairs: Assignments, masks: Masks | None = None) -> Tensor:
        """See ``Experts``."""
        kernels = self.kernels()
        # An expert without samples convolves 0 rows: with DDP every parameter must take part in every step
        parts = [self.convolve(x.index_select(0, rows), kernels[e]) for e, rows in enumerate(pairs.samples())]
        return self.dense.grouped_mixture(torch.cat(parts), weights, pairs, masks)

    def features(self, x: Tensor, subset: Sequence[int] | None = None) -> Tensor:
        """Return the experts' convolutions of ``x [B, C, H, W]``, flattened to ``[B, E, F]``."""
        subset, kernels = range(self.num_experts) if subset is None else subset, self.kernels()
        if not len(subset):
            return x.new_zeros(len(x), 0, self.dense.input_dim)
        # The first layers of all experts share the image patches, so they are one matrix product, [B, H', W', I k k]
        # times [I k k, E O]; convolutions with few channels would take longer
        weight, bias = (torch.stack([kernels[e][0][part] for e in subset]) for part in (0, 1))
        size, padding = weight.shape[-1], self.paddings[0]
        padded = F.pad(matching(x, weight), [padding] * 4)
        patches = padded.unfold(2, size, 1).unfold(3, size, 1)  # [B, I, H', W', k, k]
        patches = patches.permute(0, 2, 3, 1, 4, 5).flatten(3)
        x = F.linear(patches, weight.flatten(2).flatten(0, 1), bias.flatten()).movedim(-1, 1)
        parts = self.pooled(x, self.pools[0]).chunk(len(subset), 1)
        return torch.stack([self.convolve(part, kernels[e], 1) for part, e in zip(parts, subset, strict=True)], 1)

    def convolve(self, x: Tensor, kernels: Sequence[Kernel], first: int = 0) -> Tensor:
        """Map ``x [N, C, H, W]`` through one expert's convolutions, from layer ``first`` on, to ``[N, F]``."""
        x = x.contiguous(memory_format=torch.channels_last)  # convolutions and pooling are faster in this format
        for (weight, bias), pool, padding in list(zip(kernels, self.pools, self.paddings, strict=True))[first:]:
            weight = weight.contiguous(memory_format=torch.channels_last)
            x = self.pooled(F.conv2d(matching(x, weight), weight, bias, padding=padding), pool)
        return x.flatten(1)

    @staticmethod
    def pooled(x: Tensor, pool: int) -> Tensor:
        """Return relu of the maxima over ``pool`` x ``pool`` pixels, ``[N, C, H, W] -> [N, C, H / pool, W / pool]``."""
        return (F.max_pool2d(x, pool) if pool > 1 else x).relu()

    def kernels(self) -> list[list[Kernel]]:
        """Return weight and bias of each layer, for each expert.

        ``unbind`` gives a parameter one gradient; with an index per expert, autograd would add E full-size ones.
        """
        layers = zip(self.weights, self.biases, strict=True)
        unbound = [list(zip(weight.unbind(), bias.unbind(), strict=True)) for weight, bias in layers]
        return [[layer[expert] for layer in unbound] for expert in range(self.num_experts)]
