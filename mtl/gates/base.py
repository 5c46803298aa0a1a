"""Define the contract of a gate: one module holds the gates of all tasks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mtl.checks import InputError, require
from mtl.distributed import batch_mean
from mtl.gates.columns import Columns
from mtl.nn.functional import KeepsBufferPrecision, at_least_float32, entropy
from mtl.nn.linear import affine
from mtl.options import Count, Name, NonEmpty, validated
from mtl.types import InputSpec, Routing

WEIGHT_RANGE = 0.05  # weight parameters start U(-0.05, 0.05), as in the reference implementations


class Gate(KeepsBufferPrecision):
    """Base of all gates.

    ``num_tasks`` T and ``num_experts`` E; ``input_dim`` D, or None for a static gate, whose weights do not depend
    on the example; ``inputs`` describes the raw inputs, for gates that read one; ``shared`` makes one gate serve
    all tasks. ``columns`` names raw inputs that a per-example gate sees instead of ``x``, for example to tell scenarios
    apart. A subclass implements ``route`` and creates its parameters with ``num_gates`` (1 when
    shared, else T) as leading dimension and ``width`` (D, or that of the columns) as last. ``sums_to_one`` says whether
    the weights of a sample always sum to one, ``reads_inputs`` whether they depend on a raw input. ``option_buffers``
    names buffers that are options: a run that starts from the weights of another one keeps its own. ``budgeted``: the
    gates, perhaps of other layers, whose parameters an auxiliary loss of this gate reads.
    """

    sums_to_one = True
    reads_inputs = False
    option_buffers: ClassVar[tuple[str, ...]] = ()
    budgeted: Sequence[Gate] = ()

    @validated
    def __init__(
        self,
        num_tasks: Count,
        num_experts: Count,
        input_dim: Count | None = None,
        inputs: Mapping[str, InputSpec] | None = None,
        shared: bool = False,
        columns: NonEmpty[Name] | None = None,
    ) -> None:
        super().__init__()
        self.num_tasks, self.num_experts, self.input_dim, self.shared = num_tasks, num_experts, input_dim, shared
        self.num_gates, self.width = 1 if shared else num_tasks, input_dim
        self.columns_read: Columns | None = None
        if columns is not None:
            fits = input_dim is not None and not self.reads_inputs
            why = "it is static" if input_dim is None else "it reads an input of its own"
            require(fits, f"columns=[{', '.join(columns)}]: {type(self).__name__} cannot take columns: {why}")
            self.columns_read, self.reads_inputs = Columns(columns, inputs or {}), True
            self.width = self.columns_read.width

    def forward(
        self, x: Tensor | None, inputs: Mapping[str, Tensor] | None = None, tasks: Sequence[int] | None = None
    ) -> Routing:
        """Route a batch. Raises InputError for an ``x`` of another shape.

        ``x``: ``[B, D]``, or one for each of the t wanted tasks, ``[B, t, D]`` (None for a static gate); ``inputs``:
        the raw inputs of the batch; ``tasks``: indices of the wanted tasks (default all). Returns weights
        ``[B, t, E]``, without ``B`` from a static gate. The arithmetic is in float32 at least, whatever the trainer's
        precision.
        """
        count = self.num_tasks if tasks is None else len(tasks)
        shapes = ((self.input_dim,), (count, self.input_dim))
        if x is not None and self.input_dim is not None and x.shape[1:] not in shapes:
            raise InputError(f"x {list(x.shape)}: {self} takes x [B, {self.input_dim}]")
        device = x.device if x is not None else next(chain(self.parameters(), self.buffers())).device
        if x is not None and self.columns_read is not None:
            x = self.columns_read(inputs or {}, torch.promote_types(x.dtype, torch.float32))
        if tasks is not None and list(tasks) == list(range(self.num_tasks)):
            tasks = None  # all tasks, in order: no copy of their parameters is needed
        task_ids = None if self.shared or tasks is None else list(tasks)
        # torch.export refuses a region that switches autocast off, so there is one only where autocast is on
        on = torch.is_autocast_enabled(device.type)
        with torch.autocast(device.type, enabled=False) if on else nullcontext():
            routing = self.route(None if x is None else at_least_float32(x), inputs, task_ids)
        if tasks is not None:
            routing = replace(routing, tasks=list(tasks))
        if not self.shared:
            return routing
        weights, selectors = routing.weights, routing.selectors
        weights = weights.expand(*weights.shape[:-2], count, self.num_experts)
        if selectors is not None:
            selectors = selectors.expand(*selectors.shape[:-3], count, *selectors.shape[-2:])
        return replace(routing, weights=weights, selectors=selectors)

    def extra_repr(self) -> str:
        """Return the sizes and the options of the class, as ``print(gate)`` shows them."""
        sizes = {"tasks": self.num_tasks, "experts": self.num_experts}
        options = {name: vars(self)[name] for name in inspect.signature(type(self)).parameters if name in vars(self)}
        of_place = ("num_tasks", "num_experts", "input_dim")
        options = {name: value for name, value in options.items() if name not in of_place}
        return ", ".join(f"{name}={value!r}" for name, value in {**sizes, **options}.items())

    def route(self, x: Tensor | None, inputs: Mapping[str, Tensor] | None, tasks: list[int] | None) -> Routing:
        """Compute the routing of ``tasks`` (None: all), in the precision of ``x``."""
        raise NotImplementedError

    def active_fraction(self, selectors: Tensor | None) -> float:
        """Return the share of the gate's multiply-adds that these selectors need, mean over samples.

        ``selectors``: of ``Routing``. A gate that need not compute all of its logits replaces this.
        """
        return 1.0

    def task_parameters(self) -> dict[nn.Parameter, Sequence[int]]:
        """Return the parameters whose rows belong to tasks, each with the indices of these tasks, in order.

        These are all parameters, or none if one gate serves all tasks.
        """
        return {} if self.shared or self.num_tasks == 1 else dict.fromkeys(self.parameters(), range(self.num_tasks))

    def affine(self, x: Tensor | None, name: str, tasks: list[int] | None) -> Tensor:
        """Return ``<name>weight x + <name>bias`` of the wanted tasks, ``[B, T, ...]`` or, static, ``[T, ...]``."""
        weight, bias = getattr(self, f"{name}weight", None), at_least_float32(getattr(self, f"{name}bias"))
        bias = bias if tasks is None else bias[tasks]
        if weight is None:
            return bias
        if x is None:
            raise InputError("x is None: a per-example gate needs x [B, D]; one built with input_dim=None is static")
        weight = at_least_float32(weight)
        return affine(x, weight if tasks is None else weight[tasks], bias)

    def add_linear(self, name: str, shape: Sequence[int], bound: float, bias_bound: float | None = None) -> None:
        """Add parameters ``<name>weight [*shape, D]`` (unless static) and ``<name>bias [*shape]``, U(-bound, bound).

        ``bias_bound``: another bound for the biases.
        """
        if self.width is not None:
            weight = torch.empty(*shape, self.width).uniform_(-bound, bound)
            self.register_parameter(f"{name}weight", nn.Parameter(weight))
        bound = bound if bias_bound is None else bias_bound
        self.register_parameter(f"{name}bias", nn.Parameter(torch.empty(*shape).uniform_(-bound, bound)))

    def add_scheduled_buffer(self, name: str, value: float, persistent: bool = False) -> None:
        """Add a scalar buffer that a schedule may change.

        ``persistent``: evaluation, or a run that resumes without the schedule, depends on it.
        """
        self.register_buffer(name, torch.tensor(float(value)), persistent=persistent)


class GateWrapper(Gate):
    """A gate that changes the routing of ``gate``; a subclass implements ``change``.

    ``num_experts``: the number of experts after the change (None: as before). Networks, reports and pruning treat the
    two as one gate.
    """

    def __init__(self, gate: Gate, num_experts: int | None = None) -> None:
        super().__init__(gate.num_tasks, num_experts or gate.num_experts, gate.input_dim)
        self.gate, self.sums_to_one, self.reads_inputs = gate, gate.sums_to_one, gate.reads_inputs

    def route(self, x: Tensor | None, inputs: Mapping[str, Tensor] | None, tasks: list[int] | None) -> Routing:
        return self.change(self.gate(x, inputs, tasks), tasks)

    def change(self, routing: Routing, tasks: list[int] | None) -> Routing:
        """Return the ``routing`` of the wanted ``tasks`` (None: all), changed."""
        raise NotImplementedError

    def active_fraction(self, selectors: Tensor | None) -> float:
        return self.gate.active_fraction(selectors)

    def task_parameters(self) -> dict[nn.Parameter, Sequence[int]]:
        return self.gate.task_parameters()


@runtime_checkable
class DrawsConnections(Protocol):
    """A gate that draws at random which tasks use which experts."""

    def probabilities(self) -> Tensor:
        """Return the probability of each connection, ``[T, E]``."""


def entropy_loss(selectors: Tensor, weight: Tensor) -> Tensor:
    """Return weight * (mean over the batch of the summed entropies of ``selectors [..., T, K, E]``)."""
    per_example = entropy(selectors, dim=(-3, -2, -1))  # [B] or []
    return weight.to(per_example.dtype) * batch_mean(per_example)


def check_k(k: int, num_experts: int) -> None:
    """Raise InputError unless ``k <= num_experts``."""
    message = f"k={k}: cannot select {k} of {num_experts} experts; accepted: 1 to {num_experts} (or raise num_experts)"
    require(k <= num_experts, message)
