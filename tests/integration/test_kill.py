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

from mtl.checkpoint import read_checkpoint
from tests.conftest import ROOT

STEPS, HARDENED = 237, 103  # 3 epochs of 79 steps; the permutation is soft for 1.3 of them
WORDS = [
    "trainer.max_epochs=3",
    "permutation=sinkhorn",
    "permutation.noise=0.1",
    "setting.permutation.epochs=1.3",
    "setting.dropout=0.5",
    "setting.expert_units=[8]",
    "setting.head_units=[8]",
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


def start(folder: Path, processes: int, *words: str) -> subprocess.Popen[bytes]:
    several = ["trainer=ddp_cpu", f"trainer.devices={processes}", f"data.batch_size={128 // processes}"]
    several = several if processes > 1 and "ckpt" not in words[0] else []
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


@pytest.fixture(scope="module", params=[1, 2])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    folder = tmp_path_factory.mktemp(f"whole{request.param}") / "run"
    assert start(folder, request.param, *WORDS, f"hydra.run.dir={folder}").wait(300) == 0
    assert len(losses(folder)) == STEPS
    return request.param, folder


@pytest.mark.parametrize("moment", range(5))
def test_killed_and_gone_on(moment: int, whole: tuple[int, Path], tmp_path: Path) -> None:
    processes, reference = whole
    folder, target = tmp_path / "run", MOMENTS[processes][moment]
    running = start(folder, processes, *WORDS, f"hydra.run.dir={folder}")
    log, deadline = folder / "csv" / "metrics.csv", time.monotonic() + 300
    while not log.exists() or log.read_text().count("\n") < target:
        assert running.poll() is None, (tmp_path / "run.txt").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    before = losses(folder)
    log.unlink()
    saved = read_checkpoint(folder / "checkpoints" / "last.ckpt")["global_step"]
    again = start(folder, processes, f"ckpt={folder}/checkpoints/last.ckpt", "callbacks.progress=null")
    assert again.wait(300) == 0, (tmp_path / "run.txt").read_text()
    after, expected = losses(folder), losses(reference)
    print(f"\n{processes} process(es): killed after step {max(before)}, saved at {saved}, hardening at {HARDENED}")
    assert sorted(after) == list(range(saved, STEPS))
    for step, value in (before | after).items():
        assert value == expected[step], step
    final = state(reference)
    for name, value in state(folder).items():
        same = torch.equal(value, final[name]) if isinstance(value, torch.Tensor) else value == final[name]
        assert same, name
