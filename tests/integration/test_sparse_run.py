"""Runs with sparse tables: resumed exactly, and in two processes as in one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtl.cli.run import run
from tests.integration.helpers import compose_small
from tests.integration.test_processes import BASE, ended, fork, losses, weights
from tests.stopping import assert_same, go_on, interrupted

SIZES = ["recipe.embedding_dim=4", "recipe.num_experts=4", "recipe.expert_units=[8]", "recipe.head_units=[8]"]
WORDS = ["trainer.gradient_clip_val=0.1", "callbacks.ema.decay=0.9", "lr_schedule=one_cycle", "trainer.max_epochs=2"]


@pytest.mark.parametrize("name", ["rowwise_adagrad", "sparse_adam"])
def test_stopped_run_resumes_exactly(name: str, tmp_path: Path, tiny_data: Path) -> None:
    words = [*SIZES, *WORDS, f"table_optimizer={name}", "data=movielens", f"paths.data_dir={tiny_data}"]
    words += ["trainer.accumulate_grad_batches=2", "data.batch_size=20", "callbacks.last.every_steps=2", "logger=csv"]
    run(compose_small(tmp_path / "whole", *words))
    interrupted(tmp_path / "parts", 5, *words, how="kill")
    go_on(tmp_path / "parts", f"paths.data_dir={tiny_data}")
    assert_same(tmp_path / "parts", tmp_path / "whole", logged=False)


def test_two_processes_equal_one(tmp_path: Path, tiny_data: Path) -> None:
    words = [*BASE, *SIZES, *WORDS, "table_optimizer=rowwise_adagrad", "data=movielens", f"paths.data_dir={tiny_data}"]
    one, two = tmp_path / "one", tmp_path / "two"
    ended(
        fork(one, *words, "recipe.dropout=0", "data.batch_size=40"),
        fork(two, *words, "recipe.dropout=0", "data.batch_size=20", two=True),
    )
    assert losses(two) == pytest.approx(losses(one), abs=1e-6)
    theirs = weights(two)
    for key, value in weights(one).items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(theirs[key], value, rtol=0, atol=1e-6)
