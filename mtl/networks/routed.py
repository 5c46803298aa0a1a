"""Routed networks: each task uses some of the parallel components in each layer (Maziarz et al. 2019)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NotRequired

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import TypedDict

from mtl.checks import require
from mtl.gates.base import Gate
from mtl.gates.fixed import FixedGate
from mtl.gates.gumbel_matrix import GumbelMatrixGate
from mtl.gates.permuted import Permutation, PermutedGate, permuted
from mtl.networks.base import MultiTaskNetwork, select_tasks
from mtl.networks.components import Component, Shape
from mtl.networks.heads import HeadPerTask, Heads, NoHeads
from mtl.nn.linear import matching
from mtl.options import Count, Fraction, validated
from mtl.types import DataSpec, NetworkOutput, Routing, sum_losses

Factory = Callable[..., Component]


class Layer(TypedDict):
    """The options of a routed layer: see ``RoutedLayer``."""

    components: Annotated[Sequence[Factory], Field(min_length=1)]
    after: NotRequired[Sequence[Factory]]
    stride: NotRequired[Count | None]
    copies: NotRequired[Count]


class RoutedLayer(nn.Module):
    """Mix the outputs of C components for each task, with weights from a static gate, then apply ``after``.

    ``components`` and ``after`` are lists of factories ``(input_dim=)``. Each component is built ``copies`` times, side
    by side, with ``stride`` if it is given. All components must have the same output shape.
    """

    @validated
    def __init__(
        self,
        input_dim: Shape,
        components: Annotated[Sequence[Factory], Field(min_length=1)],
        gate: Callable[..., Gate],
        after: Sequence[Factory] = (),
        stride: Count | None = None,
        copies: Count = 1,
    ) -> None:
        super().__init__()
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
        self.pattern: list[list[bool]] | None = None  # of a layer whose gate is constant; see ``constant``

    def forward(self, x: Tensor, task_ids: Sequence[int] | None) -> tuple[Tensor, Routing]:
        """Map ``x [B, ...]``, shared by all tasks, or ``[t, B, ...]`` to ``[t, B, ...]`` for the t ``task_ids``."""
        routing: Routing = self.gate(None, None, task_ids)
        weights = routing.weights  # [t, C]
        shared = x.dim() == 1 + self.input_rank
        if len(weights) == 1 and not shared:
            x, shared = x[0], True
        # used[t][c]: whether component c has to run for task t
        if self.pattern is not None:
            used = self.pattern if task_ids is None else [self.pattern[task] for task in task_ids]
        else:
            used = (weights != 0).tolist() if routing.exact_zeros else [[True] * weights.shape[1]] * len(weights)
        groups = [range(start, start + self.copies) for start in range(0, len(self.components), self.copies)]
        parts = [
            part
            for group in groups
            for part in (self._on_one(x, weights, used, group) if shared else self._on_many(x, weights, used, group))
        ]
        if parts:
            mixed = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
        else:  # no task has any connection, so all outputs are 0
            mixed = x.new_zeros(len(weights), x.shape[0 if shared else 1], *self.sizes)
        return self.after(mixed.flatten(0, 1)).unflatten(0, (len(weights), -1)), routing

    def _on_one(self, x: Tensor, weights: Tensor, used: list[list[bool]], group: range) -> Iterator[Tensor]:
        """Yield the contribution of ``group`` to all tasks, ``[t, B, ...]``, if all tasks share the input."""
        columns = [index for index in group if any(row[index] for row in used)]
        if not columns:
            return
        copies: list[Any] = [self.components[index] for index in columns]
        outputs = copies[0].batched_forward(copies, x)  # [B, n, ...]
        used_weights = weights if len(columns) == weights.shape[1] else weights[:, columns]
        mixed = torch.matmul(used_weights.to(outputs.dtype), outputs.flatten(2))  # [B, t, ...]
        yield mixed.transpose(0, 1).reshape(len(weights), len(x), *self.sizes)

    def _on_many(self, x: Tensor, weights: Tensor, used: list[list[bool]], group: range) -> Iterator[Tensor]:
        """Yield the contribution of each component in ``group``, ``[t, B, ...]``, if each task has its own input."""
        for index in group:
            rows = [task for task, row in enumerate(used) if row[index]]
            if not rows:
                continue
            everyone = len(rows) == len(used)
            y = self.components[index]((x if everyone else x[rows]).flatten(0, 1)).unflatten(0, (len(rows), -1))
            w = weights[:, index] if everyone else weights[rows, index]
            part = w.view(-1, *[1] * (y.dim() - 1)).to(y.dtype) * y
            if not everyone:
                targets = torch.tensor(rows, device=part.device)
                part = part.new_zeros(len(used), *part.shape[1:]).index_copy(0, targets, part)
            yield part

    def constant(self) -> RoutedLayer:
        """Return the layer in a form that can be exported: with the current weights of its gate."""
        return self._constant(None)

    def only(self, task: int) -> RoutedLayer:
        """Return the part that one task uses, in the form of ``constant``."""
        return self._constant([task])

    @torch.no_grad()
    def _constant(self, tasks: list[int] | None) -> RoutedLayer:
        layer, weights = copy.deepcopy(self), self.gate(None, None, tasks).weights
        used = (weights != 0).any(0).nonzero().flatten().tolist() or [0]
        layer.components = nn.ModuleList(layer.components[index] for index in used)
        layer.gate, layer.copies = FixedGate.of(weights[:, used]), 1
        layer.pattern = (layer.gate.weights != 0).tolist()
        return layer


class RoutedNetwork(MultiTaskNetwork):
    """Bottom, ``stem``, routed ``layers`` and one head per task.

    ``layers``: see ``Layer``. ``gate(num_tasks=, num_experts=, input_dim=None, inputs=)`` builds the gate of a layer.
    ``dropout`` applies to the features before the heads.
    """

    @validated
    def __init__(
        self,
        spec: DataSpec,
        bottom: Callable[..., nn.Module],
        layers: Sequence[Layer],
        gate: Callable[..., Gate],
        heads: Callable[..., Heads | HeadPerTask | NoHeads],
        stem: Sequence[Factory] = (),
        dropout: Fraction = 0.0,
        permutation: Callable[..., Permutation] | None = None,
    ) -> None:
        super().__init__(spec, bottom)
        shape: Any = self.bottom.output_dim
        self.stem, shape = chain(stem, shape)

        def gate_of_layer(num_experts: int) -> Gate:
            built = gate(num_tasks=len(self.tasks), num_experts=num_experts, input_dim=None, inputs=spec.inputs)
            return permuted(built, permutation)

        self.layers = nn.ModuleList()
        for layer in layers:
            built = RoutedLayer(shape, gate=gate_of_layer, **layer)
            self.layers.append(built)
            shape = built.output_dim
        GumbelMatrixGate.share_budget([gate for gate in self._gates() if isinstance(gate, GumbelMatrixGate)])
        self.dropout = nn.Dropout(dropout)
        width = shape if isinstance(shape, int) else math.prod(shape)
        self.heads = heads(tasks=self.tasks, input_dim=width)

    def forward(self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None) -> NetworkOutput:
        """Predict the named ``tasks`` (default all) for a batch."""
        task_ids = select_tasks(self.tasks, tasks)
        x = self.bottom(inputs)  # numeric inputs are float32, also in a bfloat16 network
        x = self.stem(matching(x, next(self.parameters())))
        routings: dict[str, Routing] = {}
        for index, layer in enumerate(self.layers):
            x, routings[f"layers.{index}"] = layer(x, task_ids)
        features = self.dropout(x.flatten(2).transpose(0, 1))  # [B, t, F]
        return NetworkOutput(self.heads(features, task_ids), routings, sum_losses(routings))

    def _gates(self) -> list[Gate]:
        """Return the gates of the layers, without a permutation around them."""
        gates = [layer.gate for layer in self.layers if isinstance(layer, RoutedLayer)]
        return [gate.gate if isinstance(gate, PermutedGate) else gate for gate in gates]

    def parameter_options(self) -> dict[nn.Parameter, dict[str, float]]:
        """Return optimiser options of some parameters: the gates' learning rate is multiplied by T.

        On batches of one task each, a step trains only one of a gate's T rows, hence the factor. Biases and gates have
        no weight decay, which would pull the gates' probabilities towards 1/2.
        """
        options = {p: {"weight_decay": 0.0} for name, p in self.named_parameters() if name.endswith("bias")}
        faster = {"lr_factor": float(len(self.tasks)), "weight_decay": 0.0}
        return options | {parameter: faster for gate in self._gates() for parameter in gate.parameters()}

    def fsdp_units(self) -> Sequence[nn.Module]:
        """See ``MultiTaskNetwork``."""
        return list(self.layers)


def chain(factories: Sequence[Factory], shape: Shape) -> tuple[nn.Module, Shape]:
    """Build modules one after the other; return them and the shape of the last one's output."""
    modules = []
    for factory in factories:
        modules.append(factory(input_dim=shape))
        shape = modules[-1].output_dim
    return nn.Sequential(*modules), shape
