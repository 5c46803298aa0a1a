"""The weights of COMET and DSelect-k, and Sinkhorn's rounds, on a CPU: each one function with its own backward.

Inside, the samples are the last dimension, so that each operation runs over long contiguous rows. Both gates take the
smooth step S(t) with s = t / gamma + 1/2, clamped to [0, 1], and p = s (1 - s): then S(t) = s (s + 2 p),
1 - S(t) = (1 - s) (1 - s + 2 p) and S'(t) = 6 p / gamma.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mtl.fast.matmul import apply, once_differentiable, transposed
from mtl.functional import LOG_EPS

_HUGE = 1e37  # its negative is below every exponent, and within float32


def comet_weights(split: Tensor, leaf: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """The fast version of ``mtl.gates.comet.comet_weights``."""
    if split.dim() == 3:  # the tasks of a static gate are the samples of one task: loops over samples are the fast ones
        weights, v = comet_weights(split[:, None], leaf[:, None], gamma)
        return weights[:, 0], v[:, 0]
    weights, v = apply(_CometWeights, split, leaf, gamma)
    return weights, v


class _CometWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: Tensor, leaf: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        split, leaf = _samples_last(split), _samples_last(leaf)  # [T, E-1, K, B], [T, E, K, B]
        tasks, experts, k, rows = leaf.shape
        left, right, slope = _smooth_steps(split, gamma)
        nodes = leaf.new_empty(tasks, 2 * experts - 1, k, rows)  # the probability to reach each node, by heap id
        nodes[:, 0] = 1
        for here, below in _levels(experts - 1):
            children = _children(nodes, below)
            torch.mul(nodes[:, here], left[:, here], out=children[:, :, 0])
            torch.mul(nodes[:, here], right[:, here], out=children[:, :, 1])
        order = _leaf_order(experts)
        v = nodes[:, experts - 1 :] if order is None else nodes[:, experts - 1 :].index_select(1, order)
        # q = exp(a) (v + eps) over its sum, and 0 where v = 0. Such leaves count neither for the largest a nor for the
        # sum. Only sums and products, and no exponent below -80: masks and exponentials that underflow take longer
        reached = v.sign()
        q = torch.add(leaf, reached - 1, alpha=_HUGE)
        q.sub_(q.amax((1, 2), keepdim=True)).clamp_(min=-80.0).exp_()
        q.mul_(reached.mul_(LOG_EPS).add_(v))
        weights = q.sum(2)  # [T, E, B]
        total = weights.sum(1, keepdim=True)
        weights.div_(total)
        q.div_(total[:, None])
        ctx.save_for_backward(left, slope, nodes, v, q, weights)
        return transposed(weights).transpose(0, 1), v.permute(3, 0, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_weights: Tensor | None, grad_v: Tensor | None) -> tuple[Tensor, Tensor, None]:
        left, slope, nodes, v, q, weights = ctx.saved_tensors
        experts = v.shape[1]
        grad_leaf, grad = torch.zeros_like(q), None
        if grad_weights is not None:  # through the softmax to the logits a + log(v + eps)
            g = _samples_last(grad_weights)  # [T, E, B]
            mean = (weights * g).sum(1, keepdim=True)
            torch.mul(q, (g - mean)[:, :, None], out=grad_leaf)
            grad = grad_leaf / (v + LOG_EPS)
        if grad_v is not None:
            direct = grad_v.permute(1, 2, 3, 0)
            grad = direct if grad is None else grad.add_(direct)
        grad_nodes = torch.zeros_like(nodes)
        order = _leaf_order(experts)
        if grad is not None:
            leaves = grad_nodes[:, experts - 1 :]
            leaves.copy_(grad) if order is None else leaves.index_copy_(1, order, grad)
        # From the leaves up: a node's gradient is that of its children, weighted by the probabilities to go there
        grad_split = torch.empty_like(left)
        for here, below in reversed(list(_levels(experts - 1))):
            to_left, to_right = _children(grad_nodes, below).unbind(2)
            torch.sub(to_left, to_right, out=grad_split[:, here])
            torch.lerp(to_right, to_left, left[:, here], out=grad_nodes[:, here])
        grad_split.mul_(nodes[:, : experts - 1]).mul_(slope)
        return _samples_first(grad_split), _samples_first(grad_leaf), None


def dselect_weights(bits: Tensor, mix: Tensor, gamma: float, num_experts: int) -> tuple[Tensor, Tensor]:
    """The fast version of ``mtl.gates.dselect_k.dselect_weights``."""
    if mix.dim() == 2:  # the tasks of a static gate are the samples of one task: loops over samples are the fast ones
        weights, selectors = dselect_weights(bits[:, None], mix[:, None], gamma, num_experts)
        return weights[:, 0], selectors[:, 0]
    weights, selectors = apply(_DSelectWeights, bits, mix.softmax(-1), gamma, num_experts)
    return weights, selectors


class _DSelectWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bits: Tensor, mix: Tensor, gamma: float, num_experts: int) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        bits, mix = _samples_last(bits), _samples_last(mix)  # [T, K, m, B], [T, K, B]
        one, zero, slope = _smooth_steps(bits, gamma)
        shares = torch.stack([zero, one], 3)  # [T, K, m, 2, B]
        codes = _codes(shares)  # [T, K, 2^m, B]
        selectors = codes[:, :, :num_experts]
        weights = (selectors * mix[:, :, None]).sum(1)  # [T, E, B]
        ctx.save_for_backward(shares, slope, mix, codes)
        ctx.num_experts = num_experts
        return transposed(weights).transpose(0, 1), selectors.permute(3, 0, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_weights: Tensor | None, grad_s: Tensor | None) -> tuple[Tensor, Tensor, None, None]:
        shares, slope, mix, codes = ctx.saved_tensors
        grad_mix, grad_codes = torch.zeros_like(mix), torch.zeros_like(codes)
        grad = grad_codes[:, :, : ctx.num_experts]
        if grad_weights is not None:
            g = _samples_last(grad_weights)[:, None]  # [T, 1, E, B]
            torch.mul(mix[:, :, None], g, out=grad)
            grad_mix = (codes[:, :, : ctx.num_experts] * g).sum(2)
        if grad_s is not None:
            grad += grad_s.permute(1, 2, 3, 0)
        by_bit = [one - zero for zero, one in _codes_backward(grad_codes, shares)]
        grad_bits = torch.stack(by_bit, 2).mul_(slope) if by_bit else torch.zeros_like(slope)
        return _samples_first(grad_bits), _samples_first(grad_mix), None, None


def sinkhorn(logits: Tensor, tau: float, rounds: int) -> Tensor:
    """The fast version of ``mtl.gates.permuted.sinkhorn``: autograd's graph of 300 steps takes three times as long."""
    result: Tensor = apply(_Sinkhorn, logits.double() / tau, rounds)
    return result.to(logits.dtype)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_matrix: Tensor, rounds: int) -> Tensor:
        x = log_matrix.clone()
        steps = x.new_empty(2 * rounds, *x.shape) if ctx.needs_input_grad[0] else None
        for step in range(2 * rounds):
            x -= torch.logsumexp(x, -2 if step % 2 else -1, keepdim=True)  # rows first
            if steps is not None:
                torch.exp(x, out=steps[step])
        if steps is not None:
            ctx.save_for_backward(steps)
        return x.exp()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (steps,) = ctx.saved_tensors
        grad = grad * steps[-1]  # of exp
        for step in range(len(steps) - 1, -1, -1):
            # Of x - logsumexp(x): the gradient, minus its sum times the softmax of x, which is the step's result
            grad.addcmul_(steps[step], grad.sum(-2 if step % 2 else -1, keepdim=True), value=-1)
        return grad, None


