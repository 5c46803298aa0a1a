"""(user, item) pairs from records in memory: drawing unseen pairs, splitting by stratum, the DataSpec."""

from __future__ import annotations

import pytest
import torch
from mtl.data_modules.interactions import InteractionsDataModule, draw_distinct
from mtl.data_modules.splits import random_split
from torch import Tensor

from mtl.checks import InputError
from mtl.types import Batch

ARGUMENTS = {
    "alpha": 0.3,
    "split": (0.5, 0.25, 0.25),
    "download": False,
    "base_url": "http://a.invalid",
    "batch_size": 8,
}


class InMemory(InteractionsDataModule):
    """Serve the given records."""

    task, input, item = "heard", "song", "song"

    def __init__(self, records: dict[str, Tensor], **kwargs: object) -> None:
        super().__init__("data", **(ARGUMENTS | kwargs))
        self.folder = self.source = self.data_dir
        self.given = records

    def records(self) -> dict[str, Tensor]:
        return self.given


def draw_records(seed: int, users: int = 30, items: int = 40, share: float = 0.2) -> dict[str, Tensor]:
    """Draw records with ratings 1 to 4, a fifth of them missing; only every third id is used."""
    generator = torch.Generator().manual_seed(seed)
    user, item = (torch.rand(users, items, generator=generator) < share).nonzero(as_tuple=True)
    order = torch.randperm(len(user), generator=generator)
    rating = torch.randint(1, 6, (len(user),), generator=generator).float()
    return {"user": 3 * user[order], "item": 3 * item[order], "rating": rating.masked_fill(rating == 5, torch.nan)}


def load(records: dict[str, Tensor], **kwargs: object) -> tuple[InMemory, Batch]:
    data = InMemory(records, **kwargs)
    data.setup()
    parts = list(data.splits.values())
    inputs = {name: torch.cat([part.inputs[name] for part in parts]) for name in parts[0].inputs}
    return data, Batch(inputs, {name: torch.cat([part.targets[name] for part in parts]) for name in parts[0].targets})


@pytest.mark.parametrize("negatives", ["uniform", "per_user"])
@pytest.mark.parametrize("seed", range(2))
def test_pairs_of_random_records(seed: int, negatives: str) -> None:
    records = draw_records(seed)
    _, rows = load(records, negatives=negatives, seed=seed)
    heard, rating = rows.targets["heard"] == 1, rows.targets["rating"]
    code = rows.inputs["user"] * 1000 + rows.inputs["song"]
    assert len(code.unique()) == len(rows) == 2 * len(records["user"])
    assert bool(rating[~heard].isnan().all())
    expected = dict(zip((records["user"] * 1000 + records["item"]).tolist(), records["rating"].tolist(), strict=True))
    found = dict(zip(code[heard].tolist(), rating[heard].tolist(), strict=True))
    assert found.keys() == expected.keys()
    assert all(found[key] == value or value != value for key, value in expected.items())
    assert set(rows.inputs["user"].tolist()) == set(records["user"].tolist())
    if negatives == "per_user":
        assert torch.equal(torch.bincount(rows.inputs["user"][heard]), torch.bincount(rows.inputs["user"][~heard]))


def test_too_few_unseen_pairs_or_rows() -> None:
    full = draw_records(0, users=4, items=4, share=1.0)
    with pytest.raises(
        InputError, match="needs 16 unseen pairs, one for each record, but the 4 users x 4 songs of data leav"
    ):
        load(full)
    with pytest.raises(InputError, match="data: every user has seen every song, so none is unseen"):
        load(full, negatives="per_user")
    most = {"user": torch.tensor([0] * 40 + [1] * 20), "item": torch.tensor([*range(40), *range(30, 50)])}
    most["rating"] = torch.ones(60)
    with pytest.raises(InputError, match=r"data\.negatives=uniform: needs 60 unseen pairs.* leave only 40; use .*per_"):
        load(most)
    _, rows = load(most, negatives="per_user")
    assert rows.inputs["user"][rows.targets["heard"] == 0].bincount().tolist() == [10, 20]
    few = {name: values[:2] for name, values in draw_records(0).items()}
    with pytest.raises(InputError, match=r"of its 4 rows, data.split leaves none for (val|test)"):
        load(few | {"rating": torch.tensor([1.0, 2.0])})


def test_max_rows_keeps_a_random_part() -> None:
    whole, part = (load(draw_records(0), max_rows=most)[1] for most in (None, 100))
    assert len(part) == 100
    assert 30 < int(part.targets["heard"].sum()) < 70
    assert set(pairs(part)) < set(pairs(whole))


def pairs(rows: Batch) -> list[tuple[int, int]]:
    return list(zip(rows.inputs["user"].tolist(), rows.inputs["song"].tolist(), strict=True))


def test_metrics_of_tasks_and_the_users_whose_rows_are_ranked() -> None:
    data, _ = load(draw_records(0), metrics={"heard": ["auroc", "ndcg@10"]})
    assert [task.metrics for task in data.spec.tasks] == [("auroc", "ndcg@10"), ()]
    assert data.splits["train"].groups is None
    for name in ("val", "test"):
        assert torch.equal(data.splits[name].groups, data.splits[name].inputs["user"])
    data, _ = load(draw_records(0), metrics={"rating": ["rmse"]})
    assert data.splits["val"].groups is None


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"watch": ["auroc"]}, r"data.metrics={.*}: must be lists of metrics for heard and rating"),
        ({"heard": ["rmse"]}, r"data.metrics.heard: metrics=\[rmse\]: a binary task has auroc"),
    ],
)
def test_metrics_that_do_not_fit(metrics: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        InMemory(draw_records(0), metrics=metrics)


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


def test_a_random_split_is_a_partition_with_its_share_of_each_stratum() -> None:
    stratum = torch.arange(1003) % 3
    shares = {"train": 2, "val": 1, "test": 1}
    parts = [*random_split(stratum, shares, torch.Generator().manual_seed(0)).values()]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(1003))
    assert [int((stratum[parts[0]] == value).sum()) for value in range(3)] == [168, 167, 167]
    assert abs(float(parts[0].double().mean()) - 501) < 50
