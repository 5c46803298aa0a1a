"""Cross layers (deep and cross network, DCN V2: Wang et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from mtl.networks.bottom import TabularBottom
from mtl.nn.linear import matching
from mtl.options import Count, validated
from mtl.types import InputSpec


class CrossBottom(TabularBottom):
    """Cross the features x_0 of a ``TabularBottom`` in ``num_layers`` layers (Wang et al. 2021, equation 1).

        x_{l+1} = x_0 * (W_l x_l + b_l) + x_l

    After L layers the output ``[B, D]`` holds products of up to L + 1 features. ``rank``: W_l is the product of a
    ``[D, rank]`` and a ``[rank, D]`` matrix (equation 2); None: any matrix. What reads this bottom is the deep network
    of the paper's stacked structure.
    """

    @validated
    def __init__(
        self, inputs: Mapping[str, InputSpec], num_layers: Count = 2, rank: Count | None = None, **embedding: Any
    ) -> None:
        super().__init__(inputs, **embedding)
        dim = self.output_dim
        self.layers = nn.ModuleList(
            nn.Linear(dim, dim)
            if rank is None
            else nn.Sequential(nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim))
            for _ in range(num_layers)
        )

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Map ``inputs`` to ``[B, D]``, see ``TabularBottom``."""
        first = matching(super().forward(inputs), next(self.layers.parameters()))  # numeric inputs may be wider
        x = first
        for layer in self.layers:
            x = first * layer(x) + x
        return x
