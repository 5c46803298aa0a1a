"""Drawing distinct numbers and splitting rows by stratum."""

from __future__ import annotations

import pytest
import torch
from mtl.data_modules.sampling import draw_distinct
from mtl.data_modules.splits import stratified_split


def test_draw_distinct_in_blocks_of_every_kind() -> None:
    sizes = torch.tensor([0, 10, 1000, 0, 5, 100_000, 7, 0])
    counts = torch.tensor([0, 10, 100, 0, 0, 9000, 3, 0])
    drawn = draw_distinct(sizes, counts, torch.Generator().manual_seed(0))
    starts = sizes.cumsum(0) - sizes
    assert len(drawn.unique()) == len(drawn) == int(counts.sum())
    inside = (drawn >= starts[:, None]) & (drawn < (starts + sizes)[:, None])
    assert torch.equal(inside.sum(1), counts)


@pytest.mark.parametrize("count", [2, 5])  # both ways of drawing
def test_draw_distinct_is_uniform(count: int) -> None:
    trials, size = 20_000, 12
    drawn = draw_distinct(torch.full((trials,), size), torch.full((trials,), count), torch.Generator().manual_seed(0))
    hits = torch.bincount(drawn % size, minlength=size).double()
    expected = trials * count / size
    assert float(((hits - expected) ** 2 / expected).sum()) < 31.3  # chi-square of 11 degrees, p = 0.001


def test_stratified_split_is_a_partition_and_random() -> None:
    stratum = torch.arange(1003) % 3
    parts = stratified_split(stratum, (0.5, 0.25, 0.25), torch.Generator().manual_seed(0))
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(1003))
    assert [int((stratum[parts[0]] == value).sum()) for value in range(3)] == [168, 167, 167]
    assert abs(float(parts[0].double().mean()) - 501) < 50
