"""Cut out of a trained network what one task uses."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mtl.flops import forward_flops
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.networks.routed import RoutedLayer, RoutedNetwork
from mtl.types import InputError, NetworkOutput, require


class PrunedLayer(nn.Module):
    """Mix components with constant ``weights [C]``; then ``after``."""

    weights: Tensor

    def __init__(
        self, components: Sequence[nn.Module], weights: Tensor, after: nn.Module, sizes: Sequence[int]
    ) -> None:
        super().__init__()
        self.components, self.after, self.sizes = nn.ModuleList(components), after, tuple(sizes)
        self.register_buffer("weights", weights)

    def forward(self, x: Tensor) -> Tensor:
        mixed = x.new_zeros(len(x), *self.sizes)
        for weight, component in zip(self.weights, self.components, strict=True):
            mixed = mixed + weight * component(x)
        result: Tensor = self.after(mixed)
        return result


class PrunedMixture(nn.Module):
    """Mix stacked experts with constant ``weights [1, E]``: ``[B, D]`` to ``[B, H]``."""

    weights: Tensor

    def __init__(self, experts: nn.Module, weights: Tensor) -> None:
        super().__init__()
        self.experts = experts
        self.register_buffer("weights", weights)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.experts(x)  # [B, E, H]
        return torch.matmul(self.weights.to(outputs.dtype), outputs)[:, 0]


class PrunedNetwork(nn.Module):
    """The part of a network that task ``name`` uses; it predicts this task alone."""

    def __init__(self, name: str, body: Sequence[nn.Module], heads: Heads | None) -> None:
        super().__init__()
        self.name, self.body, self.heads = name, nn.ModuleList(body), heads

    def forward(self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None) -> NetworkOutput:
        """Predict the task; ``tasks`` is there for the common signature."""
        x = self.body[0](inputs)
        for part in self.body[1:]:
            x = part(x)
        features = x.flatten(1)[:, None]  # [B, 1, F]
        predictions = {self.name: features[:, 0, 0]} if self.heads is None else self.heads(features, [0])
        return NetworkOutput(predictions)


@dataclass(frozen=True)
class Savings:
    """Say what pruning saves: parameters and operations per sample, of the whole network and of the part."""

    parameters: int
    pruned_parameters: int
    flops: int
    pruned_flops: int


@torch.no_grad()
def prune(network: nn.Module, task: str) -> PrunedNetwork:
    """Return what ``task`` uses of a routed network, or of a mixture with static gates, without what chose it.

    Its outputs are those of the network in evaluation. Raises InputError where the choice depends on the example.
    """
    network = copy.deepcopy(network).eval()
    known = isinstance(network, RoutedNetwork | MMoE)
    require(known, f"{type(network).__name__} cannot be pruned: routed networks and mixtures of experts can")
    assert isinstance(network, RoutedNetwork | MMoE)
    names = [spec.name for spec in network.tasks]
    require(task in names, f"no task {task!r}; there are {', '.join(names)}")
    place = names.index(task)
    body = _routed(network, place) if isinstance(network, RoutedNetwork) else _mixture(network, place)
    return PrunedNetwork(task, body, None if network.heads is None else network.heads.only(place))


def savings(network: nn.Module, pruned: nn.Module, inputs: Mapping[str, Tensor]) -> Savings:
    """Count what ``pruned`` has less than ``network``; ``inputs``: a batch, of which one row is taken."""
    before, after = (sum(p.numel() for p in module.parameters()) for module in (network, pruned))
    return Savings(before, after, forward_flops(network.eval(), inputs), forward_flops(pruned.eval(), inputs))


def _routed(network: RoutedNetwork, place: int) -> list[nn.Module]:
    body: list[nn.Module] = [network.bottom, network.stem]
    for layer in network.layers:
        assert isinstance(layer, RoutedLayer)
        weights = layer.gate(None, None, [place]).weights[0]
        used = weights.nonzero().flatten().tolist()
        components = [layer.components[number] for number in used]
        body.append(PrunedLayer(components, weights[used], layer.after, layer.sizes))
    return body


def _mixture(network: MMoE, place: int) -> list[nn.Module]:
    if network.gate.input_dim is not None:
        raise InputError("a gate that looks at the example cannot be pruned: train with network.static_gate=true")
    routing = network.gate(None, None, [place])
    if network.permutation is not None:
        routing = network.permutation(routing, [place], network.gate.sums_to_one)
    weights = routing.weights  # [1, E]
    used = weights[0].nonzero().flatten().tolist()
    experts: Any = network.experts
    for module in experts.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module._parameters[name] = nn.Parameter(parameter[used].clone())
        if hasattr(module, "num_experts"):
            module.num_experts = len(used)
    return [network.bottom, PrunedMixture(experts, weights[:, used])]
