"""The arithmetic of COMET and DSelect-k, each as one function with its own backward.

Samples stand last in memory and some tasks are taken at a time, so that each operation runs over long rows that are
still in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtl.functional import ENTROPY_EPS, apply_many

LOG_EPS = 1e-8  # inside log(v), as in the reference implementation
_THREE = torch.tensor(3.0)  # a number on the host, which any device takes without waiting
_HUGE = 1e37  # its negative is below every exponent, and within float32
_AT_ONCE = 2**18  # numbers of a part: what is written is read again while it is in the cache


def comet_route(split: Tensor, leaf: Tensor, gamma: float, order: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights ``[T, E, B]``, leaf probabilities v ``[T, E, K, B]`` and the trees' summed entropies ``[T, B]``.

    ``split [T, E-1, K, B]`` by heap id and ``leaf [T, E, K, B]`` by expert are the logits; leaf ``order[i]`` of the
    heap is expert i (None: i). COMET, equations 3 to 5 (Ibrahim et al. 2023).
    """
    weights, v, entropies = apply_many(_CometRoute, split, leaf, gamma, order)
    return weights, v, entropies


class _CometRoute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, split: Tensor, leaf: Tensor, gamma: float, order: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        tasks, experts, k, rows = leaf.shape
        ctx.set_materialize_grads(False)
        nodes = leaf.new_empty(tasks, 2 * experts - 1, k, rows)  # the probability to pass there, by heap id
        left, right, q = torch.empty_like(split), torch.empty_like(split), torch.empty_like(leaf)  # S, 1 - S
        slope, logs = (torch.empty_like(like) if any(ctx.needs_input_grad) else None for like in (split, leaf))
        weights, entropies = leaf.new_empty(tasks, experts, rows), leaf.new_empty(tasks, rows)
        for part in _parts(leaf, leaf[0].numel()):
            s = (split[part] * (1.0 / gamma)).clamp_(-0.5, 0.5).add_(0.5)
            other = 1 - s
            _step(s, left[part])
            _step(other, right[part])
            if slope is not None:
                torch.mul(s, other.mul_(6.0 / gamma), out=slope[part])
            _descend(nodes[part], left[part], right[part])
            v = _leaves(nodes[part], order)
            # exp(a + log(v + eps)) as a product. What is not reached counts neither for the largest nor for the sum.
            # Multiplications, and no exponent below -80: comparing, filling and exponentials that underflow take many
            # times as long
            reached = v.sign()
            u = torch.add(leaf[part], reached - 1, alpha=_HUGE, out=q[part])
            u.sub_(u.amax((1, 2), keepdim=True)).clamp_(min=-80.0).exp_()
            u.mul_(reached.mul_(LOG_EPS).add_(v))
            u.div_(u.sum((1, 2), keepdim=True))  # one softmax over all leaves of all trees
            torch.sum(u, 2, out=weights[part])
            log = torch.add(v, ENTROPY_EPS, out=None if logs is None else logs[part]).log_()
            torch.sum(log * v, (1, 2), out=entropies[part])
        ctx.save_for_backward(left, right, slope, logs, nodes, q, weights)
        ctx.order = order
        return weights, _leaves(nodes, order), entropies.neg_()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_weights: Tensor | None, grad_v: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor, Tensor, None, None]:
        left, right, slope, logs, nodes, q, weights = ctx.saved_tensors
        grad_split, grad_leaf, experts = torch.empty_like(left), torch.empty_like(q), q.shape[1]
        for part in _parts(q, q[0].numel()):
            g, v = torch.empty_like(nodes[part]), _leaves(nodes[part], ctx.order)
            grad = g[:, experts - 1 :] if ctx.order is None else torch.empty_like(v)
            if grad_weights is None:
                grad_leaf[part].zero_()
                grad.zero_()
            else:
                mean = (weights[part] * grad_weights[part]).sum(1, keepdim=True)
                torch.mul(q[part], (grad_weights[part] - mean)[:, :, None], out=grad_leaf[part])
                _into(grad, torch.div, grad_leaf[part], v + LOG_EPS)
            if grad_v is not None:
                grad += grad_v[part]
            if grad_entropies is not None:
                grad.addcmul_(_entropy_slope(v, logs[part]), grad_entropies[part][:, None, None], value=-1.0)
            if ctx.order is not None:
                g[:, experts - 1 :].index_copy_(1, ctx.order, grad)
            _ascend(g, nodes[part], left[part], right[part], grad_split[part])
            grad_split[part].mul_(slope[part])
        return grad_split, grad_leaf, None, None


