"""Conflict between tasks: the arithmetic against a step made by hand, and a run that measures it."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import polars as pl
import pytest
import torch

from mtl.cli.run import run
from mtl.training.conflict import measure
from mtl.training.weighting import shared_parameters
from tests.integration.helpers import compose_small
from tests.weightings import TASKS, batch, module, task_losses


def test_affinity_equals_a_step_made_by_hand() -> None:
    """TAG: 1 - L_j(after a step of plain gradient descent on L_i at shared parameters) / L_j(before)."""
    trained, first, second, rate = module(), batch(rows=6), batch(rows=8, seed=1), 0.3
    found = {tuple(row[:4]): row[4] for row in measure(trained, [first], [second], rate)}
    before = task_losses(trained, second).detach()
    gradients = []
    for i, task in enumerate(TASKS):
        stepped = copy.deepcopy(trained)
        shared = shared_parameters(stepped.network)[0]
        task_losses(stepped, first)[i].backward()
        gradients.append(torch.cat([p.grad.flatten() for p in shared if p.grad is not None]))
        torch.optim.SGD(shared, lr=rate).step()
        for j, after in enumerate(task_losses(stepped, second)):
            affinity = found["affinity", "all", task.name, TASKS[j].name]
            assert affinity == pytest.approx(float(1 - after.detach() / before[j]), abs=1e-10)
        assert found["norm", "all", task.name, task.name] == pytest.approx(float(gradients[i].norm()))
    cosine = torch.nn.functional.cosine_similarity(gradients[0], gradients[1], 0)
    assert found["cosine", "all", TASKS[0].name, TASKS[1].name] == pytest.approx(float(cosine))


def test_a_task_without_labels_has_undefined_values() -> None:
    rows = batch(rows=6, without="click")
    undefined = [row[:4] for row in measure(module(), [rows], [rows], 0.1) if math.isnan(row[4])]
    assert ("norm", "all", "click", "click") in undefined
    assert all("click" in row for row in undefined)


def test_measuring_does_not_change_the_training(tmp_path: Path) -> None:
    words = ("data=synthetic_pairs", "gate=topk", "recipe.dropout=0.2", "~logger")
    losses = []
    for every in ("null", "2"):
        run(compose_small(tmp_path / every, *words, f"callbacks.conflict.every_steps={every}"))
        losses.append(json.loads((tmp_path / every / "results.json").read_text())["test"]["loss"])
    assert losses[0] == losses[1]
    assert not (tmp_path / "null" / "conflict.csv").exists()
    table = pl.read_csv(tmp_path / "2" / "conflict.csv")
    assert set(table["quantity"]) == {"norm", "cosine", "affinity"}
    assert table["step"].unique().sort().to_list()[:3] == [2, 4, 6]
    assert table.filter(quantity="cosine")["value"].is_between(-1.0001, 1.0001).all()
    assert (tmp_path / "2" / "conflict.png").is_file()
