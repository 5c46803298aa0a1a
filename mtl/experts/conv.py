"""Convolutional experts, stacked: all experts of a layer are one parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtl.experts.conv_kernels import channels_last, shared_conv_pool_relu
from mtl.experts.dense import StackedDense
from mtl.experts.pairs import Pairs
from mtl.functional import Key
from mtl.types import require


class StackedConv(nn.Module):
    """Convolutions, each with max-pooling and relu, then dense layers, for each of E experts.

    ``input_dim`` (C, H, W); ``convolutions``: a list of ``{channels, kernel, pool, padding}`` (pool 1 and padding 0 by
    default); ``units`` and ``dropout`` of the dense layers after flattening: see ``StackedDense``, whose three ways to
    compute this class has too. Weights ``[E, O, I, k, k]`` Glorot uniform, biases ``[E, O]`` zero.

    On a CPU the first layer, whose input all experts share, is one product of patches for all experts; later layers
    are convolved expert by expert, with the channels last in memory. benchmarks/conv.py compares other ways.
    """

    def __init__(
        self,
        num_experts: int,
        input_dim: Sequence[int],
        convolutions: Sequence[Mapping[str, int]],
        units: Sequence[int] = (),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        images = isinstance(input_dim, Sequence)  # (C, H, W)
        require(images, "convolutional experts need images as input; experts=dense takes other inputs")
        require(len(convolutions) >= 1, "setting.convolutions=[]: convolutional experts need at least one convolution")
        channels, height, width = input_dim
        self.num_experts = num_experts
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        self.pools: list[int] = []
        self.paddings: list[int] = []
        for place, layer in enumerate(convolutions):
            unknown = set(layer) - {"channels", "kernel", "pool", "padding"}
            require(not unknown, f"setting.convolutions[{place}]: no such option: {', '.join(sorted(unknown))}")
            out, kernel, pool, padding = (
                layer["channels"],
                layer["kernel"],
                layer.get("pool", 1),
                layer.get("padding", 0),
            )
            bound = (6.0 / ((channels + out) * kernel * kernel)) ** 0.5
            weight = torch.empty(num_experts, out, channels, kernel, kernel).uniform_(-bound, bound)
            self.weights.append(nn.Parameter(weight))
            self.biases.append(nn.Parameter(torch.zeros(num_experts, out)))
            self.pools.append(pool)
            self.paddings.append(padding)
            channels = out
            height, width = ((side + 2 * padding - kernel + 1) // pool for side in (height, width))
            require(
                height >= 1 and width >= 1,
                f"setting.convolutions[{place}]: nothing is left of images of {tuple(input_dim)[1:]} pixels",
            )
        self.dense = StackedDense(num_experts, channels * height * width, units, dropout)
        self.output_dim = self.dense.output_dim

    def draw_keys(self) -> list[Key]:
        """Draw the keys of a step's dropout masks: see ``StackedDense``."""
        return self.dense.draw_keys()

    def forward(self, x: Tensor, subset: Sequence[int] | None = None, keys: Sequence[Key] | None = None) -> Tensor:
        """Map ``[B, C, H, W]`` to ``[B, E, H]``; E counts ``subset`` if given."""
        outputs: Tensor = self.dense(self._features(x, subset), subset, keys)
        return outputs

    def mixture(
        self, x: Tensor, weights: Tensor, subset: Sequence[int] | None = None, keys: Sequence[Key] | None = None
    ) -> Tensor:
        """Return the mixtures ``[B, T, H]`` of the experts' outputs on ``x [B, C, H, W]``."""
        return self.dense.mixture(self._features(x, subset), weights, subset, keys)

    def pairs_mixture(self, x: Tensor, weights: Tensor, pairs: Pairs, keys: Sequence[Key] | None = None) -> Tensor:
        """Return ``mixture`` by ``weights [B, T, E]`` from the outputs on their ``pairs`` alone."""
        samples = torch.split(pairs.sample, pairs.counts)
        x, kernels = x.permute(0, 2, 3, 1).contiguous(), self._kernels()  # channels last, also after indexing
        # experts without samples are convolved too, on none: under DDP every parameter takes part
        images = [x.index_select(0, rows).permute(0, 3, 1, 2) for rows in samples]
        parts = [self._convolve(some, kernels[expert], 0) for expert, some in enumerate(images)]
        return self.dense.gathered_mixture(torch.cat(parts), weights, pairs, keys)

    def _features(self, x: Tensor, subset: Sequence[int] | None) -> Tensor:
        """Return what the convolutions make of ``x``, flattened, ``[B, E, F]``."""
        chosen, kernels = list(range(self.num_experts) if subset is None else subset), self._kernels()
        if not chosen:
            return x.new_zeros(len(x), 0, self.dense.input_dim)
        if not self._first_is_shared(x):
            x = channels_last(x)
            return torch.stack([self._convolve(x, kernels[expert], 0) for expert in chosen]).transpose(0, 1)
        weight, bias = (first if subset is None else first[chosen] for first in (self.weights[0], self.biases[0]))
        x = F.pad(x, [self.paddings[0]] * 4) if self.paddings[0] else x
        outputs = shared_conv_pool_relu(x, weight, bias, self.pools[0])
        parts = [self._convolve(h, kernels[expert], 1) for expert, h in zip(chosen, outputs.unbind(0), strict=True)]
        return torch.stack(parts).transpose(0, 1)

    def _first_is_shared(self, x: Tensor) -> bool:
        """Say whether the first layer runs as one product for all experts: on a CPU, where no gradient passes.

        Not while torch compiles or exports: it writes code of its own, and refuses views of memory as patches.
        """
        alike = x.dtype == self.weights[0].dtype and not torch.is_autocast_enabled(x.device.type)
        return alike and x.device.type == "cpu" and not x.requires_grad and not torch.compiler.is_compiling()

    def _kernels(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Return weight and bias of each layer, for each expert; unbound once, for one gradient per parameter."""
        layers = [
            list(zip(weight.unbind(0), bias.unbind(0), strict=True))
            for weight, bias in zip(self.weights, self.biases, strict=True)
        ]
        return [[layer[expert] for layer in layers] for expert in range(self.num_experts)]

    def _convolve(self, x: Tensor, kernels: Sequence[tuple[Tensor, Tensor]], begin: int) -> Tensor:
        """Map ``[N, C, H, W]`` through one expert's convolutions, from layer ``begin`` on, to ``[N, F]``."""
        for (weight, bias), pool, padding in list(zip(kernels, self.pools, self.paddings, strict=True))[begin:]:
            # Added after pooling the bias does the same, and its gradient is a sum of fewer numbers
            x = F.conv2d(x, weight, padding=padding)
            x = (F.max_pool2d(x, pool) if pool > 1 else x).add_(bias[:, None, None]).relu_()
        return x.flatten(1)
