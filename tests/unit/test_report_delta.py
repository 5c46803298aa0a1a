"""delta-m: the mean relative gain over single-task runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mtl.report.compare import compare
from mtl.report.delta import delta_m
from mtl.report.runs import read_runs
from tests.run_folders import write_run

MAIN = {"click": "auprc", "minutes": "mse"}


def test_sign_by_direction_and_undefined() -> None:
    assert delta_m([0.6, 3.0], [0.5, 4.0], [True, False]) == pytest.approx((20 + 25) / 2)
    assert delta_m([-1.0], [-2.0], [True]) == pytest.approx(50)  # a negative value, such as R2
    for values, singles in (([0.6, 3.0], [0.5, 0.0]), ([0.6, 3.0], [0.5, None]), ([0.6, math.nan], [0.5, 4.0])):
        assert math.isnan(delta_m(values, singles, [True, False]))


def test_runs_are_paired_by_seed_within_their_data(tmp_path: Path) -> None:
    def run(network: str, seed: int, click: float, data: str = "a") -> None:
        words, test = [f"network={network}"], {"loss": 1.0, "click/auprc": click, "minutes/mse": 2.0}
        choices = {"network": network, "data": data}
        write_run(tmp_path / f"{network}{seed}{data}", words, test, MAIN, seed=seed, choices=choices)

    for seed, click in ((0, 0.5), (1, 0.4)):
        run("single_task", seed, click)
    for seed, click in ((0, 0.6), (1, 0.6), (2, 0.45)):  # seed 2 is compared with the mean, 0.45
        run("mmoe", seed, click)
    run("mmoe", 3, 0.9, data="b")
    runs = read_runs([tmp_path])
    assert dict(zip(runs.table["seed"], runs.table["delta_m"], strict=True))[3] is None  # other data
    [delta] = [each for each in compare(runs).quantities if each.column == "delta_m"]
    assert delta.values["single_task"] == {}
    assert [delta.values["mmoe"][seed] for seed in range(3)] == pytest.approx([10.0, 25.0, 0.0])
    assert any("Maninis" in note for note in compare(runs).notes)


def test_no_single_task_run_no_column(tmp_path: Path) -> None:
    write_run(tmp_path / "0", ["gate=topk"], {"loss": 1.0, "click/auprc": 0.5}, MAIN, choices={"network": "mmoe"})
    assert "delta_m" not in read_runs([tmp_path]).table.columns