def dselect_route(bits: Tensor, mix: Tensor, gamma: float, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights ``[T, E, B]``, selectors s ``[T, K, E, B]`` and the selectors' summed entropies ``[T, B]``.

    ``bits [T, K, m, B]`` are logits, the first bit the most significant; ``mix [T, K, B]`` the shares of the selectors.
    DSelect-k, equations 5 to 8 (Hazimeh et al. 2021).
    """
    weights, s, entropies = apply_many(_DSelectRoute, bits, mix, gamma, experts)
    return weights, s, entropies


class _DSelectRoute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bits: Tensor, mix: Tensor, gamma: float, experts: int) -> tuple[Tensor, Tensor, Tensor]:
        tasks, k, m, rows = bits.shape
        ctx.set_materialize_grads(False)
        s = torch.empty_like(bits)
        codes = [bits.new_empty(tasks, k, 2**place, rows) for place in range(m + 1)]  # of the first bits alone
        weights, entropies = bits.new_empty(tasks, experts, rows), bits.new_empty(tasks, rows)
        logs = bits.new_empty(tasks, k, experts, rows) if any(ctx.needs_input_grad) else None  # of v
        for part in _parts(bits, k * 2**m * rows):
            torch.mul(bits[part], 1.0 / gamma, out=s[part])
            s[part].clamp_(-0.5, 0.5).add_(0.5)
            codes[0][part] = 1
            for place in range(m):
                pairs = codes[place + 1][part].view(-1, k, 2**place, 2, rows)
                _into(pairs[:, :, :, 0], torch.mul, codes[place][part], _step(1 - s[part, :, place, None]))
                _into(pairs[:, :, :, 1], torch.mul, codes[place][part], _step(s[part, :, place, None]))
            v = codes[m][part][:, :, :experts]
            torch.mul(v[:, 0], mix[part, 0, None], out=weights[part])
            for selector in range(1, k):
                weights[part].addcmul_(v[:, selector], mix[part, selector, None])
            log = torch.add(v, ENTROPY_EPS, out=None if logs is None else logs[part]).log_()
            torch.sum(log * v, (1, 2), out=entropies[part])
        ctx.save_for_backward(s, mix, logs, *codes)
        ctx.gamma, ctx.experts = gamma, experts
        return weights, codes[m][:, :, :experts], entropies.neg_()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_weights: Tensor | None, grad_v: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor, Tensor, None, None]:
        s, mix, logs, *codes = ctx.saved_tensors
        grad_bits, grad_mix = torch.empty_like(s), torch.zeros_like(mix)
        for part in _parts(s, codes[-1][0].numel()):
            g = torch.zeros_like(codes[-1][part])
            v, grad = codes[-1][part][:, :, : ctx.experts], g[:, :, : ctx.experts]
            if grad_weights is not None:
                _into(grad, torch.mul, mix[part][:, :, None], grad_weights[part][:, None])
                torch.sum(v * grad_weights[part][:, None], 2, out=grad_mix[part])
            if grad_v is not None:
                grad += grad_v[part]
            if grad_entropies is not None:
                grad.addcmul_(_entropy_slope(v, logs[part]), grad_entropies[part][:, None, None], value=-1.0)
            for place in reversed(range(len(codes) - 1)):
                zero, one = g.view(*g.shape[:2], 2**place, 2, -1).unbind(3)
                _into(grad_bits[part, :, place], torch.sum, (one - zero).mul_(codes[place][part]), 2)
                here = s[part, :, place, None]
                g = (zero * _step(1 - here)).addcmul_(one, _step(here))
        return _through_step(grad_bits, s, ctx.gamma), grad_mix, None, None


def _into(out: Tensor, function: Callable[..., Tensor], *arguments: Any) -> None:
    """Write a result into a part of a tensor; torch cannot compile ``out=`` of a part that has gaps."""
    if torch.compiler.is_compiling():
        out.copy_(function(*arguments))
    else:
        function(*arguments, out=out)


def _parts(tasks: Tensor, numbers: int) -> Iterator[slice]:
    """Yield slices of the tasks, on a CPU as many at once as stay in the cache, a task having so many ``numbers``."""
    step = max(1, _AT_ONCE // max(1, numbers)) if tasks.device.type == "cpu" else len(tasks)
    for start in range(0, len(tasks), step):
        yield slice(start, start + step)


def _levels(inner: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield the heap ids of the splits of each level, and of their left and right children."""
    first = 0
    while first < inner:
        last = min(2 * first + 1, inner)
        yield slice(first, last), slice(2 * first + 1, 2 * last + 1, 2), slice(2 * first + 2, 2 * last + 1, 2)
        first = 2 * first + 1


def _step(s: Tensor, out: Tensor | None = None) -> Tensor:
    """Return S = s^2 (3 - 2 s), as ``smooth_step`` has it; without a graph, so in place."""
    return torch.sub(_THREE, s, alpha=2.0, out=out).mul_(s).mul_(s)


def _through_step(grad: Tensor, s: Tensor, gamma: float) -> Tensor:
    """Multiply, in place, by S' = 6 s (1 - s) / gamma: exactly 0 where S is flat."""
    return grad.mul_(s).mul_((1 - s).mul_(6.0 / gamma))


def _entropy_slope(v: Tensor, log: Tensor) -> Tensor:
    """Return the derivative of v log(v + 1e-6), whose logarithm is given."""
    return (v / (v + ENTROPY_EPS)).add_(log)


def _descend(nodes: Tensor, left: Tensor, right: Tensor) -> None:
    """Fill ``nodes [t, 2E-1, K, B]`` from the shares ``[t, E-1, K, B]`` that go left and right at the splits."""
    nodes[:, 0] = 1
    for here, to_left, to_right in _levels(left.shape[1]):
        _into(nodes[:, to_left], torch.mul, nodes[:, here], left[:, here])
        _into(nodes[:, to_right], torch.mul, nodes[:, here], right[:, here])


def _ascend(g: Tensor, nodes: Tensor, left: Tensor, right: Tensor, grad: Tensor) -> None:
    """From the gradients ``g`` of the leaves fill in those of the other nodes, and ``grad`` of S at the splits."""
    for here, to_left, to_right in reversed(list(_levels(left.shape[1]))):
        _into(grad[:, here], torch.sub, g[:, to_left], g[:, to_right])
        grad[:, here].mul_(nodes[:, here])
        _into(g[:, here], torch.mul, g[:, to_left], left[:, here])
        g[:, here].addcmul_(g[:, to_right], right[:, here])


def _leaves(nodes: Tensor, order: Tensor | None) -> Tensor:
    """Return the leaves ``[t, E, K, B]`` of ``nodes [t, 2E-1, K, B]`` in the order of the experts."""
    leaves = nodes[:, nodes.shape[1] // 2 :]
    return leaves if order is None else leaves.index_select(1, order)
