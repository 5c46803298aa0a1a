"""The fused arithmetic of COMET and DSelect-k equals the equations written out, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtl.functional import entropy, smooth_step
from mtl.gates import CometGate, kernels
from mtl.gates.kernels import comet_route, dselect_route


def plain(split: Tensor, leaf: Tensor, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights, leaf probabilities and entropies: a walk from each leaf up to the root."""
    experts = leaf.shape[1]
    order = CometGate(1, experts, 2).leaf_order + experts - 1
    v = []
    for node in order.tolist():
        probability = torch.ones_like(leaf[:, 0])
        while node:
            parent, left = (node - 1) // 2, node % 2 == 1
            probability = probability * smooth_step(split[:, parent] * (1 if left else -1), gamma)
            node = parent
        v.append(probability)
    leaves = torch.stack(v, 1)
    scores = torch.where(leaves > 0, leaf + torch.log(leaves + 1e-8), -torch.inf)
    weights = scores.flatten(1, 2).softmax(1).view_as(leaves).sum(2)
    return weights, leaves, entropy(leaves, (1, 2))


def logits(experts: int, width: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(experts)
    split, leaf = (torch.randn(3, n, 2, 5, generator=generator, dtype=torch.float64) for n in (experts - 1, experts))
    return (width * split).requires_grad_(), leaf.requires_grad_()


@pytest.mark.parametrize("at_once", [1, 2**18])  # a task at a time, all together
@pytest.mark.parametrize("width", [0.1, 1.0], ids=["open", "partly decided"])
@pytest.mark.parametrize("experts", [1, 2, 3, 5, 6, 8, 16])
def test_equations_of_comet(experts: int, width: float, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_AT_ONCE", at_once)
    split, leaf = logits(experts, width)
    order = CometGate(1, experts, 2).leaf_order
    ours, expected = comet_route(split, leaf, 1.0, order), plain(split, leaf, 1.0)
    for mine, theirs in zip(ours, expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-15)
    check_gradients(ours, expected, [split, leaf])


def check_gradients(ours: tuple[Tensor, ...], expected: tuple[Tensor, ...], leaves: list[Tensor]) -> None:
    pulls = [torch.randn_like(value) for value in expected]
    for chosen in ([0], [1], [2], [0, 1, 2]):  # each output alone, as where no entropy is asked for
        if not any(expected[n].requires_grad for n in chosen):
            continue  # one expert: its probability is 1
        gradients = [
            torch.autograd.grad(
                sum((values[n] * pulls[n]).sum() for n in chosen), leaves, retain_graph=True, allow_unused=True
            )
            for values in (ours, expected)
        ]
        for mine, theirs in zip(*gradients, strict=True):
            theirs = torch.zeros_like(mine) if theirs is None else theirs
            assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("at_once", [1, 2**18])
@pytest.mark.parametrize("width", [0.1, 1.0], ids=["open", "partly decided"])
@pytest.mark.parametrize("experts", [1, 2, 3, 5, 6, 8, 16])
def test_equations_of_dselect_k(experts: int, width: float, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_AT_ONCE", at_once)
    m = (experts - 1).bit_length()
    bits, mix = (torch.randn(3, 2, *more, 5, dtype=torch.float64) for more in ([m], []))
    bits, mix = (width * bits).requires_grad_(), mix.requires_grad_()
    share = mix.softmax(1)
    codes = []
    for expert in range(experts):
        probability = torch.ones_like(mix)
        for place in range(m):
            one = expert >> (m - 1 - place) & 1  # the first bit is the most significant
            probability = probability * smooth_step(bits[:, :, place] * (1 if one else -1), 1.0)
        codes.append(probability)
    selectors = torch.stack(codes, 2)
    expected = ((share[:, :, None] * selectors).sum(1), selectors, entropy(selectors, (1, 2)))
    ours = dselect_route(bits, mix.softmax(1), 1.0, experts)
    for mine, theirs in zip(ours, expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-15)
    check_gradients(ours, expected, [bits, mix])


def test_flat_splits_have_no_gradient_at_all() -> None:
    split, leaf = logits(8, 1e4)
    weights, v, entropies = comet_route(split, leaf, 1.0, None)
    assert ((v == 0) | (v == 1)).all()
    assert (weights > 0).sum(1).max() <= 2
    (weights.square().sum() + entropies.sum()).backward()
    assert split.grad is not None
    assert not split.grad.any()
    assert leaf.grad is not None
    assert not leaf.grad[(v == 0)].any()


@pytest.mark.parametrize("gamma", [0.015, 0.03, 0.1, 0.7, 1.0, 3.3, 10.0])
@pytest.mark.parametrize("side", [-1, 1])
def test_flat_from_the_ends_on(gamma: float, side: int) -> None:
    """At t = -gamma/2 and gamma/2 themselves the smooth step is exactly 0 and 1, and so are the weights."""
    t = (side * torch.tensor(gamma / 2)).expand(1, 1, 1, 8).clone().requires_grad_()
    weights, v, _ = comet_route(t, torch.zeros(1, 2, 1, 8), gamma, None)
    assert torch.equal(v[0, :, 0], weights[0])
    assert set(weights.flatten().tolist()) == {0.0, 1.0}
    codes, s, _ = dselect_route(t, torch.ones(1, 1, 8), gamma, 2)
    assert set(codes.flatten().tolist()) == set(s.flatten().tolist()) == {0.0, 1.0}
    (weights[0, 0].sum() + codes[0, 0].sum()).backward()
    assert not t.grad.any()
