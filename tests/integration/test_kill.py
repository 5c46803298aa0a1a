"""Kill -9 at ten random moments, go on, and compare with the run that nobody killed: every bit is the same.

Name the mark to run it: pytest -m slow tests/integration/test_kill.py
"""

from __future__ import annotations

import csv
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

from mtl.run.checkpoint import read_checkpoint
from tests.conftest import ROOT

# 3 epochs of 79 steps, the permutation is soft for 1.3 of them and hardens at 103; 3 epochs of 19 rounds of 4 tasks
STEPS = {"mixture": 237, "tasks": 228}
KINDS = {
    "mixture": [
        "permutation=sinkhorn",
        "permutation.noise=0.1",
        "setting.permutation.epochs=1.3",
        "setting.dropout=0.5",
        "setting.expert_units=[8]",
        "setting.head_units=[8]",
    ],
    "tasks": [
        "experiment=synthetic_pairs_routing",
        "data.rows=[1200,200,200]",
        "data.order=temperature",
        "network=routed_dense",
        "network.dropout=0.3",
        "setting.gumbel_matrix.budget_weight=0.1",
    ],
}
BATCH = {"mixture": 128, "tasks": 64}
WORDS = [
    "trainer.max_epochs=3",
    "logger=csv",
    "logger.flush_logs_every_n_steps=1",
    "trainer.log_every_n_steps=1",
    "callbacks.progress=null",
    "callbacks.routing.pictures_every=null",
    "callbacks.last.every_steps=4",
    "trainer.accelerator=cpu",
]
MOMENTS = {  # soft phase, around the hardening, hard phase
    1: [random.Random(0).randrange(a, b) for a, b in ((8, 70), (70, 95), (100, 108), (110, 160), (160, 230))],
    2: [random.Random(1).randrange(a, b) for a, b in ((8, 70), (70, 95), (100, 108), (110, 160), (160, 230))],
}
pytestmark = pytest.mark.slow


def start(folder: Path, kind: str, processes: int, *words: str) -> subprocess.Popen[bytes]:
    several = ["trainer=ddp_cpu", f"trainer.devices={processes}"] if processes > 1 else []
    several += [f"data.batch_size={BATCH[kind] // processes}"]
    several = several if "ckpt" not in words[0] else []
    with (folder.parent / f"{folder.name}.txt").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *several, *words],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, to be killed whole
        )


def losses(folder: Path) -> dict[int, str]:
    rows = csv.DictReader((folder / "csv" / "metrics.csv").read_text().splitlines())
    return {int(row["step"]): row["train/step_loss"] for row in rows if row.get("train/step_loss")}


def state(folder: Path) -> dict[str, Any]:
    return read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]


@pytest.fixture(scope="module", params=[(kind, count) for kind in KINDS for count in (1, 2)], ids=str)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int, Path]:
    kind, processes = request.param
    folder = tmp_path_factory.mktemp(f"whole_{kind}_{processes}") / "run"
    assert start(folder, kind, processes, *WORDS, *KINDS[kind], f"hydra.run.dir={folder}").wait(300) == 0
    assert len(losses(folder)) == STEPS[kind]
    return kind, processes, folder


@pytest.mark.parametrize("moment", range(5))
def test_killed_run_resumes_exactly(moment: int, whole: tuple[str, int, Path], tmp_path: Path) -> None:
    kind, processes, reference = whole
    folder, target = tmp_path / "run", MOMENTS[processes][moment]
    running = start(folder, kind, processes, *WORDS, *KINDS[kind], f"hydra.run.dir={folder}")
    log, deadline = folder / "csv" / "metrics.csv", time.monotonic() + 300
    while not log.exists() or log.read_text().count("\n") < target:
        assert running.poll() is None, (tmp_path / "run.txt").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    before = losses(folder)
    saved = read_checkpoint(folder / "checkpoints" / "last.ckpt")["global_step"]
    again = start(folder, kind, processes, f"ckpt={folder}/checkpoints/last.ckpt", "callbacks.progress=null")
    assert again.wait(300) == 0, (tmp_path / "run.txt").read_text()
    after, expected = losses(folder), losses(reference)
    print(f"\n{kind}, {processes} process(es): killed after step {max(before)}, saved at {saved}")
    assert all(before[step] == expected[step] for step in before)
    assert after == expected  # the file goes on where the run does
    final = state(reference)
    for name, value in state(folder).items():
        same = torch.equal(value, final[name]) if isinstance(value, torch.Tensor) else value == final[name]
        assert same, name
