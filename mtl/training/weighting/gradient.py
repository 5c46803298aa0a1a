"""Combine gradients of tasks by an aggregator of TorchJD: UPGrad, PCGrad, CAGrad, MGDA and others."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mtl.checks import InputError, require
from mtl.distributed import all_reduce_sum, world_size
from mtl.networks.base import MultiTaskNetwork
from mtl.nn.functional import at_least_float32, float64_if_supported
from mtl.options import validated
from mtl.training.weighting.base import TaskLosses, seeded_rng, sum_by_task
from mtl.training.weighting.jacobian import GivenGradients, JacobianWeighting, grads_wrt
from mtl.training.weighting.state import attributes, set_attributes

MAX_PRODUCTS = 2**24  # inner products that are in memory together
# Of Nash-MTL's solver: with a gradient of 0 it has no solution, and the weights stay as they are
HARMLESS_WARNINGS = (
    "You are solving a parameterized problem that is not DPP",
    "divide by zero encountered",
    "invalid value encountered",
    "Solution may be inaccurate",
)


class GradientWeighting(JacobianWeighting):
    """Combine the gradients of the tasks by ``aggregator``, a `torchjd.aggregation.Aggregator`.

    ``aggregator`` is a module, or a function of ``n_tasks`` that returns one. ``rescale="num_tasks"`` multiplies the
    result of a method that averages by the number of tasks. Without conflict it is then the sum, as with
    ``weighting=fixed``, and auxiliary losses and clipping keep their meaning. ``missing_tasks``: a task without a label
    in the step is left out (``drop``), or gets a row of zeros (``zero``). Methods with a state for each task or a
    minimal number of tasks need ``zero``.

    ``grad_wrt="representation"`` compares the tasks' gradients at the outputs of the last layer's experts, or of the
    trunk that they share, in place of those at the shared parameters, as MGDA-UB does (Sener and Koltun 2018, section
    3.3). Task t mixes expert e with the weight w_te, so its gradient there is w_te g_t, where g_t is the one at its
    mixture, and of the tasks s and t the inner product is the sum of (w_s . w_t)(g_s . g_t) over the rows. One backward
    pass through the heads thus gives all that the method needs, and the step goes on from there with one pass through
    the rest of the network, gates included, in which each task's gradient is multiplied by its weight. A step of
    several batches weights each alone.

    Raises InputError if there are too few tasks, or if ``grad_wrt="representation"`` does not go with the aggregator,
    which must weight the rows by their inner products, or with the network.
    """

    @validated
    def __init__(
        self,
        network: MultiTaskNetwork,
        num_tasks: int,
        aggregator: Callable[..., Any],
        seed: int = 0,
        rescale: Literal["num_tasks", "none"] = "none",
        missing_tasks: Literal["drop", "zero"] = "drop",
        grad_wrt: Literal["parameters", "representation"] = "parameters",
    ) -> None:
        super().__init__(network, num_tasks, seed)
        self.rescale, self.missing_tasks, self.grad_wrt = rescale, missing_tasks, grad_wrt
        self.reads_representation = grad_wrt == "representation"
        self._networks = [network]  # in a list, since it is no part of this module
        # In a list, so that it is no submodule: its buffers appear with the first step, which loading refuses
        self._held: list[Any] = [aggregator if isinstance(aggregator, nn.Module) else aggregator(n_tasks=num_tasks)]
        self._row_weights: Tensor | None = None
        try:
            _aggregated(copy.deepcopy(self.aggregator), torch.eye(num_tasks), seed, 0)
        except ValueError as error:
            raise InputError(f"weighting: {type(self.aggregator).__name__}, {num_tasks} tasks: {error}") from None
        from torchjd.aggregation import WeightedAggregator  # an extra

        option = "weighting.grad_wrt=representation"
        if isinstance(self.aggregator, WeightedAggregator):
            self.aggregator.weighting.register_forward_hook(self._remember)
        elif grad_wrt == "representation":
            title = type(self.aggregator).__name__
            raise InputError(f"{option}: {title} does not weight the tasks; use grad_wrt=parameters")
        if grad_wrt == "representation" and any(task.after for task in network.tasks):
            raise InputError(f"{option}: the loss of a task after another one depends on both; use grad_wrt=parameters")

    @property
    def aggregator(self) -> Any:
        """Return the aggregator of TorchJD."""
        return self._held[0]

    def forward(self, parts: Sequence[TaskLosses], step: int) -> Tensor:
        if self.grad_wrt == "parameters":
            return super().forward(parts, step)
        representations: list[Any] = [part.output.representation for part in parts]
        heads = self._networks[0].heads
        require(
            heads is not None and all(x is not None for x in representations),
            "weighting.grad_wrt=representation: needs a network with one mixture or trunk below its heads, such as "
            "mmoe, ple or shared_bottom, and no ensemble; use grad_wrt=parameters",
        )
        head_parameters = [parameter for parameter in heads.parameters() if parameter.requires_grad]
        task_loss = torch.stack([part.local_losses.sum() for part in parts]).sum()
        auxiliary = torch.stack([loss for part in parts for loss in part.auxiliary]).sum()
        tensors = [*representations, *head_parameters]
        with torch.autocast(task_loss.device.type, enabled=False):  # backward passes use the dtypes of the forward pass
            grads = list(grads_wrt(task_loss, tensors))
        at_representations: list[Any] = grads[: len(parts)]
        assert all(grad is not None for grad in at_representations), "the losses do not depend on the representation"
        products = all_reduce_sum(inner_products(parts, at_representations, self.num_tasks))
        self.check(products, step)
        values, vectors = torch.linalg.eigh(products)
        with torch.no_grad():  # rows with these inner products, [T, T]
            self.combine(vectors * values.clamp(min=0).sqrt(), sum_by_task(parts, self.num_tasks)[2].tolist(), step)
        if self.current_weights is not None:
            for number, (part, grad) in enumerate(zip(parts, at_representations, strict=True)):
                grads[number] = (grad * self.current_weights[sorted(part.task_ids)][:, None]).to(grad.dtype)
        pairs = [(tensor, world_size() * grad) for tensor, grad in zip(tensors, grads, strict=True) if grad is not None]
        inputs, scaled_grads = zip(*pairs, strict=True)
        apply: Any = GivenGradients.apply
        total: Tensor = apply(world_size() * task_loss.detach(), scaled_grads, None, *inputs) + auxiliary
        return total

    def before_step(self, step: int) -> None:
        if self.grad_wrt == "parameters":
            super().before_step(step)

    def combine(self, jacobian: Tensor, labels: list[float], step: int) -> Tensor:
        present = [task for task, count in enumerate(labels) if count]
        if not present:
            return jacobian.new_zeros(jacobian.shape[1])
        rows = list(range(self.num_tasks)) if self.missing_tasks == "zero" else present
        whole = len(rows) == self.num_tasks
        factor = len(rows) if self.rescale == "num_tasks" else 1  # the mean is over all rows, also those of zeros
        combined = _aggregated(self.aggregator, jacobian if whole else jacobian[rows], self.seed, step)
        if self._row_weights is not None:
            weights = jacobian.new_zeros(self.num_tasks)
            weights[rows] = factor * self._row_weights.to(weights.dtype)
            self.current_weights = weights
        return factor * combined

    def _remember(self, module: nn.Module, inputs: Any, weights: Tensor) -> None:
        self._row_weights = weights.detach()

    def get_extra_state(self) -> dict[str, Any]:
        return attributes(self.aggregator)

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        device = self._shared[0].device
        _aggregated(self.aggregator, torch.eye(self.num_tasks, device=device), 0, 0)  # the first call sets up solvers
        set_attributes(self.aggregator, state, device)


def inner_products(parts: Sequence[TaskLosses], gradients: Sequence[Tensor], num_tasks: int) -> Tensor:
    """Return the inner products ``[T, T]`` of the tasks' gradients at the experts' outputs, summed over the rows.

    ``gradients``: those of each batch at its representation, ``[B, t, H]``.
    """
    products = float64_if_supported(gradients[0].new_zeros(num_tasks, num_tasks))
    for part, gradient in zip(parts, gradients, strict=True):
        place = torch.tensor(sorted(part.task_ids), device=products.device)
        size = max(1, MAX_PRODUCTS // len(place) ** 2)  # [B, t, t] of 700 tasks would be 1 GB
        routings = [*part.output.routings.values()][-1:]
        weights = [at_least_float32(routing.weights.detach()) for routing in routings]  # [B, t, E], or [t, E] if static
        for start in range(0, len(gradient), size):
            rows = at_least_float32(gradient[start : start + size]).flatten(2)
            inner = rows @ rows.mT
            for weight in weights:
                weight = weight[start : start + size] if weight.dim() == 3 else weight
                inner = inner * (weight @ weight.mT)
            products[place[:, None], place] += inner.sum(0).to(products.dtype)
    return products


def _aggregated(aggregator: Any, matrix: Tensor, seed: int, step: int) -> Tensor:
    """Return the vector ``[P]`` into which ``aggregator`` combines the rows of ``matrix [T, P]``."""
    with torch.no_grad(), seeded_rng(seed, step, matrix), warnings.catch_warnings():
        for message in HARMLESS_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        result: Tensor = aggregator(matrix)
    return result
