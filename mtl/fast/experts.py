"""Dense experts on a CPU: affine maps with relu, dropout and the mixture, each as one function with its own backward.

Autograd's own pieces keep every intermediate result and pass through memory once for each. ``h`` below is a layer's
result after relu and dropout, without the factor of the units that are kept: this factor is multiplied into whatever is
smaller. Where h is positive, relu and dropout let the gradient pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtl import compat
from mtl.dropout import Masks
from mtl.fast.grouped import grouped_backward, grouped_product, weighted_sums
from mtl.fast.matmul import apply, once_differentiable, onednn_multiplies, product, products, round_up

if TYPE_CHECKING:  # at run time the arrow points the other way
    from mtl.experts.dense import StackedDense
    from mtl.experts.ffn import StackedFFN
    from mtl.experts.pairs import Pairs

Subset = Sequence[int] | None


def outputs(experts: StackedDense, /, x: Tensor, subset: Subset = None, masks: Masks | None = None) -> Tensor:
    """The fast version of ``StackedDense.outputs``."""
    h = _hidden(x, experts.parameters_of_layers(subset), subset, masks)
    h = h if h.dim() == 3 else h[:, None]
    return h.expand(-1, experts.num_experts if subset is None else len(subset), -1)


def mixture(
    experts: StackedDense, /, x: Tensor, weights: Tensor, subset: Subset = None, masks: Masks | None = None
) -> Tensor:
    """The fast version of ``StackedDense.mixture``."""
    layers = experts.parameters_of_layers(subset)
    if not layers:
        return torch.matmul(weights.to(x.dtype), outputs(experts, x, subset))
    h, (weight, bias) = _hidden(x, layers[:-1], subset, masks), layers[-1]
    rows = None if masks is None else masks.rows(len(x), subset, x.device)
    result: Tensor = apply(_LayerAndMix, h, weight, bias, weights.to(h.dtype), masks, len(layers) - 1, rows)
    return result


def pairs_mixture(
    experts: StackedDense, /, x: Tensor, weights: Tensor, pairs: Pairs, masks: Masks | None = None
) -> Tensor:
    """The fast version of ``StackedDense.pairs_mixture``."""
    layout = PairsLayout(pairs, onednn_multiplies(x))
    return gathered_mixture(experts, x.index_select(0, layout.sample), weights, layout, masks)


def gathered_mixture(
    experts: StackedDense, x: Tensor, weights: Tensor, layout: PairsLayout, masks: Masks | None = None
) -> Tensor:
    """Return the mixture ``[B, T, H]`` from ``x [P, D]``, the inputs of the pairs in ``layout``."""
    layers, weights = experts.parameters_of_layers(), weights.to(x.dtype)
    rows = None if masks is None else masks.pair_rows(layout.sample, layout.expert)
    for index, (weight, bias) in enumerate(layers[:-1]):
        x = apply(_PairsLayer, x, weight, bias, layout, masks, index, rows)
    result: Tensor
    if not layers:
        result = apply(_MixPairs, x, weights, layout)
    else:
        result = apply(_PairsLayerAndMix, x, *layers[-1], weights, layout, masks, len(layers) - 1, rows)
    return result


def ffn_pairs_mixture(
    experts: StackedFFN, /, x: Tensor, weights: Tensor, pairs: Pairs, masks: Masks | None = None
) -> Tensor:
    """The fast version of ``StackedFFN.pairs_mixture``."""
    layout = PairsLayout(pairs, onednn_multiplies(x))
    outputs = experts.pairs_outputs(x, layout.sample, layout.expert, layout.counts, masks)
    result: Tensor = apply(_MixPairs, outputs, weights.to(outputs.dtype), layout)
    return result


def _hidden(x: Tensor, layers: Sequence[tuple[Tensor, Tensor]], subset: Subset, masks: Masks | None) -> Tensor:
    """Return the output of ``layers``, ``[B, E, H]``; without layers ``x``."""
    rows = None if masks is None else masks.rows(len(x), subset, x.device)
    for index, (weight, bias) in enumerate(layers):
        x = apply(_Layer, x.to(weight.dtype), weight, bias, masks, index, rows)
    return x


class PairsLayout:
    """The pairs of sparse execution as matrix products and sums want them.

    ``counts [E]``, ``sample [P]``, ``expert [P]``: the pairs, sorted by expert. With ``fill``, each expert's are filled
    up with pairs of sample 0 to a count for which oneDNN has compiled a kernel (see ``round_up``); nobody reads the
    outputs of these. The N nonzero weights are listed twice, by pair and by output (a task of a sample).
    """

    def __init__(self, pairs: Pairs, fill: bool) -> None:
        self.counts, self.sample, self.expert = pairs.counts, pairs.sample, pairs.expert
        self._nonzero, self._number = pairs.nonzero, pairs.number
        if not fill or (filled := round_up(pairs.counts)) == pairs.counts:
            return
        added = accumulate((new - old for new, old in zip(filled, pairs.counts, strict=True)), initial=0)
        before = torch.tensor(list(added))[:-1]  # how many pairs were filled in before those of expert e
        index = torch.arange(len(pairs.sample)) + before[pairs.expert]
        self.counts = filled
        self.sample = index.new_zeros(sum(filled)).index_copy_(0, index, pairs.sample)
        self.expert = torch.arange(len(filled)).repeat_interleave(torch.tensor(filled), output_size=sum(filled))
        self._number = pairs.number + before[:, None]

    def by_pair(self) -> Entries:
        """List the nonzero weights by pair: their sources are outputs."""
        e, b, t = self._nonzero.permute(2, 0, 1).nonzero(as_tuple=True)
        return Entries(t * len(self._nonzero) + b, self._number[e, b], (b, t, e), len(self.sample))

    def by_output(self) -> Entries:
        """List the nonzero weights by output, task by task: their sources are pairs."""
        t, b, e = self._nonzero.transpose(0, 1).nonzero(as_tuple=True)
        num_samples, num_tasks, _ = self._nonzero.shape
        return Entries(self._number[e, b], t * num_samples + b, (b, t, e), num_tasks * num_samples)


class Entries:
    """A list of the N nonzero weights, each from a ``source [N]`` to a ``target [N]``, sorted by target.

    ``index``: sample, task and expert of each weight, ``[N]``.
    """

    def __init__(self, source: Tensor, target: Tensor, index: tuple[Tensor, Tensor, Tensor], num_targets: int) -> None:
        self.source, self.target, self.index = source, target, index
        counts = torch.bincount(target, minlength=num_targets)
        self.starts = counts.cumsum(0).sub_(counts)  # where the entries of each target begin

    def sums(self, values: Tensor, weights: Tensor) -> Tensor:
        """Return for each target the weighted sum of its sources: ``values [sources, H]``, ``weights [N]``."""
        return weighted_sums(values, self.source, self.starts, weights)

    def dots(self, sources: Tensor, targets: Tensor) -> Tensor:
        """Return the product ``[N]`` of each source with its target, rows of ``[sources, H]`` and ``[targets, H]``."""
        operator = compat.lookup("torch.ops.aten._embedding_bag_per_sample_weights_backward")
        if operator is None or not len(self.source):
            return (sources.index_select(0, self.source) * targets.index_select(0, self.target)).sum(1)
        result: Tensor = operator(targets, sources, self.source, self.starts, self.target, 0)
        return result


# Layers on all samples


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, masks: Masks | None, layer: int, rows: Tensor | None
    ) -> Tensor:
        h, ctx.scale = _forward(x, weight, bias, masks, layer, rows)
        if ctx.scale != 1.0:
            h.mul_(ctx.scale)
        ctx.save_for_backward(x, weight, h)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, h = ctx.saved_tensors
        grad_h = relu_backward(grad, h)
        if ctx.scale != 1.0:
            grad_h.mul_(ctx.scale)
        return *_backward(grad_h, x, weight, ctx.needs_input_grad[0]), None, None, None


class _LayerAndMix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        weights: Tensor,
        masks: Masks | None,
        layer: int,
        rows: Tensor | None,
    ) -> Tensor:
        x = x.to(weight.dtype)
        h, ctx.scale = _forward(x, weight, bias, masks, layer, rows)
        scaled = weights * ctx.scale
        ctx.save_for_backward(x, weight, h, scaled)
        return torch.matmul(scaled, h)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, h, scaled = ctx.saved_tensors
        grad_weights = None
        if ctx.needs_input_grad[3]:
            grad_weights = torch.matmul(grad, h.transpose(1, 2)).mul_(ctx.scale)  # [B, T, E]
            grad_weights = grad_weights.sum(0) if scaled.dim() == 2 else grad_weights
        across = scaled.transpose(-1, -2).expand(len(grad), -1, -1)
        # Expert by expert in memory, if h is, for the products to come
        grad_h = torch.bmm(across, grad, out=torch.empty_like(h))  # [B, E, H]
        grads = _backward(relu_backward(grad_h, h), x, weight, ctx.needs_input_grad[0])
        return *grads, grad_weights, None, None, None


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor, masks: Masks | None, layer: int, rows: Tensor | None
) -> tuple[Tensor, float]:
    """Return h ``[B, E, H]`` and the factor of the units that are kept."""
    num_experts, width, _ = weight.shape
    one_matrix = x.dim() == 2
    if one_matrix:
        h = product(x, weight.flatten(0, 1).t(), bias.flatten(), relu=True).view(len(x), num_experts, width)
    else:
        h = products(x.transpose(0, 1), weight.transpose(1, 2), bias, relu=True).transpose(0, 1)
    if masks is None or rows is None:
        return h, 1.0
    if one_matrix:
        h.mul_(masks.keep(layer, rows.flatten(), width, h.dtype).view_as(h))
    else:  # h lies expert by expert in memory, and so does the mask
        mask = masks.keep(layer, rows.t().flatten(), width, h.dtype)
        h.mul_(mask.view(num_experts, len(x), width).transpose(0, 1))
    return h, masks.scale


def _backward(grad: Tensor, x: Tensor, weight: Tensor, needs_x: bool) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of x, weight and bias from ``grad [B, E, H]``, that of the affine maps."""
    if x.dim() == 2:
        flat = grad.flatten(1)
        grad_weight = product(flat.t(), x).view_as(weight)
        return product(flat, weight.flatten(0, 1)) if needs_x else None, grad_weight, grad.sum(0)
    by_expert = grad.transpose(0, 1)  # [E, B, H]
    grad_weight = products(by_expert.transpose(1, 2), x.transpose(0, 1))
    return products(by_expert, weight).transpose(0, 1) if needs_x else None, grad_weight, grad.sum(0)


