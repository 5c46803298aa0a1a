"""Update only the rows of an embedding table that a batch has looked up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mtl.checks import require


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


def make_embeddings_sparse(network: nn.Module) -> list[nn.Parameter]:
    """Let all embedding tables of ``network`` have sparse gradients; return the tables."""
    tables: list[Any] = [part for part in network.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    name = type(network).__name__
    require(
        bool(tables),
        f"embedding_optimizer: {name} has no embedding table for these inputs; use embedding_optimizer=none",
    )
    for table in tables:
        table.sparse = True
    return [table.weight for table in tables]


def plain_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Add up the entries of each row in sparse gradients; return one tensor with a plain ``grad`` for each parameter.

    That of a sparse gradient holds the values of its rows; that of a gradient divided among processes, the part of this
    process. Both share the gradient's memory, so what changes them, such as clipping, changes the gradient. Norms and
    largest entries are those of the whole sparse gradient.
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
    return plain