def _codes(shares: Tensor) -> Tensor:
    """Return the products ``[T, K, 2^m, B]`` of one of each bit's ``shares [T, K, m, 2, B]``, first bit outermost."""
    tasks, k, m, _, rows = shares.shape
    if m > 1:  # products of two half codes: fewer multiplications than bit by bit
        first, last = _codes(shares[:, :, : m // 2]), _codes(shares[:, :, m // 2 :])
        return (first[:, :, :, None] * last[:, :, None]).view(tasks, k, 2**m, rows)
    return shares[:, :, 0] if m else shares.new_ones(tasks, k, 1, rows)


def _codes_backward(grad: Tensor, shares: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the gradients of each bit's two shares, ``[T, K, B]`` each, from that of ``_codes``."""
    tasks, k, m, _, rows = shares.shape
    if m < 2:
        zero, one = grad.unbind(2) if m else (grad, grad)
        return [(zero, one)] * m
    first, last = shares[:, :, : m // 2], shares[:, :, m // 2 :]
    first_codes, last_codes = _codes(first), _codes(last)
    grad = grad.view(tasks, k, first_codes.shape[2], last_codes.shape[2], rows)
    to_first, to_last = (grad * last_codes[:, :, None]).sum(3), (grad * first_codes[:, :, :, None]).sum(2)
    return _codes_backward(to_first, first) + _codes_backward(to_last, last)


def _smooth_steps(t: Tensor, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return S(t), 1 - S(t) and S'(t); see the module's docstring."""
    s = torch.div(t, gamma).clamp_(-0.5, 0.5).add_(0.5)  # exactly 0 and 1 at the ends
    r = 1.0 - s
    p = s * r
    return torch.add(s, p, alpha=2.0).mul_(s), torch.add(r, p, alpha=2.0).mul_(r), p.mul_(6.0 / gamma)


def _levels(inner: int) -> Iterator[tuple[slice, slice]]:
    """Yield the heap ids of the splits of each level, and of their children: left, right, left, right..."""
    first = 0
    while first < inner:
        last = min(2 * first + 1, inner)
        yield slice(first, last), slice(2 * first + 1, 2 * last + 1)
        first = 2 * first + 1


def _children(nodes: Tensor, below: slice) -> Tensor:
    """Return the nodes ``below`` of ``nodes [T, N, K, B]`` as a view ``[T, n, 2, K, B]`` of (left, right) pairs."""
    tasks, _, k, rows = nodes.shape
    return nodes[:, below].view(tasks, (below.stop - below.start) // 2, 2, k, rows)  # -1 is ambiguous without rows


def _leaf_order(experts: int) -> Tensor | None:
    """Return which leaf, in order of heap ids, is expert i, ``[E]``; None where leaf i is expert i."""
    upper = 2 ** (experts - 1).bit_length() - experts  # leaves that are one level above the others
    return torch.arange(experts).roll(-upper) if upper else None


def _samples_last(x: Tensor) -> Tensor:
    """Return ``x [B, ...]`` as ``[..., B]``, contiguous."""
    moved = x.movedim(0, -1)
    return moved if moved.is_contiguous() else transposed(x.flatten(1)).view(moved.shape)


def _samples_first(x: Tensor) -> Tensor:
    """Return ``x [..., B]`` as ``[B, ...]``, contiguous."""
    return transposed(x.flatten(0, -2)).view(x.shape[-1], *x.shape[:-1])