def relu_backward(grad: Tensor, h: Tensor) -> Tensor:
    """Return ``grad`` where ``h`` is positive, else 0, in the memory layout of ``h``."""
    operator = compat.lookup("torch.ops.aten.threshold_backward")
    result: Tensor = operator(grad, h, 0) if operator else grad * (h > 0)
    return result


# Layers on the pairs alone


class _PairsLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        layout: PairsLayout,
        masks: Masks | None,
        layer: int,
        rows: Tensor | None,
    ) -> Tensor:
        x, ctx.layout = x.to(weight.dtype), layout
        h, ctx.scale = _pairs_forward(x, weight, bias, layout, masks, layer, rows)
        if ctx.scale != 1.0:
            h.mul_(ctx.scale)
        ctx.save_for_backward(x, weight, h)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, h = ctx.saved_tensors
        grad_h = relu_backward(grad.contiguous(), h)
        if ctx.scale != 1.0:
            grad_h.mul_(ctx.scale)
        grads = grouped_backward(grad_h, x, weight, ctx.layout.counts, ctx.needs_input_grad[0])
        return *grads, None, None, None, None


class _PairsLayerAndMix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        weights: Tensor,
        layout: PairsLayout,
        masks: Masks | None,
        layer: int,
        rows: Tensor | None,
    ) -> Tensor:
        x, ctx.layout = x.to(weight.dtype), layout
        h, ctx.scale = _pairs_forward(x, weight, bias, layout, masks, layer, rows)
        ctx.save_for_backward(x, weight, h, weights)
        return _mix(h, weights, layout, ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, h, weights = ctx.saved_tensors
        grad_h, grad_weights = _mix_backward(grad, h, weights, ctx.layout, ctx.scale, ctx.needs_input_grad[3])
        grads = grouped_backward(relu_backward(grad_h, h), x, weight, ctx.layout.counts, ctx.needs_input_grad[0])
        return *grads, grad_weights, None, None, None, None


class _MixPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weights: Tensor, layout: PairsLayout) -> Tensor:
        ctx.save_for_backward(outputs, weights)
        ctx.layout = layout
        return _mix(outputs, weights, layout, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        outputs, weights = ctx.saved_tensors
        return *_mix_backward(grad, outputs, weights, ctx.layout, 1.0, ctx.needs_input_grad[1]), None


def _mix(outputs: Tensor, weights: Tensor, layout: PairsLayout, scale: float) -> Tensor:
    """Return the mixture ``[B, T, H]`` of ``outputs [P, H]``, times ``scale``; in memory it lies task by task."""
    entries = layout.by_output()
    num_samples, num_tasks, _ = weights.shape
    mixed = entries.sums(outputs, weights[entries.index].mul_(scale))
    return mixed.view(num_tasks, num_samples, outputs.shape[1]).transpose(0, 1)


def _mix_backward(
    grad: Tensor, outputs: Tensor, weights: Tensor, layout: PairsLayout, scale: float, needs_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of ``outputs`` and ``weights`` from that of the mixture, ``grad [B, T, H]``."""
    entries, grad_weights = layout.by_pair(), None
    grad = grad.transpose(0, 1).flatten(0, 1)  # [T B, H]
    if needs_weights:
        grad_weights = torch.zeros_like(weights)
        grad_weights[entries.index] = entries.dots(grad, outputs).mul_(scale)
    return entries.sums(grad, weights[entries.index].mul_(scale)), grad_weights


def _pairs_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    layout: PairsLayout,
    masks: Masks | None,
    layer: int,
    rows: Tensor | None,
) -> tuple[Tensor, float]:
    """Return h ``[P, H]`` and the factor of the units that are kept."""
    h = grouped_product(x, weight.transpose(1, 2), layout.counts, bias, relu=True)
    if masks is None or rows is None:
        return h, 1.0
    return h.mul_(masks.keep(layer, rows, h.shape[1], h.dtype)), masks.scale
