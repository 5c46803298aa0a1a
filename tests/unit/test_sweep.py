"""What Hydra's callback does around the jobs of a multirun."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from mtl.cli.sweep import SweepTable
from mtl.records import flatten
from tests.integration.helpers import composed
from tests.run_folders import write_run


def multirun(folder: Path) -> Any:
    return OmegaConf.create({"hydra": {"mode": "MULTIRUN", "sweep": {"dir": str(folder)}}})


def test_table_grows_with_each_job_and_is_printed_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, table = multirun(tmp_path), SweepTable()
    table.on_multirun_start(config)
    for number in range(2):
        write_run(tmp_path / str(number), [f"gate={'ab'[number]}"], {"loss": 1.0 + number})
        SweepTable().on_job_end(config, Any)  # perhaps in another process: it has nothing but the folder
        rows = list(csv.DictReader((tmp_path / "summary.csv").read_text().splitlines()))
        assert [row["test loss"] for row in rows] == ["1.0", "2.0"][: number + 1]
    assert capsys.readouterr().out == ""
    table.on_multirun_end(config)
    assert "1.000<" in capsys.readouterr().out


def test_table_is_printed_after_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra then calls nothing at the end."""
    at_exit: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
    monkeypatch.setattr("atexit.register", lambda function, *given: at_exit.append((function, given)))
    SweepTable().on_multirun_start(multirun(tmp_path))
    [(function, given)] = at_exit
    function(*given)
    assert capsys.readouterr().out == ""  # no job has begun
    write_run(tmp_path / "0", ["gate=a"], None, log="12:00:00 ERROR mtl: NaN loss\n")
    monkeypatch.setattr("mtl.runs.commands.GIVEN", ["-m", "gate=a,b"])
    function(*given)
    printed = capsys.readouterr().out
    assert "0 failed: NaN loss" in printed
    assert f"finish the sweep with: python train.py -m gate=a,b hydra.sweep.dir={tmp_path}\n" in printed


def test_baselines_differ_in_the_network_alone() -> None:
    configs = [
        flatten(OmegaConf.to_container(composed(["data=table", f"network={name}"])))
        for name in ("mmoe", "shared_bottom", "single_task")
    ]
    for other in configs[1:]:
        changed = {key for key in configs[0].keys() | other.keys() if configs[0].get(key) != other.get(key)}
        assert {key.partition(".")[0] for key in changed} == {"network", "label", "choices", "words"}
        assert {key for key in changed if key.startswith("choices")} == {"choices.network"}
        kept = {
            key: value for key, value in other.items() if key.startswith("network.") and not key.endswith("_target_")
        }
        assert kept.items() <= configs[0].items()  # bottom, experts and heads
