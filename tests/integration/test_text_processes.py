"""Two processes with half of each batch of texts equal one with the whole batch, also where losses count tokens."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

import pytest
import torch

from mtl.cli import resolvers, train
from mtl.cli.run import run
from tests.glue_files import TINY, write_glue
from tests.integration.helpers import SMALL, compose_small
from tests.integration.test_processes import TWO, result, weights
from tests.programs import SERVER, free_port, ranks

WORDS = [
    *TINY,
    "data.tasks=[rte,sst2,stsb]",
    "trainer.max_epochs=1",
    "trainer.precision=64-true",
    "logger=csv",
    "recipe.dropout=0",
]
RUNS = {
    "comet": ["gate=comet", "recipe.comet.entropy_weight=1.0", "recipe.k=2"],
    "top1": [
        *("gate=task_top1", "gate.balance_weight=0.5", "network.route=sentence"),
        *("data.tasks_per_step=2", "data.order=shuffled"),
    ],
}


def logged(folder: Path) -> dict[tuple[str, int], float]:
    """Return the losses of each step, and the means of the auxiliary losses of each epoch."""
    rows = list(csv.DictReader((folder / "csv" / "metrics.csv").read_text().splitlines()))
    names = [name for name in rows[0] if name == "train/step_loss" or name.startswith("train/aux/")]
    return {(name, int(row["step"])): float(row[name]) for row in rows for name in names if row.get(name)}


def run_as(rank: int, ports: list[int], folder: Path, words: dict[str, list[str]]) -> None:
    """Be one of two processes, as torchrun starts them, in all runs, one after the other."""
    resolvers.RANK = str(rank)
    for port, (name, options) in zip(ports, words.items(), strict=True):
        os.environ |= ranks(rank, 2, port)
        own = [*TWO, *SMALL, *options, "data.batch_size=4", f"hydra.run.dir={folder / name}"]
        sys.argv = ["train.py", *own]
        train.main()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Do all runs with one process in ``one``, and with two in ``two``."""
    folder = tmp_path_factory.mktemp("texts")
    write_glue(folder / "data" / "glue", {"rte": 30, "sst2": 40, "stsb": 30})
    here = [*WORDS, f"paths.data_dir={folder / 'data'}"]
    run(compose_small(folder / "teacher", *here, "network.mixture_layers=[]", "trainer.max_epochs=1"))
    words = {name: [*here, *options] for name, options in RUNS.items()}
    words["comet"] += ["distillation=dense_run", f"distillation.teacher={folder}/teacher/checkpoints/last.ckpt"]
    ports = [free_port() for _ in words]
    both = [SERVER.Process(target=run_as, args=(rank, ports, folder / "two", words)) for rank in range(2)]
    for process in both:
        process.start()
    for name, options in words.items():
        run(compose_small(folder / "one" / name, *options))
    for process in both:
        process.join(240)
        assert process.exitcode == 0
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_equal_one(name: str, folder: Path) -> None:
    one, two = folder / "one" / name, folder / "two" / name
    expected = logged(one)
    assert {key for key, _ in expected} >= {
        "train/step_loss",
        "train/aux/balance" if name == "top1" else "train/aux/entropy",
    }
    assert logged(two) == pytest.approx(expected, abs=1e-8)
    theirs = weights(two)
    for key, value in weights(one).items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(theirs[key], value, rtol=0, atol=1e-6)
    assert result(two) == pytest.approx(result(one), abs=1e-8)
