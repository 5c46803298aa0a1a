"""Routed networks: layers of parallel components, and who uses which of them (Maziarz et al. 2019)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mtl.gates.base import Gate
from mtl.networks.components import Component, Shape
from mtl.networks.heads import Heads, SeparateHeads, wanted_tasks
from mtl.types import DataSpec, NetworkOutput, Routing, require

Factory = Callable[..., Component]


class RoutedLayer(nn.Module):
    """Mix the outputs of C components, for each task with the weights of a static gate; then ``after``.

    ``components`` and ``after`` are lists of factories ``(input_dim=)``; all components give outputs of one shape, and
    are built with ``stride`` where one is given, ``copies`` of each, next to each other.
    """

    def __init__(
        self,
        input_dim: Shape,
        components: Sequence[Factory],
        gate: Callable[..., Gate],
        after: Sequence[Factory] = (),
        stride: int | None = None,
        copies: int = 1,
    ) -> None:
        super().__init__()
        require(len(components) >= 1 and copies >= 1, "a routed layer needs at least one component")
        options = {} if stride is None else {"stride": stride}
        built = [component(input_dim=input_dim, **options) for component in components for _ in range(copies)]
        self.copies = copies
        shapes = {component.output_dim for component in built}
        require(len(shapes) == 1, f"components of one routed layer give different shapes: {sorted(map(str, shapes))}")
        self.components = nn.ModuleList(built)
        mixed = next(iter(shapes))
        self.sizes = (mixed,) if isinstance(mixed, int) else mixed
        self.input_rank = 1 if isinstance(input_dim, int) else len(input_dim)
        self.gate = gate(num_experts=len(built))
        self.after, self.output_dim = chain(after, mixed)

    def forward(self, x: Tensor, wanted: Sequence[int] | None) -> tuple[Tensor, Routing]:
        """Map ``x [B, ...]``, the same for all, or ``[t, B, ...]`` to ``[t, B, ...]`` for the t ``wanted`` tasks."""
        routing: Routing = self.gate(None, None, wanted)
        weights = routing.weights  # [t, C]
        shared = x.dim() == 1 + self.input_rank
        if len(weights) == 1 and not shared:
            x, shared = x[0], True
        used = (weights != 0).tolist() if routing.exact_zeros else [[True] * weights.shape[1]] * len(weights)
        groups = [range(start, start + self.copies) for start in range(0, len(self.components), self.copies)]
        parts = [
            part
            for group in groups
            for part in (self._on_one(x, weights, used, group) if shared else self._on_many(x, weights, used, group))
        ]
        if parts:
            mixed = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
        else:  # no task has a connection: zeros, as for one that has none
            mixed = x.new_zeros(len(weights), x.shape[0 if shared else 1], *self.sizes)
        return self.after(mixed.flatten(0, 1)).unflatten(0, (len(weights), -1)), routing

    def _on_one(self, x: Tensor, weights: Tensor, used: list[list[bool]], group: range) -> Iterator[Tensor]:
        """Yield what the components of ``group`` add for all tasks, ``[t, B, ...]``, on one input for all."""
        places = [place for place in group if any(row[place] for row in used)]
        if not places:
            return
        copies: list[Any] = [self.components[place] for place in places]
        outputs = copies[0].side_by_side(copies, x)  # [B, n, ...]
        chosen = weights if len(places) == weights.shape[1] else weights[:, places]
        mixed = torch.matmul(chosen.to(outputs.dtype), outputs.flatten(2))  # [B, t, ...]
        yield mixed.transpose(0, 1).reshape(len(weights), len(x), *self.sizes)

    def _on_many(self, x: Tensor, weights: Tensor, used: list[list[bool]], group: range) -> Iterator[Tensor]:
        """Yield what each component of ``group`` adds, ``[t, B, ...]``, where each task has its input."""
        for place in group:
            rows = [task for task, row in enumerate(used) if row[place]]
            if not rows:
                continue
            everyone = len(rows) == len(used)
            y = self.components[place]((x if everyone else x[rows]).flatten(0, 1)).unflatten(0, (len(rows), -1))
            w = weights[:, place] if everyone else weights[rows, place]
            part = w.view(-1, *[1] * (y.dim() - 1)).to(y.dtype) * y
            if not everyone:
                index = torch.tensor(rows, device=part.device)
                part = part.new_zeros(len(used), *part.shape[1:]).index_copy(0, index, part)
            yield part


class RoutedNetwork(nn.Module):
    """Bottom, ``stem``, routed ``layers`` and one head per task.

    ``layers``: a list of ``{components, after, stride}`` (see ``RoutedLayer``), each with ``copies`` of every one of
    its components. ``gate(num_tasks=, num_experts=, input_dim=None, inputs=)`` makes the gate of a layer. ``dropout``
    of the features before the heads. ``heads=None``: the last layer's outputs, one number, are the predictions.
    """

    def __init__(
        self,
        spec: DataSpec,
        bottom: Callable[..., nn.Module],
        layers: Sequence[Mapping[str, Any]],
        gate: Callable[..., Gate],
        heads: Callable[..., Heads | SeparateHeads] | None,
        stem: Sequence[Factory] = (),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tasks = list(spec.tasks)
        self.bottom = bottom(inputs=spec.inputs)
        shape: Any = self.bottom.output_dim
        self.stem, shape = chain(stem, shape)

        def gate_of_layer(num_experts: int) -> Gate:
            return gate(num_tasks=len(self.tasks), num_experts=num_experts, input_dim=None, inputs=spec.inputs)

        self.layers = nn.ModuleList()
        for place, layer in enumerate(layers):
            unknown = set(layer) - {"components", "after", "stride", "copies"}
            require(not unknown, f"network.layers[{place}]: no such option: {', '.join(sorted(unknown))}")
            require("components" in layer, f"network.layers[{place}]: components are missing")
            built = RoutedLayer(shape, gate=gate_of_layer, **layer)
            self.layers.append(built)
            shape = built.output_dim
        self.dropout = nn.Dropout(dropout)
        width = shape if isinstance(shape, int) else math.prod(shape)
        require(heads is not None or width == 1, f"network.heads=null: the last layer gives {width} numbers, not one")
        self.heads = heads and heads(tasks=self.tasks, input_dim=width)

    def forward(self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None) -> NetworkOutput:
        """Predict the named ``tasks`` (default all) for a batch."""
        wanted = wanted_tasks(self.tasks, tasks)
        subset = None if len(wanted) == len(self.tasks) else wanted
        x, losses = self.stem(self.bottom(inputs)), dict[str, Tensor]()
        for layer in self.layers:
            x, routing = layer(x, subset)
            for name, value in routing.losses.items():
                losses[name] = losses[name] + value if name in losses else value
        features = self.dropout(x.flatten(2).transpose(0, 1))  # [B, t, F]
        if self.heads is not None:
            return NetworkOutput(self.heads(features, wanted), None, losses)
        predictions = {self.tasks[task].name: features[:, place, 0] for place, task in enumerate(wanted)}
        return NetworkOutput(predictions, None, losses)

    def parameter_options(self) -> dict[nn.Parameter, dict[str, float]]:
        """Return how some parameters are optimized: gates faster, since a step trains one task's row of T.

        Weight decay is for weights: neither for logits, which it would pull to a probability of 1/2, nor for biases.
        """
        options = {p: {"weight_decay": 0.0} for name, p in self.named_parameters() if name.endswith("bias")}
        gates = [layer.gate for layer in self.layers if isinstance(layer, RoutedLayer)]
        faster = {"lr_factor": float(len(self.tasks)), "weight_decay": 0.0}
        return options | {parameter: faster for gate in gates for parameter in gate.parameters()}


def chain(factories: Sequence[Factory], shape: Shape) -> tuple[nn.Module, Shape]:
    """Build modules one after the other; return them and the shape of the last one's output."""
    modules = []
    for factory in factories:
        modules.append(factory(input_dim=shape))
        shape = modules[-1].output_dim
    return nn.Sequential(*modules), shape
