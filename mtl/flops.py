"""Count the arithmetic of a forward pass; a multiplication with its addition is 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mtl.experts.dispatch import Dispatch


@torch.no_grad()
def forward_flops(network: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """Return the floating point operations of one sample through ``network`` with all experts.

    Matrix products and convolutions are counted, by torch's own counter. ``inputs``: a batch; one row is taken.
    """
    with _dense(network), FlopCounterMode(display=False) as counter:
        network({name: value[:1] for name, value in inputs.items()})
    return int(counter.get_total_flops())


@torch.no_grad()
def expert_flops(network: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """Return the floating point operations of one sample through one of ``network.experts``."""
    parts: Any = network
    x = parts.bottom({name: value[:1] for name, value in inputs.items()})
    with FlopCounterMode(display=False) as counter:
        parts.experts(x)
    return int(counter.get_total_flops() // parts.experts.num_experts)


class _dense:  # noqa: N801  (a context)
    """Execute the mixture layers of a network dense for a while."""

    def __init__(self, network: nn.Module) -> None:
        self.layers = [module for module in network.modules() if isinstance(module, Dispatch)]

    def __enter__(self) -> None:
        self.before = [layer.execution for layer in self.layers]
        for layer in self.layers:
            layer.execution = "dense"

    def __exit__(self, *error: object) -> None:
        for layer, execution in zip(self.layers, self.before, strict=True):
            layer.execution = execution
