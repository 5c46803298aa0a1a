"""Count the FLOPs of a forward pass; a multiply-add counts as 2, as in torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mtl.experts.dispatch import Dispatch
from mtl.networks.mixture import MixtureOfExperts


@torch.no_grad()
def forward_flops(
    network: nn.Module, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None
) -> dict[str, int]:
    """Return the FLOPs of one sample through each module of ``network`` by name, with all experts executed.

    The entry "" is the whole network. A module without a product may be missing. torch's ``FlopCounterMode`` counts
    matrix products and convolutions. ``inputs``: a batch; its first row is used. ``tasks``: those to predict (default
    all).
    """
    with _executed_dense(network), FlopCounterMode(display=False) as counter:
        network(_one_row(inputs), tasks)
    counts = {name.partition(".")[2]: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    return counts | {"": counter.get_total_flops()}


@torch.no_grad()
def expert_flops(
    network: nn.Module, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None
) -> dict[str, int]:
    """Return the FLOPs of one sample through one expert, for each mixture layer of ``network`` by name.

    Where a layer sees several tokens of a sample, all of them count.
    """
    inputs_of: dict[str, Tensor] = {}
    layers = {name: layer for name, layer in network.named_modules() if isinstance(layer, MixtureOfExperts)}
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, name=name: inputs_of.update({name: args[0]}))
        for name, layer in layers.items()
    ]
    network(_one_row(inputs), tasks)
    for hook in hooks:
        hook.remove()
    counts = {}
    for name, x in inputs_of.items():
        experts: Any = layers[name].experts
        with FlopCounterMode(display=False) as counter:
            experts.outputs(x)
        counts[name] = int(counter.get_total_flops() // max(1, experts.num_experts))
    return counts


def _one_row(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[:1] for name, value in inputs.items()}


@contextmanager
def _executed_dense(network: nn.Module) -> Iterator[None]:
    """Execute all experts in the mixture layers of ``network`` inside this context."""
    layers = [module for module in network.modules() if isinstance(module, Dispatch)]
    before = [layer.execution for layer in layers]
    for layer in layers:
        layer.execution = "dense"
    try:
        yield
    finally:
        for layer, execution in zip(layers, before, strict=True):
            layer.execution = execution
