"""Combine gradients of tasks by an aggregator of TorchJD: UPGrad, PCGrad, CAGrad, MGDA and others."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mtl.checks import InputError
from mtl.options import validated
from mtl.training.weighting.base import drawn_at
from mtl.training.weighting.jacobian import JacobianWeighting
from mtl.training.weighting.state import attributes, set_attributes

# Of Nash-MTL's solver: with a gradient of 0 it has no solution, and the weights stay as they are
HARMLESS_WARNINGS = (
    "You are solving a parameterized problem that is not DPP",
    "divide by zero encountered",
    "invalid value encountered",
    "Solution may be inaccurate",
)


class GradientWeighting(JacobianWeighting):
    """Combine the gradients of the tasks by ``aggregator``, a `torchjd.aggregation.Aggregator`.

    ``aggregator`` is a module, or a function of ``n_tasks`` that returns one. ``scale="sum"`` multiplies the result of
    a method that averages by the number of tasks. Without conflict it is then the sum, as with ``weighting=fixed``, and
    auxiliary losses and clipping keep their meaning. ``absent``: a task without a label in the step is left out
    (``drop``), or gets a row of zeros (``zero``). Methods with a state for each task or a minimal number of tasks need
    ``zero``.

    ``weights``: the factors of the rows, if the aggregator has them. Raises InputError if there are too few tasks.
    """

    @validated
    def __init__(
        self,
        network: nn.Module,
        num_tasks: int,
        aggregator: Callable[..., Any],
        seed: int = 0,
        scale: Literal["sum", "own"] = "own",
        absent: Literal["drop", "zero"] = "drop",
    ) -> None:
        super().__init__(network, num_tasks, seed)
        self.scale, self.absent = scale, absent
        made = aggregator if isinstance(aggregator, nn.Module) else aggregator(n_tasks=num_tasks)
        self._held: list[Any] = [made]  # no submodule: its buffers appear with the first step, which loading refuses
        self._row_weights: Tensor | None = None
        try:
            _aggregated(copy.deepcopy(self.aggregator), torch.eye(num_tasks), seed, 0)
        except ValueError as error:
            raise InputError(f"weighting: {type(self.aggregator).__name__}, {num_tasks} tasks: {error}") from None
        if hasattr(self.aggregator, "weighting"):
            self.aggregator.weighting.register_forward_hook(self._remember)

    @property
    def aggregator(self) -> Any:
        """Return the aggregator of TorchJD."""
        return self._held[0]

    def combine(self, jacobian: Tensor, labels: list[float], step: int) -> Tensor:
        present = [task for task, count in enumerate(labels) if count]
        if not present:
            return jacobian.new_zeros(jacobian.shape[1])
        rows = list(range(self.num_tasks)) if self.absent == "zero" else present
        whole = len(rows) == self.num_tasks
        factor = len(rows) if self.scale == "sum" else 1  # the mean is over all rows, also those of zeros
        combined = _aggregated(self.aggregator, jacobian if whole else jacobian[rows], self.seed, step)
        if self._row_weights is not None:
            weights = jacobian.new_zeros(self.num_tasks)
            weights[rows] = factor * self._row_weights.to(weights.dtype)
            self.in_force = weights
        return factor * combined

    def _remember(self, module: nn.Module, given: Any, weights: Tensor) -> None:
        self._row_weights = weights.detach()

    def get_extra_state(self) -> dict[str, Any]:
        return attributes(self.aggregator)

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        device = self._shared[0].device
        _aggregated(self.aggregator, torch.eye(self.num_tasks, device=device), 0, 0)  # the first call sets up solvers
        set_attributes(self.aggregator, state, device)


def _aggregated(aggregator: Any, matrix: Tensor, seed: int, step: int) -> Tensor:
    """Return the vector ``[P]`` into which ``aggregator`` combines the rows of ``matrix [T, P]``."""
    with torch.no_grad(), drawn_at(seed, step, matrix), warnings.catch_warnings():
        for message in HARMLESS_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        result: Tensor = aggregator(matrix)
    return result
