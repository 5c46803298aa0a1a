"""Thresholds of binary tasks, which the validation rows choose, and decisions with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import mtl
from mtl.checks import InputError
from mtl.files.run_files import PREDICTIONS, read_json
from mtl.nn.calibration import Calibration
from mtl.pipeline.run import run
from mtl.training.fit_calibration import measure_intervals
from mtl.training.labeled_predictions import LabeledPredictions
from mtl.training.thresholds import Rule, best_threshold, choose_thresholds, measure_decisions
from mtl.types import TaskSpec
from tests.integration.helpers import compose_small, resume_small
from tests.unit.test_calibration import QUICK, visits

COSTS: Rule = {"fp": 1.0, "fn": 7.0}
RULES = pytest.mark.parametrize("rule", ["f1", COSTS, {"fp": 9.0}])


def drawn(count: int, seed: int = 0) -> LabeledPredictions:
    """Return rows whose predictions have ties."""
    draw = np.random.default_rng(seed)
    prediction = draw.random(count).round(1)
    label = draw.random(count) < prediction
    return LabeledPredictions(*map(torch.from_numpy, (prediction, label.astype(int), np.arange(count))))


def worth(rows: LabeledPredictions, threshold: float, rule: Rule) -> float:
    """Return the F1 of decisions, or minus their cost, row by row."""
    pairs = [(p > threshold, y == 1) for p, y in zip(rows.prediction.tolist(), rows.label.tolist(), strict=True)]
    hits, false, missed = pairs.count((True, True)), pairs.count((True, False)), pairs.count((False, True))
    if rule == "f1":
        return hits / (hits + (false + missed) / 2)
    return -(rule.get("fp", 1) * false + rule.get("fn", 1) * missed)


@RULES
@pytest.mark.parametrize("seed", range(5))
def test_no_threshold_is_better_on_the_rows_that_choose_it(rule: Rule, seed: int) -> None:
    rows = drawn(40, seed)
    threshold = best_threshold(rows, rule)
    assert worth(rows, threshold, rule) == max(worth(rows, at / 200, rule) for at in range(-1, 201))
    measured = measure_decisions(rows, threshold, rule)
    cost = measured["f1"] if rule == "f1" else -(measured["cost"] or 0) * len(rows)
    assert cost == pytest.approx(worth(rows, threshold, rule))


def test_decisions_that_nobody_is_positive_have_no_precision() -> None:
    rows = LabeledPredictions(torch.tensor([0.2, 0.4]), torch.tensor([0, 1]))
    measured = measure_decisions(rows, 0.5, "f1")
    assert (measured["precision"], measured["recall"], measured["accuracy"]) == (None, 0.0, 0.5)


def test_the_validation_rows_are_calibrated_along_their_chain() -> None:
    z, label, ids = torch.randn(2, 30, generator=torch.Generator().manual_seed(0)).double(), [], torch.arange(30)
    label = (z > 0.3).long()
    a = TaskSpec("a", "binary", calibration=Calibration(scale=2.0))
    b = TaskSpec("b", "binary", after="a", calibration=Calibration(shift=1.0))
    stored = {
        "a": LabeledPredictions(z[0].sigmoid(), label[0], row_id=ids),
        "b": LabeledPredictions(z.sigmoid().prod(0)[3:], label[1][3:], row_id=ids[3:]),
    }
    calibrated = torch.stack([(2 * z[0]).sigmoid(), (z[1] + 1).sigmoid()])
    expected = {
        "a": best_threshold(replace(stored["a"], prediction=calibrated[0]), "f1"),
        "b": best_threshold(replace(stored["b"], prediction=calibrated.prod(0)[3:]), "f1"),
    }
    assert choose_thresholds({"a": a, "b": b}, stored, "f1") == pytest.approx(expected)
    sampled = {"a": replace(a, sampling_rate=0.5), "b": b}
    with pytest.raises(InputError, match="no binary task has validation rows of both classes"):
        choose_thresholds(sampled, stored, "f1")


def test_evaluate_chooses_on_validation_rows_and_measures_on_others(tmp_path: Path) -> None:
    frame, new, tasks = visits(1200), visits(400, seed=5), {"clicked": "binary", "minutes": "regression"}
    options: dict[str, Any] = {**QUICK, "folder": tmp_path / "run", "calibrate": True}
    mtl.fit(frame.drop("bought", "plan", "price"), tasks, **options)
    path = tmp_path / "run" / PREDICTIONS
    file = tmp_path / "new.csv"
    new.drop("bought", "plan", "price").write_csv(file)
    words = [f"data.test_path={file}", "threshold={fp: 1, fn: 7}", "report=false"]
    run(resume_small(tmp_path / "run/checkpoints/best.ckpt", tmp_path / "again", *words, evaluate=True))
    [(task, measured)] = read_json(tmp_path / "again" / "results.json")["thresholds"].items()
    model = mtl.load(tmp_path / "run")
    values = model.evaluate(pl.read_csv(file), threshold=COSTS)
    assert values["clicked/threshold"] == pytest.approx(measured["threshold"])
    assert values["clicked/cost_at_threshold"] == pytest.approx(measured["cost"])
    predicted = model.predict(pl.read_csv(file))["clicked_probability"] > measured["threshold"]
    label = pl.read_csv(file)["clicked"]
    wrong = (predicted & (label == 0)).sum() + 7 * (~predicted & (label == 1)).sum()
    assert (task, measured["cost"]) == ("clicked", pytest.approx(wrong / label.count()))
    path.unlink()
    with pytest.raises(InputError, match=PREDICTIONS):
        run(resume_small(tmp_path / "run/checkpoints/best.ckpt", tmp_path / "b", *words, evaluate=True))


def test_threshold_between_neighbouring_floats() -> None:
    """In double precision: the positive row stays above it."""
    below = torch.tensor(0.999999)
    prediction = torch.stack([below, torch.nextafter(below, torch.ones(()))])
    rows = LabeledPredictions(prediction, torch.tensor([0, 1]))
    assert measure_decisions(rows, best_threshold(rows, "f1"), "f1")["f1"] == 1


def test_task_with_too_few_rows_for_its_interval_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    tasks = {name: TaskSpec(name, "regression") for name in ("many", "few")}
    tasks["many"] = replace(tasks["many"], calibration=Calibration(scores=(1.0,) * 999))
    rows = LabeledPredictions(torch.zeros(2).double(), torch.tensor([0.5, 3.0]).double())
    assert measure_intervals(tasks, dict.fromkeys(tasks, rows), 0.9)["many"]["coverage"] == 0.5
    assert "validation rows of task 'few' are enough for no interval" in caplog.text


@pytest.mark.parametrize(
    ("kind", "option", "message"),
    [
        ("regression", "threshold=f1", "none of the tasks is binary"),
        ("regression", "calibrate=true", "none .* is binary or multiclass"),
        ("binary", "interval=0.9", "none .* is a regression"),
    ],
)
def test_option_that_no_task_needs_is_refused_before_the_training(
    kind: str, option: str, message: str, tmp_path: Path
) -> None:
    pl.DataFrame({"x": range(60), "y": [0, 1] * 30}).write_csv(tmp_path / "rows.csv")
    words = ["data=table", f"data.path={tmp_path}/rows.csv", f"data.tasks={{y: {kind}}}", option]
    with pytest.raises(InputError, match=f"^{option.partition('=')[0]}: {message}"):
        run(compose_small(tmp_path / "run", *words))
