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
_ONE = torch.tensor(1.0)  # on the host: any device takes it without waiting
_HUGE = 1e37  # its negative is below every exponent, and within float32
_AT_ONCE = 2**19  # numbers of a part: what is written is read again while it is in the cache


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
        shares, q = leaf.new_empty(tasks, experts - 1, 2, k, rows), torch.empty_like(leaf)  # that go left and right
        slope, entropy_slope = (torch.empty_like(like) if any(ctx.needs_input_grad) else None for like in (split, leaf))
        weights, entropies = leaf.new_empty(tasks, experts, rows), leaf.new_empty(tasks, rows)
        for part in _parts(leaf, leaf[0].numel()):
            _smooth_steps(split[part], gamma, shares[part], 2, 0, None if slope is None else slope[part])
            _descend(nodes[part], shares[part])
            v = _leaves(nodes[part], order)
            # exp(a + log(v + eps)) as a product. What is not reached counts neither for the largest nor for the sum.
            # Multiplications, and no exponent below -80: comparing, filling and exponentials that underflow take many
            # times as long
            reached = v.sign()
            u = torch.add(leaf[part], reached - 1, alpha=_HUGE, out=q[part])
            u.sub_(u.amax((1, 2), keepdim=True)).clamp_(min=-80.0).exp_()
            u.mul_(reached.mul_(LOG_EPS).add_(v))
            torch.sum(u, 2, out=weights[part])
            total = weights[part].sum(1, keepdim=True)  # one softmax over all leaves of all trees
            weights[part].div_(total)
            if slope is not None:
                u.div_(total[:, None])
            _entropy(v, entropies[part], None if entropy_slope is None else entropy_slope[part])
        ctx.save_for_backward(shares, slope, entropy_slope, nodes, q, weights)
        ctx.order = order
        return weights, _leaves(nodes, order), entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_weights: Tensor | None, grad_v: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor, Tensor, None, None]:
        shares, slope, entropy_slope, nodes, q, weights = ctx.saved_tensors
        grad_split, grad_leaf, experts = torch.empty_like(slope), torch.empty_like(q), q.shape[1]
        if grad_weights is not None:
            grad_weights = grad_weights.contiguous()
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
                grad.addcmul_(entropy_slope[part], grad_entropies[part][:, None, None], value=-1.0)
            if ctx.order is not None:
                g[:, experts - 1 :].index_copy_(1, ctx.order, grad)
            _ascend(g, shares[part], grad_split[part])
            grad_split[part].mul_(nodes[part, : experts - 1]).mul_(slope[part])
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
        shares = bits.new_empty(tasks, k, m, 2, rows)  # 1 - S and S of each bit
        slope = torch.empty_like(bits) if any(ctx.needs_input_grad) else None
        codes = bits.new_empty(tasks, k, 2**m, rows)
        weights, entropies = bits.new_empty(tasks, experts, rows), bits.new_empty(tasks, rows)
        entropy_slope = bits.new_empty(tasks, k, experts, rows) if any(ctx.needs_input_grad) else None
        for part in _parts(bits, k * 2**m * rows):
            _smooth_steps(bits[part], gamma, shares[part], 3, 1, None if slope is None else slope[part])
            _codes(shares[part], codes[part])
            v = codes[part][:, :, :experts]
            torch.mul(v[:, 0], mix[part, 0, None], out=weights[part])
            for selector in range(1, k):
                weights[part].addcmul_(v[:, selector], mix[part, selector, None])
            _entropy(v, entropies[part], None if entropy_slope is None else entropy_slope[part])
        ctx.save_for_backward(shares, slope, mix, entropy_slope, codes)
        return weights, codes[:, :, :experts], entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_weights: Tensor | None, grad_v: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor, Tensor, None, None]:
        shares, slope, mix, entropy_slope, codes = ctx.saved_tensors
        experts = entropy_slope.shape[2]
        grad_bits, grad_mix = torch.empty_like(slope), torch.zeros_like(mix)
        if grad_weights is not None:
            grad_weights = grad_weights.contiguous()
        for part in _parts(slope, codes[0].numel()):
            g = torch.empty_like(codes[part])
            v, grad = codes[part][:, :, :experts], g[:, :, :experts]
            if experts < g.shape[2]:
                g[:, :, experts:] = 0
            if grad_weights is None:
                grad.zero_()
            else:
                _into(grad, torch.mul, mix[part][:, :, None], grad_weights[part][:, None])
                torch.sum(v * grad_weights[part][:, None], 2, out=grad_mix[part])
            if grad_v is not None:
                grad += grad_v[part]
            if grad_entropies is not None:
                grad.addcmul_(entropy_slope[part], grad_entropies[part][:, None, None], value=-1.0)
            for bit, (zero, one) in enumerate(_codes_backward(g, shares[part])):
                _into(grad_bits[part, :, bit], torch.sub, one, zero)
            grad_bits[part].mul_(slope[part])
        return grad_bits, grad_mix, None, None


