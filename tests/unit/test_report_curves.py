"""Curves over runs: what belongs together, mean and interval by hand, what is written."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.utils.tensorboard import SummaryWriter

from mtl.checks import InputError
from mtl.report import curves
from mtl.report.page import picture


def write_run(folder: Path, options: dict[str, Any], values: dict[int, float], metric: str = "val/loss") -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(options | {"paths": {"run_dir": str(folder)}}))
    writer = SummaryWriter(str(folder / "tensorboard"))
    for step, value in values.items():
        writer.add_scalar(metric, value, step)
    writer.close()


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = tmp_path / "sweep"
    for number, (seed, rho, first) in enumerate([(0, 0.0, 4.0), (1, 0.0, 8.0), (0, 1.0, 1.0), (1, 1.0, 1.0)]):
        own = {"seed": seed, "data": {"rho": rho, "shuffle_seed": seed}, "label": f"run{number}"}
        own |= {"callbacks": {"best": {"dirpath": str(folder / f"{number}_x" / "checkpoints")}}}
        own |= {"setting": {"relatedness": rho}}  # another name for the same choice
        length = 3 if number else 2  # the first run stopped early
        write_run(folder / f"{number}_x", own, {10 * step: first / (step + 1) for step in range(length)})
    return folder


def test_runs_are_grouped_by_what_was_chosen(sweep: Path) -> None:
    heading, found = curves.read_curves(sweep, "val/loss", 0.9)
    assert heading == "data.rho"
    assert [(curve.label, curve.runs, curve.steps) for curve in found] == [
        ("0.0", 2, [0, 10]),  # the steps that both runs have
        ("1.0", 2, [0, 10, 20]),
    ]


def test_interval_of_the_mean_by_hand(sweep: Path) -> None:
    _, (first, second) = curves.read_curves(sweep, "val/loss", 0.9)
    assert first.mean == pytest.approx([6, 3])
    error = math.sqrt(8) / math.sqrt(2)  # of 4 and 8
    quantile = math.tan(math.pi * 0.45)  # Student's t with one degree of freedom is Cauchy's distribution
    assert first.low[0] == pytest.approx(6 - quantile * error)
    assert first.high[0] == pytest.approx(6 + quantile * error)
    assert second.low == second.mean == second.high  # no deviation
    alone = curves.average("one", [{0: 3.0}], 0.9)
    assert (alone.mean, alone.low, alone.high) == ([3.0], [3.0], [3.0])


def test_files_are_written(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curves.main([str(sweep), "--metric", "val/loss"])
    with (sweep / "curves_val_loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5
    assert (rows[2]["setting"], rows[2]["step"], float(rows[2]["mean"])) == ("1.0", "0", 1.0)
    assert (sweep / "curves_val_loss.png").stat().st_size > 10_000
    assert "data.rho 1.0: 2 runs, last 0.3333 [0.3333, 0.3333]" in capsys.readouterr().out


def test_a_run_without_the_metric_is_left_out(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(
        sweep / "4_x",
        {"seed": 2, "data": {"rho": 1.0, "shuffle_seed": 2}, "setting": {"relatedness": 1.0}},
        {0: 1.0},
        "train/loss",
    )
    assert [curve.runs for curve in curves.read_curves(sweep, "val/loss", 0.9)[1]] == [2, 2]
    (sweep / "5_x").mkdir()
    (sweep / "5_x" / "config.yaml").write_text("data: {rho: 1.0}")  # of a run that failed at once
    assert [curve.runs for curve in curves.read_curves(sweep, "val/loss", 0.9)[1]] == [2, 2]
    left_out = capsys.readouterr().err
    assert "4_x: no metric val/loss" in left_out
    assert "5_x: no metric val/loss" in left_out


def test_legend_beside_the_panel_is_part_of_the_picture() -> None:
    long = "permutation=sinkhorn recipe.permutation.epochs=2 recipe.expert_units=[128,64] data.rows=[300,100,100]"
    every = [curves.Curve(f"gate=topk{n} {long}", 3, [0, 10], [1.0, 0.5], [0.9, 0.4], [1.1, 0.6]) for n in range(16)]
    figure = curves.draw(every, "setting", "val/loss", 0.9)
    [axes], narrow = figure.axes, figure.get_figwidth()
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 16
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert len(set(labels)) == 16
    assert max(len(line) for label in labels for line in label.splitlines()) <= 32
    assert axes.get_legend().get_title().get_text() == "setting (3 runs)"
    assert picture(figure, "").width > 96 * (narrow + 1)


def test_a_curve_is_found_by_the_name_that_monitors_have(tmp_path: Path) -> None:
    (tmp_path / curves.CSV_LOG).parent.mkdir(parents=True)
    (tmp_path / curves.CSV_LOG).write_text("step,val_metrics/a/auroc,val/loss\n3,0.5,\n3,,2.0\n7,0.75,\n")
    for name in ("val/a/auroc", "val_metrics/a/auroc"):
        assert curves.read_course(tmp_path, name) == {3: 0.5, 7: 0.75}


def test_bad_input_is_one_line(sweep: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no metric val/auc; it has val/loss"):
        curves.read_curves(sweep, "val/auc", 0.9)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=r"error: .*empty contains no run; a run is a folder with a config.yaml"):
        curves.main([str(tmp_path / "empty")])
    with pytest.raises(SystemExit, match=r"error: --band=1.5: must lie between 0 and 1"):
        curves.main([str(sweep), "--band", "1.5"])
