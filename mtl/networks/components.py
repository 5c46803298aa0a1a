"""Components of routed layers: modules that are built for the shape of their input."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtl.checks import InputError, require
from mtl.options import Count, Pair, validated

Shape = int | tuple[int, int, int]  # features, or channels, height, width
Size = Pair[Count]  # height and width
Pool = Literal["max", "average"]


class Component(nn.Module):
    """Base of all components: maps ``[B, *input_dim]`` to ``[B, *output_dim]``."""

    output_dim: Shape
    kind = ""  # a short name, for reports; "": that of the class

    @staticmethod
    def batched_forward(copies: Sequence[Any], x: Tensor) -> Tensor:
        """Map ``x [B, *input_dim]`` to the outputs ``[B, n, *output_dim]`` of n identically built components."""
        return torch.stack([component(x) for component in copies], 1)


class Convolutions(Component):
    """Convolutions of ``channels`` filters, each followed by GroupNorm (if ``groups``) and relu.

    ``kernels``: one size per convolution, a number or (height, width). Only the last convolution has ``stride``;
    ``same`` pads so that height and width stay the same.
    """

    @validated
    def __init__(
        self,
        input_dim: Shape,
        channels: Count,
        kernels: Sequence[Count | Size],
        stride: Count = 1,
        same: bool = False,
        groups: Count | None = None,
    ) -> None:
        super().__init__()
        in_channels, height, width = image(input_dim, "Convolutions")
        parts: list[nn.Module] = []
        sizes = [(k, k) if isinstance(k, int) else (k[0], k[1]) for k in kernels]
        for index, size in enumerate(sizes):
            step = stride if index == len(kernels) - 1 else 1
            pad = (size[0] // 2, size[1] // 2) if same else (0, 0)
            parts.append(nn.Conv2d(in_channels, channels, size, step, pad))
            parts += [nn.GroupNorm(groups, channels)] if groups else []
            parts.append(nn.ReLU())
            height, width = ((s + 2 * p - k) // step + 1 for s, p, k in zip((height, width), pad, size, strict=True))
            in_channels = channels
        small = f"is too small for kernels {list(kernels)} with stride {stride}; use smaller ones or same=true"
        require(height >= 1 and width >= 1, f"Convolutions: input {input_dim} (channels, height, width) {small}")
        self.body = nn.Sequential(*parts)
        self.output_dim = (channels, height, width)
        self.kind = "-".join(f"{size[0]}x{size[1]}" for size in sizes)

    @staticmethod
    def batched_forward(copies: Sequence[Any], x: Tensor) -> Tensor:
        if len(copies[0].body) != 2:  # more than one convolution and a relu
            return Component.batched_forward(copies, x)
        first = copies[0].body[0]
        weight, bias = (torch.cat([getattr(copy.body[0], name) for copy in copies]) for name in ("weight", "bias"))
        # One convolution for all copies: a call costs more than the arithmetic of a few channels
        y = F.conv2d(x, weight, bias, first.stride, first.padding).relu()
        return y.view(len(y), len(copies), y.shape[1] // len(copies), *y.shape[2:])

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Pooling(Component):
    """Max or average pooling (``kind``) over ``kernel`` x ``kernel`` windows; ``same`` pads by half a kernel."""

    @validated
    def __init__(self, input_dim: Shape, kind: Pool, kernel: Count, stride: Count = 1, same: bool = False) -> None:
        super().__init__()
        channels, height, width = image(input_dim, "Pooling")
        pad, self.kind = kernel // 2 if same else 0, kind
        options: dict[str, Any] = {"kernel_size": kernel, "stride": stride, "padding": pad}
        self.body = nn.MaxPool2d(**options) if kind == "max" else nn.AvgPool2d(**options, count_include_pad=False)
        height, width = ((side + 2 * pad - kernel) // stride + 1 for side in (height, width))
        self.output_dim = (channels, height, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Identity(Component):
    """Identity; with ``stride`` above 1, a strided 1 x 1 convolution."""

    @validated
    def __init__(self, input_dim: Shape, stride: Count = 1) -> None:
        super().__init__()
        self.output_dim, self.kind = input_dim, "identity"
        self.body: nn.Module = nn.Identity()
        if stride > 1:
            channels, height, width = image(input_dim, "Identity with a stride")
            self.body = nn.Conv2d(channels, channels, 1, stride)
            self.output_dim = (channels, (height - 1) // stride + 1, (width - 1) // stride + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class NormRelu(Component):
    """GroupNorm and relu."""

    @validated
    def __init__(self, input_dim: Shape, groups: Count) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, image(input_dim, "NormRelu")[0])
        self.output_dim, self.kind = input_dim, "norm"

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).relu()


class DenseLayers(Component):
    """Dense layers of ``units``, each with a relu; then, if given, a linear layer with ``outputs`` units."""

    @validated
    def __init__(self, input_dim: Shape, units: Sequence[Count], outputs: Count | None = None) -> None:
        super().__init__()
        if not isinstance(input_dim, int):
            raise InputError("DenseLayers: needs vectors as input")
        widths = [*units] if outputs is None else [*units, outputs]
        require(bool(widths), "DenseLayers: needs units or outputs")
        parts: list[nn.Module] = []
        for a, b in pairwise([input_dim, *widths]):
            parts += [nn.Linear(a, b), nn.ReLU()]
        self.body = nn.Sequential(*(parts if outputs is None else parts[:-1]))
        self.output_dim, self.kind = widths[-1], "dense"

    @staticmethod
    def batched_forward(copies: Sequence[Any], x: Tensor) -> Tensor:
        y = x.expand(len(copies), *x.shape)
        for layers in zip(*(copy.body for copy in copies), strict=True):
            if isinstance(layers[0], nn.Linear):
                weight, bias = (torch.stack([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
                y = torch.baddbmm(bias[:, None], y, weight.transpose(1, 2))
            else:
                y = y.relu()
        return y.transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def image(shape: Shape, location: str) -> tuple[int, int, int]:
    """Return ``shape`` if it is the shape of an image, else raise InputError."""
    if isinstance(shape, int):
        raise InputError(f"{location}: needs images as input")
    return shape