def _codes(shares: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the products ``[t, K, 2^m, B]`` over the bits' shares ``[t, K, m, 2, B]``, the first bit the outermost."""
    t, k, m, _, rows = shares.shape
    if m > 1:
        first, last = _codes(shares[:, :, : m // 2]), _codes(shares[:, :, m // 2 :])
        out = shares.new_empty(t, k, 2**m, rows) if out is None else out
        _into(out.view(t, k, first.shape[2], last.shape[2], rows), torch.mul, first[:, :, :, None], last[:, :, None])
        return out
    code = shares[:, :, 0] if m else shares.new_ones(t, k, 1, rows)
    return code if out is None else out.copy_(code)


def _codes_backward(grad: Tensor, shares: Tensor) -> list[tuple[Tensor, Tensor]]:
    """From the gradient of ``_codes`` return those of each bit's two shares, ``[t, K, B]`` each."""
    t, k, m, _, rows = shares.shape
    if m < 2:
        zero, one = grad.unbind(2) if m else (grad, grad)
        return [(zero, one)] * m
    first, last = shares[:, :, : m // 2], shares[:, :, m // 2 :]
    of_first, of_last = _codes(first), _codes(last)
    grad = grad.view(t, k, of_first.shape[2], of_last.shape[2], rows)
    to_first, to_last = (grad * of_last[:, :, None]).sum(3), (grad * of_first[:, :, :, None]).sum(2)
    return _codes_backward(to_first, first) + _codes_backward(to_last, last)


def _into(out: Tensor, function: Callable[..., Tensor], *arguments: Any, **options: Any) -> None:
    """Write a result into a part of a tensor; torch cannot compile ``out=`` of a part that has gaps."""
    if torch.compiler.is_compiling():
        out.copy_(function(*arguments, **options))
    else:
        function(*arguments, **options, out=out)


def _parts(tasks: Tensor, numbers: int) -> Iterator[slice]:
    """Yield slices of the tasks, on a CPU as many at once as stay in the cache, a task having so many ``numbers``."""
    step = max(1, _AT_ONCE // max(1, numbers)) if tasks.device.type == "cpu" else len(tasks)
    for start in range(0, len(tasks), step):
        yield slice(start, start + step)


def _levels(inner: int) -> Iterator[tuple[slice, slice]]:
    """Yield the heap ids of the splits of each level, and of their children: left, right, left, right..."""
    first = 0
    while first < inner:
        last = min(2 * first + 1, inner)
        yield slice(first, last), slice(2 * first + 1, 2 * last + 1)
        first = 2 * first + 1


def _smooth_steps(t: Tensor, gamma: float, out: Tensor, dim: int, first: int, slope: Tensor | None) -> None:
    """Write S(t) to place ``first`` of ``out``'s dimension ``dim``, 1 - S(t) = S(-t) to the other, S'(t) to ``slope``.

    See ``smooth_step``. ``t`` and ``slope [t, ..., B]``; ``out`` has two more places between these. With s the part of
    the way from the lower end of the slope to the upper, and p = s (1 - s), S is s (s + 2p) and S' is 6 p / gamma.
    """
    both, slope = torch.empty_like(out), torch.empty_like(t) if slope is None else slope
    s, other = both.select(dim, first), both.select(dim, 1 - first)
    _into(s, torch.div, t, gamma)
    s.clamp_(-0.5, 0.5).add_(0.5)  # exactly 0 and 1 at the ends, which 0.5 + t * (1 / gamma) can miss
    _into(other, torch.sub, _ONE, s)
    _into(slope, torch.mul, s, other)
    torch.add(both, slope.unsqueeze(dim), alpha=2.0, out=out).mul_(both)
    slope.mul_(6.0 / gamma)


def _entropy(v: Tensor, out: Tensor, slope: Tensor | None) -> None:
    """Write the entropies of ``v [t, ., ., B]`` to ``out [t, B]``, and the negative derivatives by v to ``slope``."""
    inside = v + ENTROPY_EPS
    log = torch.log(inside, out=slope)
    torch.sum(log * v, (1, 2), out=out).neg_()
    if slope is not None:
        log.addcdiv_(v, inside)


def _descend(nodes: Tensor, shares: Tensor) -> None:
    """Fill ``nodes [t, 2E-1, K, B]`` from the shares ``[t, E-1, 2, K, B]`` that go left and right at the splits."""
    nodes[:, 0] = 1
    for here, below in _levels(shares.shape[1]):
        reached = shares[:, here]
        _into(nodes[:, below].view(reached.shape), torch.mul, nodes[:, here, None], reached)


def _ascend(g: Tensor, shares: Tensor, grad: Tensor) -> None:
    """From the gradients ``g`` of the leaves fill in those of the other nodes; at the splits, what left has on right.

    The last is ``grad [t, E-1, K, B]``, the gradient of a split's S but for the probability to pass there.
    """
    for here, below in reversed(list(_levels(shares.shape[1]))):
        share = shares[:, here]
        left, right = g[:, below].view(share.shape).unbind(2)
        _into(grad[:, here], torch.sub, left, right)
        if here.start:
            _into(g[:, here], torch.lerp, right, left, share[:, :, 0])


def _leaves(nodes: Tensor, order: Tensor | None) -> Tensor:
    """Return the leaves ``[t, E, K, B]`` of ``nodes [t, 2E-1, K, B]`` in the order of the experts."""
    leaves = nodes[:, nodes.shape[1] // 2 :]
    return leaves if order is None else leaves.index_select(1, order)
