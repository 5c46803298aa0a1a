"""What the program prints at the end of a run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mtl.runs.results import commit, number, print_results

RECORD: dict[str, Any] = {
    "label": "comet",
    "checkpoint": "x/best.ckpt",
    "seed": 3,
    "parameters": 840574,
    "epochs": 1,
    "seconds_per_epoch": 1.26,
    "test": {"loss": 0.5, "flops_selected": 958976.0, "click/auroc": None, "experts_per_sample/click": 2.0},
    "training": {"flops_selected": 2876928.0},
}


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.12345, "0.1235"), (-999.5, "-999.5000"), (-12345.6, "-12,346")]
)
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text


def test_results_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_results(RECORD, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "comet: test of best.ckpt"
    assert lines[4] == "│ click │     - │  2.0000 │"
    assert lines[-5:] == [
        "test loss: 0.5000",
        "test flops selected: 958,976",
        "training flops selected: 2,876,928",
        "1 epoch, 1.3 s per epoch, 840,574 parameters, seed 3",
        f"{tmp_path}/results.json",
    ]


def test_results_name_the_commit_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run([*command, *words], check=True, capture_output=True, text=True).stdout

    assert commit(tmp_path) is None  # where a wheel is installed
    git("init")
    assert commit(tmp_path) is None  # nothing is committed yet
    (tmp_path / "a.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    git("tag", "v1")
    now = git("rev-parse", "HEAD").strip()
    assert commit(tmp_path) == now
    (tmp_path / "a.py").write_text("2")
    assert commit(tmp_path) == f"{now}-dirty"
    monkeypatch.setenv("PATH", os.devnull)
    assert commit(tmp_path) is None  # without Git
