"""Kill -9 at random moments, go on, and compare with the run that nobody killed: every bit is the same.

Name the mark to run it: pytest -m slow tests/integration/test_kill.py. $MTL_KILLS sets the kills for each of the
fourteen kinds of run, by default 5.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mtl.checkpoints.files import read
from tests.conftest import ROOT
from tests.glue_files import TINY
from tests.stopping import course

KINDS = {
    "mixture": [  # the permutation is soft for 1.3 epochs, and hardens within the second
        *("permutation=sinkhorn", "permutation.noise=0.1", "recipe.permutation.epochs=1.3", "recipe.dropout=0.5"),
        *("recipe.expert_units=[8]", "recipe.head_units=[8]"),
    ],
    "tasks": [
        *("experiment=synthetic_pairs_routing", "data.rows=[1200,200,200]", "data.task_order=temperature"),
        *("network=routed_dense", "network.dropout=0.3", "recipe.gumbel_matrix.budget_weight=0.1"),
    ],
    "table": [
        "data=table",
        "gate=topk",
        "gate.noisy=true",
        "gate.bias_rate=0.01",
        "callbacks.early_stopping.patience=1",
    ],
    "movielens": [
        *("data=movielens", "gate=dselect_k", "schedule=entropy_weight", "recipe.embedding_dim=4"),
        *("recipe.num_experts=4", "recipe.expert_units=[8]", "recipe.head_units=[8]"),
        "trainer.accumulate_grad_batches=2",
    ],
    "ple": [
        *("network=ple", "network.num_task_experts=2", "data=movielens", "gate=remoe", "recipe.dropout=0.5"),
        *("recipe.embedding_dim=4", "recipe.num_experts=4", "recipe.expert_units=[8]", "recipe.head_units=[8]"),
    ],
    "texts": [  # steps of two tasks, accumulated; the learning rate rises, then falls; a permutation that hardens
        *TINY,
        *("data.tasks=[rte,sst2,cola,stsb,qqp]", "data.tasks_per_step=2", "recipe.dropout=0.3"),
        *("gate=comet", "permutation=sinkhorn", "recipe.permutation.epochs=1.3", "permutation.noise=0.1"),
        *("trainer.accumulate_grad_batches=2", "lr_schedule=linear", "callbacks.lr_schedule.warmup=0.3"),
    ],
}
BATCH = {"mixture": 128, "tasks": 64, "table": 64, "movielens": 8, "ple": 16, "texts": 4}
WORDS = ["trainer.max_epochs=3", "logger=csv", "logger.csv.flush_logs_every_n_steps=1", "trainer.log_every_n_steps=1"]
WORDS += ["callbacks.progress=null", "callbacks.routing.figures=false", "callbacks.last.every_n_steps=4"]
WORDS += ["trainer.accelerator=cpu"]
LAUNCHER = {
    "one": [],
    "two": [],
    "divided": [],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
}
WAYS = [*((kind, way) for kind in KINDS for way in ("one", "two")), ("mixture", "torchrun"), ("table", "torchrun")]
WAYS += [("mixture", "divided")]
KILLS = int(os.environ.get("MTL_KILLS", "5"))
pytestmark = pytest.mark.slow


def start(folder: Path, kind: str, way: str, *words: str) -> subprocess.Popen[bytes]:
    processes = 1 if way == "one" else 2
    trainer = ["trainer=fsdp_cpu", "trainer.strategy.split_rows=20"] if way == "divided" else ["trainer=ddp_cpu"]
    first = [] if processes == 1 else [*trainer, f"trainer.devices={processes}"]
    first += [*WORDS, *KINDS[kind], f"data.batch_size={BATCH[kind] // processes}"]
    first = ["callbacks.progress=null"] if "ckpt" in words[0] else first
    with (folder.parent / f"{folder.name}.txt").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *LAUNCHER[way], str(ROOT / "train.py"), *first, *words],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, to be killed whole
        )


def state(folder: Path) -> dict[str, Any]:
    return read(folder / "checkpoints" / "last.ckpt")["state_dict"]


@pytest.fixture(scope="module", params=WAYS, ids="-".join)
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_data: Path
) -> tuple[str, str, Path, str]:
    kind, way = request.param
    folder, data = tmp_path_factory.mktemp(f"whole_{kind}_{way}") / "run", f"paths.data_dir={tiny_data}"
    assert start(folder, kind, way, f"hydra.run.dir={folder}", data).wait(600) == 0, log_of(folder)
    assert len(course(folder)) > 20
    return kind, way, folder, data


def log_of(folder: Path) -> str:
    return (folder.parent / f"{folder.name}.txt").read_text()[-2000:]


@pytest.mark.parametrize("number", range(KILLS))
def test_killed_run_resumes_exactly(number: int, whole: tuple[str, str, Path, str], tmp_path: Path) -> None:
    kind, way, reference, data = whole
    expected, folder = course(reference), tmp_path / "run"
    moment = random.Random(f"{kind} {way} {number}").randrange(6, len(expected) - 2)
    running = start(folder, kind, way, f"hydra.run.dir={folder}", data)
    log, deadline = folder / "csv" / "metrics.csv", time.monotonic() + 300
    while not log.exists() or log.read_text().count("\n") < moment:
        assert running.poll() is None, log_of(folder)
        assert time.monotonic() < deadline
        time.sleep(0.005)
    kill_all(running)
    before = course(folder)
    saved = read(folder / "checkpoints" / "last.ckpt")["global_step"]
    again = start(folder, kind, way, f"ckpt={folder}/checkpoints/last.ckpt", data)
    assert again.wait(600) == 0, log_of(folder)
    after = course(folder)
    print(f"\n{kind}, {way}: killed after step {max(before)}, saved at {saved}")
    assert all(before[step] == expected[step] for step in before)
    after.setdefault(saved - 1, expected[saved - 1])  # lost by a kill between the checkpoint and the row of its step
    assert after == expected  # the file goes on where the run does
    final = state(reference)
    for name, value in state(folder).items():
        same = torch.equal(value, final[name]) if isinstance(value, torch.Tensor) else value == final[name]
        assert same, name


def kill_all(running: subprocess.Popen[bytes]) -> None:
    """Kill a program and its children at once; torchrun starts them in sessions of their own."""
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    for number in (running.pid, *map(int, children)):
        os.kill(number, signal.SIGKILL)
    running.wait()
