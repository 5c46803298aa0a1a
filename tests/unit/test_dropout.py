"""Dropout masks: the right share is kept, rows and keys choose independent masks, the scale is exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mtl.experts.dense import StackedDense
from mtl.nn.dropout import Masks, dropout_mask

DROPS: list[tuple[float, int]] = [(0.5, 256), (0.25, 256), (1 / 256, 256), (0.1, 65536), (0.3, 65536), (0.77, 65536)]


def relu_dropout(x: Tensor, p: float, training: bool, key: int | None = None, rows: Tensor | None = None) -> Tensor:
    """Return dropout(relu(x)) of ``x [..., H]``; ``rows`` are the ids of its rows (default 0, 1, ...)."""
    width = x.shape[-1]
    expert = StackedDense(1, width, [width]).to(x.dtype)
    with torch.no_grad():
        expert.layers[0].weight.copy_(torch.eye(width))
    masks = Masks(p, 1, rows, None if key is None else {0: torch.tensor(key)}) if training else None
    return expert.outputs(x.reshape(-1, width), None, masks).view_as(x)


@pytest.mark.parametrize(("p", "levels"), DROPS)
@pytest.mark.parametrize("make", [torch.ones, lambda *s: torch.ones(*s[::-1]).t()], ids=["contiguous", "transposed"])
def test_dropout_scale_and_gradient_are_exact(p: float, levels: int, make: Callable[..., torch.Tensor]) -> None:
    """The mean is kept only if the scale is the inverse of the probability that the random bits really give."""
    x = make(37, 501).requires_grad_()  # no multiple of the elements that one random word decides
    y = relu_dropout(x, p, training=True)
    kept, scale = y.detach() > 0, levels / (levels - round(p * levels))
    torch.testing.assert_close(y.detach(), kept * torch.tensor(scale), rtol=1e-7, atol=0)
    y.backward(torch.full_like(y, 3.0))
    torch.testing.assert_close(x.grad, kept * torch.tensor(3.0 * scale), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("p", "levels"), DROPS)
def test_dropout_keeps_the_right_share_everywhere(p: float, levels: int) -> None:
    """Neighbours share a random word; each position in it must be fair, and no two may go together."""
    rows = 20_000
    kept = (relu_dropout(torch.ones(rows, 8), p, training=True) > 0).double()
    share = 1 - round(p * levels) / levels
    margin = 5 * (share * (1 - share) / rows) ** 0.5
    torch.testing.assert_close(kept.mean(0), torch.full((8,), share, dtype=torch.float64), rtol=0, atol=margin)
    apart = kept - share
    covariance = apart.T @ apart / rows
    assert (covariance - covariance.diag().diag()).abs().max() < 5 * share * (1 - share) / rows**0.5


def test_masks_are_fair_and_independent() -> None:
    """Rate of kept elements, agreement of masks of neighbouring rows and keys: within 5 standard deviations."""
    rows, width = torch.arange(4000), 64
    for p in (0.5, 0.25, 0.3):
        one, other = ((dropout_mask(key, rows, width, p) > 0).float() for key in (11, 12))
        count = rows.numel() * width
        assert abs(float(one.mean()) - (1 - p)) < 5 * (p * (1 - p) / count) ** 0.5 + 2**-16
        for a, b in ((one, other), (one[1:], one[:-1]), (one[:, 8:], one[:, :-8]), (one[:, 1:], one[:, :-1])):
            expected = (1 - p) ** 2
            assert abs(float((a * b).mean()) - expected) < 5 * (expected / a.numel()) ** 0.5


def test_masks_of_some_rows_and_experts_are_those_of_the_batch() -> None:
    """Also of rows of rows, as sparse execution asks for them within a chunk of a large batch."""
    masks, h = Masks(0.5, 6), torch.ones(10, 6, 40)
    whole = masks(h, layer=1)
    assert torch.equal(masks(h[:, :2], 1, [4, 1]), whole[:, [4, 1]])
    chunk = masks.of_rows(torch.arange(10)[4:])
    assert torch.equal(chunk(h[4:], 1), whole[4:])
    assert torch.equal(chunk.of_rows(torch.tensor([5, 0]))(h[:2], 1), whole[[9, 4]])
    sample, expert = torch.tensor([3, 0, 2]), torch.tensor([0, 2, 5])
    assert torch.equal(chunk.of_pairs(h[0, :3], 1, sample, expert), whole[4:][sample, expert])
    assert not torch.equal(masks(h, layer=0), whole)


def test_mask_when_everything_is_dropped() -> None:
    masks = Masks(1 - 1e-6, 2)  # rounds to 1
    assert not masks(torch.ones(5, 2, 9)).any()
