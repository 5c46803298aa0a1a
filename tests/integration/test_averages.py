"""The average of the tasks' main metrics: monitored, saved, printed, and in the table of a sweep."""

from __future__ import annotations

import csv
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from mtl.data_modules.base import TensorDataModule
from omegaconf import open_dict

from mtl.cli.report import main
from mtl.cli.run import run
from mtl.types import Batch, DataSpec, Numeric, TaskSpec
from tests.integration.helpers import compose_small


class Named(TensorDataModule):
    """Two tasks that name their metrics."""

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        tasks = [
            TaskSpec("cola", "binary", metrics=("matthews", "accuracy"), small=True),
            TaskSpec("stsb", "regression", metrics=("pearson", "spearman")),
        ]

        def rows(seed: int) -> Batch:
            x = torch.randn(60, 4, generator=torch.Generator().manual_seed(seed))
            return Batch({"x": x}, {"cola": (x[:, 0] > 0).float(), "stsb": x[:, 1]})

        return DataSpec({"x": Numeric(4)}, tasks), {"train": rows(0), "val": rows(1), "test": rows(2)}


def named(folder: Path, *words: str) -> Any:
    cfg = compose_small(folder, "network.static_gate=false", *words)
    with open_dict(cfg):
        cfg.data = {"_target_": f"{__name__}.Named", "batch_size": 20, "seed": 0}
    return cfg


def test_average_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "sweep" / "0"
    with caplog.at_level(logging.INFO):
        best = run(named(folder, "monitor=val/average"))
    record = json.loads((folder / "results.json").read_text())
    test, shown = record["test"], capsys.readouterr().out
    assert test["average"] == pytest.approx((test["cola/matthews"] + test["stsb/pearson"]) / 2)
    assert test["small_average"] == test["cola/matthews"]
    assert f"\naverage of the tasks' main metrics: {test['average']:.4f}" in shown
    assert f"small average of the tasks' main metrics: {test['small_average']:.4f}" in shown
    assert record["best_val_average"] == best
    assert "best_val_loss" not in record
    assert ", average 0." in caplog.text  # after each epoch

    main([str(folder.parent)])
    [row] = csv.DictReader((folder.parent / "summary.csv").read_text().splitlines())
    assert float(row["test average"]) == test["average"]
    assert "average↑" in capsys.readouterr().out
