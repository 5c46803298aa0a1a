"""Define the contract of a gate: one module holds the gates of all tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from mtl.functional import at_least_float32, entropy, stacked_affine
from mtl.parallel import batch_mean
from mtl.types import InputSpec, Routing, require

JOINED = 1024  # logits
WEIGHT_RANGE = 0.05  # weight parameters start U(-0.05, 0.05), as in the reference implementations


class Gate(nn.Module):
    """Base of all gates.

    ``num_tasks`` T and ``num_experts`` E; ``input_dim`` D, or None for a static gate, whose weights do not depend
    on the example; ``inputs`` describes the raw inputs, for gates that read one; ``shared`` makes one gate serve
    all tasks. A subclass implements ``route`` and draws its parameters with ``num_gates`` (1 when shared, else T)
    as leading dimension. ``sums_to_one`` says whether the weights of a sample always do.
    """

    sums_to_one = True

    def __init__(
        self,
        num_tasks: int,
        num_experts: int,
        input_dim: int | None = None,
        inputs: Mapping[str, InputSpec] | None = None,
        shared: bool = False,
    ) -> None:
        super().__init__()
        check_count("num_tasks", num_tasks)
        check_count("num_experts", num_experts)
        self.num_tasks, self.num_experts, self.input_dim, self.shared = num_tasks, num_experts, input_dim, shared
        self.num_gates = 1 if shared else num_tasks

    def forward(
        self, x: Tensor | None, inputs: Mapping[str, Tensor] | None = None, tasks: Sequence[int] | None = None
    ) -> Routing:
        """Route a batch.

        ``x``: ``[B, D]`` (None for a static gate); ``inputs``: the raw inputs of the batch; ``tasks``: which tasks
        are wanted (default all). Returns weights ``[B, len(tasks), E]``, without ``B`` from a static gate.
        The arithmetic is in float32 at least, whatever the trainer's precision.
        """
        device = x.device if x is not None else next(chain(self.parameters(), self.buffers())).device
        chosen = None if self.shared or tasks is None else list(tasks)
        # What is off already need not be turned off: that takes as long as a small layer
        on = torch.is_autocast_enabled(device.type)
        with torch.autocast(device.type, enabled=False) if on else nullcontext():
            routing = self.route(None if x is None else at_least_float32(x), inputs, chosen)
        if tasks is not None:
            routing = replace(routing, tasks=list(tasks))
        if not self.shared:
            return routing
        count = self.num_tasks if tasks is None else len(tasks)
        weights, selectors = routing.weights, routing.selectors
        weights = weights.expand(*weights.shape[:-2], count, self.num_experts)
        if selectors is not None:
            selectors = selectors.expand(*selectors.shape[:-3], count, *selectors.shape[-2:])
        return replace(routing, weights=weights, selectors=selectors)

    def route(self, x: Tensor | None, inputs: Mapping[str, Tensor] | None, tasks: list[int] | None) -> Routing:
        """Compute the routing of ``tasks`` (None: all), in the precision of ``x``."""
        raise NotImplementedError

    def affine(self, x: Tensor | None, name: str, tasks: list[int] | None) -> Tensor:
        """Return ``<name>weight x + <name>bias`` of the wanted tasks, ``[B, T, ...]`` or, static, ``[T, ...]``."""
        weight, bias = self._affine_parameters(name, tasks)
        return stacked_affine(x, weight, bias)

    def affines(self, x: Tensor | None, names: Sequence[str], tasks: list[int] | None) -> list[Tensor]:
        """Return ``affine`` of each name, samples last: ``[T, ..., B]``, of one sample where the gate is static.

        One product computes them all, unless to join the parameters would take longer than it saves.
        """
        pairs = [self._affine_parameters(name, tasks) for name in names]
        biases = [bias for _, bias in pairs]
        if sum(bias.numel() for bias in biases) > JOINED:
            return [stacked_affine(x, weight, bias, samples_last=True) for weight, bias in pairs]
        weights = [weight.flatten(0, -2) for weight, _ in pairs if weight is not None]
        weight = torch.cat(weights) if weights else None
        together = stacked_affine(x, weight, torch.cat([bias.flatten() for bias in biases]), samples_last=True)
        parts = torch.split(together, [bias.numel() for bias in biases])
        return [part.view(*bias.shape, together.shape[1]) for part, bias in zip(parts, biases, strict=True)]

    def _affine_parameters(self, name: str, tasks: list[int] | None) -> tuple[Tensor | None, Tensor]:
        weight, bias = getattr(self, f"{name}weight", None), getattr(self, f"{name}bias")
        return (weight, bias) if tasks is None else (None if weight is None else weight[tasks], bias[tasks])

    def sample_mean(self, values: Tensor) -> Tensor:
        """Return the sum over tasks, averaged over the batch, of ``values [T, B]`` (B = 1 of a static gate)."""
        return batch_mean(values.sum() if self.input_dim is None else values.sum(0))

    def add_affine(self, name: str, shape: Sequence[int], bound: float) -> None:
        """Add parameters ``<name>weight [*shape, D]`` (unless static) and ``<name>bias [*shape]``, U(-bound, bound)."""
        if self.input_dim is not None:
            weight = torch.empty(*shape, self.input_dim).uniform_(-bound, bound)
            self.register_parameter(f"{name}weight", nn.Parameter(weight))
        self.register_parameter(f"{name}bias", nn.Parameter(torch.empty(*shape).uniform_(-bound, bound)))

    def add_schedulable(self, name: str, value: float, persistent: bool = False) -> None:
        """Add a scalar buffer that a schedule may change; ``persistent`` when evaluation depends on it."""
        self.register_buffer(name, torch.tensor(float(value)), persistent=persistent)


def entropy_loss(selectors: Tensor, weight: Tensor) -> Tensor:
    """Return weight * mean over the batch of the summed entropies; selectors ``[..., T, K, E]``."""
    per_example = entropy(selectors, dim=(-3, -2, -1))  # [B] or []
    return weight.to(per_example.dtype) * batch_mean(per_example)


def check_count(name: str, value: Any) -> None:
    """Raise InputError unless ``value`` is an integer of at least 1."""
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    require(good, f"gate.{name}={value!r}: must be an integer of at least 1")


def check_k(k: Any, num_experts: int) -> None:
    """Raise InputError unless ``1 <= k <= num_experts``."""
    check_count("k", k)
    require(
        k <= num_experts,
        f"gate.k={k}: cannot select {k} of {num_experts} experts; accepted: 1 to {num_experts} "
        "(or raise network.num_experts)",
    )


def check_number(name: str, value: Any, minimum: float = 0.0, above: bool = False) -> None:
    """Raise InputError unless ``value`` is a finite number of at least (with ``above``: greater than) ``minimum``."""
    good = (
        isinstance(value, int | float) and not isinstance(value, bool) and value == value and abs(value) != float("inf")
    )
    good = good and (value > minimum if above else value >= minimum)
    bound = "greater than" if above else "at least"
    require(good, f"gate.{name}={value!r}: must be a number {bound} {minimum:g}")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise InputError unless ``value`` is one of ``choices``."""
    require(value in choices, f"gate.{name}={value!r}: accepted are {', '.join(choices)}")
