"""Sparse tables: optimisers by hand, one schedule and state, clipping, and what is refused."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from mtl.checkpoints.warm_start import start_from
from mtl.checks import InputError
from mtl.config import build
from mtl.networks.bottom import HASH_FACTORS, TabularBottom
from mtl.training.optimizers import CompositeOptimizer, RowwiseAdagrad, clip_gradients
from mtl.types import Bag, Categorical
from tests.integration.helpers import compose_small

STEPS = [[0, 2, 2], [2, 1], [0, 0, 0]]  # ids of each batch; row 3 is never seen


def backward(table: nn.Embedding, ids: list[int]) -> None:
    values = table(torch.tensor(ids))
    (values * torch.arange(1.0, values.numel() + 1).view_as(values)).sum().backward()


def test_rowwise_adagrad_by_hand() -> None:
    table = nn.Embedding(4, 3, sparse=True, dtype=torch.float64)
    expected, sums = table.weight.detach().numpy().copy(), np.full((4, 1), 0.5)
    optimizer = RowwiseAdagrad(table.parameters(), lr=0.3, initial_accumulator_value=0.5, eps=1e-3)
    for ids in STEPS:
        optimizer.zero_grad()
        backward(table, ids)
        optimizer.step()
        gradient = np.zeros((4, 3))
        np.add.at(gradient, ids, np.arange(1.0, 3 * len(ids) + 1).reshape(-1, 3))
        sums += (gradient**2).mean(1, keepdims=True)
        expected -= 0.3 * gradient / (np.sqrt(sums) + 1e-3)  # a row without gradient stays as it is
    np.testing.assert_allclose(table.weight.detach().numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(optimizer.state[table.weight]["sum"].numpy(), sums, rtol=1e-12)


@pytest.mark.parametrize("of_tables", [RowwiseAdagrad, torch.optim.SparseAdam])
def test_optimisers_together_share_groups_and_state(of_tables: Any) -> None:
    def both(network: nn.Sequential) -> CompositeOptimizer:
        return CompositeOptimizer(
            [torch.optim.Adam(network[1].parameters(), 0.1), of_tables(network[0].parameters(), lr=0.2)]
        )

    def step(network: nn.Sequential, optimizer: CompositeOptimizer) -> None:
        optimizer.zero_grad()
        optimizer.step(lambda: network(torch.tensor([1, 1, 3])).square().sum().backward())

    network = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 1))
    optimizer = both(network)
    step(network, optimizer)
    other = copy.deepcopy(network)
    resumed = both(other)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, made in ((network, optimizer), (other, resumed)):
        for group in made.param_groups:
            group["lr"] *= 0.5
        step(one, made)
    assert [part.param_groups[0]["lr"] for part in resumed.parts] == [0.05, 0.1]
    for a, b in zip(network.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_sparse_gradients_are_clipped_as_dense_ones(algorithm: str) -> None:
    linear = nn.Linear(2, 2)
    gradients = []
    for sparse in (False, True):
        table = nn.Embedding(5, 2, sparse=sparse)
        backward(table, [1, 1, 3])
        linear.weight.grad = torch.ones(2, 2)
        parameters = [table.weight, linear.weight, linear.bias]
        if sparse:
            clip_gradients(parameters, 0.7, algorithm, False)
        else:
            {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}[algorithm](parameters, 0.7)
        gradients.append([table.weight.grad.to_dense(), linear.weight.grad])
    for dense, sparse in zip(*gradients, strict=True):
        torch.testing.assert_close(dense, sparse)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compile=true", "network.execution=dense"], "compile=true with embedding_optimizer"),
        (["weighting=pcgrad"], "combines dense gradients"),
        (["embedding_optimizer.lr=-1"], "embedding_optimizer"),
        (["trainer.accelerator=gpu", "trainer.devices=2"], "several GPUs: NCCL"),
    ],
)
def test_what_cannot_take_sparse_gradients_is_refused(words: list[str], message: str, tmp_path: Path) -> None:
    cfg = compose_small(tmp_path, "data=movielens", "embedding_optimizer=sparse_adam", *words)
    with pytest.raises(InputError, match=message):
        build.check_options(cfg)


def test_a_network_without_tables_is_refused(tmp_path: Path) -> None:
    cfg = compose_small(tmp_path, "embedding_optimizer=sparse_adam")
    data = build.build_data(cfg)
    data.setup()
    with pytest.raises(InputError, match="MMoE has no embedding table"):
        build.build_module(cfg, build.build_network(cfg, data.spec), data.spec)


def test_ids_in_hash_buckets() -> None:
    inputs = {"id": Categorical(1000), "small": Categorical(50), "tags": Bag(1000, 3)}
    bottom = TabularBottom(inputs, 4, hash_buckets=50)
    assert [len(p) for p in bottom.parameters()] == [50, 50, 50]
    ids = torch.arange(1000)
    rows = bottom.embeddings[0](ids)
    assert len(rows.unique(dim=0)) > 600  # one hash alone would leave 50
    torch.testing.assert_close(rows[0], 2 * bottom.embeddings[0].table.weight[0])  # unknown
    first, second = (1 + (a * 7 + b) % (2**31 - 1) % 49 for a, b in HASH_FACTORS)
    torch.testing.assert_close(rows[7], bottom.embeddings[0].table.weight[[first, second]].sum(0))
    lists = bottom.embeddings[2](torch.tensor([[7, 0, 0], [7, 9, 0], [0, 0, 0]], dtype=torch.int32))
    alone = bottom.embeddings[2](torch.tensor([[9]]))[0]
    torch.testing.assert_close(lists, torch.stack([lists[0], (lists[0] + alone) / 2, torch.zeros(4)]))


def hashed_day(size: int, added: int, buckets: int) -> TabularBottom:
    inputs = {"item": Categorical(size, added=added), "seen": Bag(size + 1, 2, "item", added)}
    return TabularBottom(inputs | {"tags": Bag(size + 1, 2, None, added)}, 4, hash_buckets=buckets)


def test_ids_keep_their_rows_when_later_ids_exceed_the_buckets() -> None:
    """Known ids keep their embeddings, and the ids of two later days that do not fit share rows, the same each day."""
    days = [hashed_day(40 + added, added, 50) for added in (0, 30, 60)]
    for before, after in pairwise(days):
        start_from(after, cast(Any, SimpleNamespace(weights=before.state_dict, path="")), same_ids=True)
    for size, network in zip((40, 70), days, strict=False):
        ids = torch.arange(size)
        inputs = {"item": ids, "seen": torch.stack([ids, ids.flip(0)], 1), "tags": torch.stack([ids, ids * 0], 1)}
        torch.testing.assert_close(days[2](inputs), network(inputs), rtol=0, atol=0)
    table = days[2].embeddings[0].weight
    assert table.shape == (50, 4)
    first, second = (1 + (a * 60 + b) % (2**31 - 1) % 49 for a, b in HASH_FACTORS)
    inputs = {"item": torch.tensor([59]), "seen": torch.zeros(1, 2).long(), "tags": torch.zeros(1, 2).long()}
    torch.testing.assert_close(days[2](inputs)[0, :4], (table[first] + table[second]) / 2)  # a list's ids are one more


def test_a_table_of_another_number_of_buckets_starts_anew() -> None:
    old, new = hashed_day(200, 0, 50), hashed_day(200, 0, 80)
    before = new.embeddings[0].table.weight.clone()
    start_from(new, cast(Any, SimpleNamespace(weights=old.state_dict, path="")), same_ids=True)
    assert torch.equal(new.embeddings[0].table.weight, before)
