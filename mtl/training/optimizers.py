"""Build an optimiser with the parameter groups that a network asks for; update only the looked-up rows of tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mtl.checks import require
from mtl.distributed import all_reduce_sum
from mtl.networks.base import MultiTaskNetwork


class RowwiseAdagrad(Optimizer):
    """Adagrad with one accumulator for each row of a table, for sparse gradients ``[N, D]``.

    With g_i the gradient of row i, the sum over the batch, and only for the rows of the batch:

        s_i <- s_i + mean(g_i^2),    w_i <- w_i - lr g_i / (sqrt(s_i) + eps)

    The state is 1 / D of the table instead of the two copies that Adam needs (Gupta et al. 2014, "Training highly
    multiclass classifiers"; Mudigere et al. 2021 train recommenders with it).
    """

    def __init__(
        self, params: Any, lr: float = 3e-2, initial_accumulator_value: float = 0.0, eps: float = 1e-8
    ) -> None:
        super().__init__(params, {"lr": lr, "initial_accumulator_value": initial_accumulator_value, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # CompositeOptimizer calls the closure
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is None:
                    continue
                gradient = table.grad.coalesce()
                rows, values = gradient.indices()[0], gradient.values()  # [n], [n, D]
                if not self.state[table]:
                    start = group["initial_accumulator_value"]
                    self.state[table]["sum"] = table.new_full((len(table), 1), start)
                sums = self.state[table]["sum"]
                sums.index_add_(0, rows, values.square().mean(1, keepdim=True))
                table.index_add_(0, rows, values / (sums[rows].sqrt() + group["eps"]), alpha=-group["lr"])


class CompositeOptimizer(Optimizer):
    """Several optimisers of different parameters as one; they share its groups and state."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], dict(parts[0].defaults))
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # after loading a state: it replaces groups and state
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss


def build_optimizer(
    network: MultiTaskNetwork,
    weighting: nn.Module,
    optimizer: Callable[..., Optimizer],
    embedding_optimizer: Callable[..., Optimizer] | None = None,
    tables: Sequence[nn.Parameter] = (),
) -> Optimizer:
    """Return ``embedding_optimizer`` of the ``tables`` and ``optimizer`` of the other trained parameters, as one.

    There is a parameter group for each set of options in the network's ``parameter_options``: ``lr_factor`` multiplies
    the learning rate, other options replace the optimiser's. A weighting has no weight decay.
    """
    excluded = {id(table) for table in tables}
    options_of = network.parameter_options() | {p: {"weight_decay": 0.0} for p in weighting.parameters()}
    defaults = {**optimizer([nn.Parameter(torch.zeros(1))]).defaults, "lr_factor": 1.0}
    groups: dict[tuple[tuple[str, float], ...], list[nn.Parameter]] = {}  # by the options that are no defaults
    for parameter in chain(network.parameters(), weighting.parameters()):
        if parameter.requires_grad and id(parameter) not in excluded:
            requested = options_of.get(parameter, {}).items()
            changed = tuple(sorted((name, value) for name, value in requested if defaults.get(name, value) != value))
            groups.setdefault(changed, []).append(parameter)
    dense = optimizer([{"params": parameters} for parameters in groups.values()])
    for group, options in zip(dense.param_groups, map(dict, groups), strict=True):
        group["lr"] *= options.pop("lr_factor", 1.0)
        group.update(options)
    return dense if embedding_optimizer is None else CompositeOptimizer([dense, embedding_optimizer(tables)])


def make_embeddings_sparse(network: nn.Module) -> list[nn.Parameter]:
    """Let all embedding tables of ``network`` have sparse gradients; return the tables."""
    tables: list[Any] = [part for part in network.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    name = type(network).__name__
    message = f"embedding_optimizer: {name} has no embedding table for these inputs; use embedding_optimizer=none"
    require(bool(tables), message)
    for table in tables:
        table.sparse = True
    return [table.weight for table in tables]


def clip_gradients(parameters: Iterable[Tensor], value: float, algorithm: str | None, sharded: bool) -> None:
    """Clip the gradients as torch does, also sparse ones and, if ``sharded``, those divided among processes.

    The entries of each row of a sparse gradient are added up first. Clipped are the plain tensors that hold the values
    of the rows, or the part of this process.
    """
    plain = []
    for parameter in parameters:
        values: Any = parameter.grad
        if values is not None and values.is_sparse:
            parameter.grad = values.coalesce()
            values = parameter.grad._values()
        elif hasattr(values, "to_local"):
            values = values.to_local()
        if values is not parameter.grad:
            parameter = torch.empty_like(values)
            parameter.grad = values
        plain.append(parameter)
    if algorithm == "value":
        nn.utils.clip_grad_value_(plain, value)
        return
    norm = nn.utils.get_total_norm([part.grad for part in plain if part.grad is not None])
    norm = all_reduce_sum(norm**2).sqrt() if sharded else norm
    nn.utils.clip_grads_with_norm_(plain, value, norm)
