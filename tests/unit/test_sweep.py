"""The tables at the end of a multirun."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from mtl.run.checkpoint import flatten
from mtl.run.resume import plain
from mtl.run.sweep import SweepTable, differences, network_table, summarise, task_table
from tests.integration.helpers import composed

MAIN = {"click": "auprc", "minutes": "rmse"}
SCORES = {  # by network, then seed
    "mmoe": {1: (0.70, 1.5), 2: (0.72, 1.7)},
    "shared_bottom": {1: (0.68, 1.5), 2: (0.71, None)},
    "single_task": {1: (0.69, 1.4), 3: (0.90, 1.2)},
}


def finished(folder: Path) -> SweepTable:
    """Return the table of a sweep of networks and seeds that has ended."""
    table = SweepTable()
    for network, seeds in SCORES.items():
        for seed, (auprc, rmse) in seeds.items():
            job = folder / f"{network}_{seed}"
            job.mkdir()
            test = {
                "loss": 0.5,
                "click/loss": 0.4,
                "click/auprc": auprc,
                "minutes/rmse": rmse,
                "experts_per_sample": 2.0,
                "dead_experts": 0.0,
            }
            plain = {"parameters": 1234, "epochs": 3, "seconds_per_epoch": 1.5}
            record = {"label": network, "seed": seed, "test": test, "main_metrics": MAIN, **plain}
            (job / "results.json").write_text(json.dumps(record))
            hydra = SimpleNamespace(mode="MULTIRUN", runtime=SimpleNamespace(output_dir=str(job)))
            words = [f"network={network}", "data=table", f"seed={seed}"]
            done: Any = SimpleNamespace(hydra_cfg=SimpleNamespace(hydra=hydra), overrides=words)
            table.on_job_end(None, done)  # type: ignore[arg-type]  # it reads nothing else of Hydra
    return table


def lines(table: Any) -> list[list[str]]:
    """Return the cells of a table's rows as it is printed in 80 columns."""
    console = Console(width=80)
    with console.capture() as shown:
        console.print(table)
    text = shown.get().splitlines()
    assert max(map(len, text)) <= 80
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text if line.startswith("│")]


def test_networks_beside_each_other_per_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = finished(tmp_path)
    settings: dict[str, list[dict[str, Any]]] = {}
    for row in table.rows:
        settings.setdefault(row["setting"].split(" ")[0].removeprefix("network="), []).append(row)
    assert lines(task_table(settings, "network", MAIN)) == [
        ["click auprc ↑", "mmoe", "0.7100 ± 0.01", ""],
        ["", "shared_bottom", "0.6950 ± 0.015", "-0.0150 ± 0.005"],
        ["", "single_task", "0.7950 ± 0.11", "-0.0100"],  # one seed in common
        ["minutes rmse ↓", "mmoe", "1.6000 ± 0.1", ""],
        ["", "shared_bottom", "1.5000", "+0.0000"],
        ["", "single_task", "1.3000 ± 0.1", "-0.1000"],
    ]
    assert [column.header for column in task_table(settings, "network", MAIN).columns] == [
        "task",
        "network",
        "test",
        "minus mmoe",
    ]
    narrow, wide = (
        [column.header for column in network_table(settings, "network", width).columns] for width in (80, 220)
    )
    assert narrow == ["network", "seeds", "loss", "experts per sample", "parameters", "epochs", "seconds per epoch"]
    assert wide == [*narrow[:4], "dead experts", *narrow[4:]]

    table.on_multirun_end(None)  # type: ignore[arg-type]  # it does not look at it
    shown = capsys.readouterr().out
    assert shown.index("mean over seeds") < shown.index("main metric of each task")
    assert "data=table" not in shown  # what all jobs share
    assert "network=" not in shown  # the title of the column says so
    assert shown.count("shared_bottom") == 3
    rows = list(csv.DictReader((tmp_path / "summary.csv").read_text().splitlines()))
    assert [row["test minutes/rmse"] for row in rows] == ["1.5", "1.7", "1.5", "", "1.4", "1.2"]


def test_differences_are_between_runs_of_one_seed() -> None:
    mine = [{"seed": 1, "x": 3.0}, {"seed": 2, "x": None}, {"seed": 3, "x": 5.0}]
    assert differences(mine, [{"seed": 3, "x": 1.0}, {"seed": 2, "x": 1.0}], "x") == [None, None, 4.0]


@pytest.mark.parametrize(
    ("values", "sign", "text"),
    [
        ([0.5], "", "0.5000"),
        ([0.5], "+", "+0.5000"),
        ([-12.345], "+", "-12.35"),
        ([1200.0, 1200.0], "", "1,200"),
        ([None, None], "+", "-"),
        ([1.0, 2.0, None], "+", "+1.5000 ± 0.5"),
    ],
)
def test_summary_of_values(values: list[float | None], sign: str, text: str) -> None:
    assert summarise(values, sign) == text


def test_one_setting_has_no_difference(tmp_path: Path) -> None:
    rows = finished(tmp_path).rows
    assert lines(task_table({"all": rows[:2]}, "setting", {"click": "auprc"})) == [
        ["click auprc ↑", "all", "0.7100 ± 0.01", ""]
    ]


def test_baselines_differ_in_the_network_alone() -> None:
    configs = [flatten(plain(composed(["data=table", f"network={name}"]))) for name in SCORES]
    for other in configs[1:]:
        changed = {key for key in configs[0].keys() | other.keys() if configs[0].get(key) != other.get(key)}
        assert {key.partition(".")[0] for key in changed} == {"network", "label", "choices"}
        assert {key for key in changed if key.startswith("choices")} == {"choices.network"}
        kept = {
            key: value for key, value in other.items() if key.startswith("network.") and not key.endswith("_target_")
        }
        assert kept.items() <= configs[0].items()  # bottom, experts and heads
