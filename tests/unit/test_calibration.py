"""Calibrated probabilities, sampled negatives and conformal intervals, against other implementations and in use."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from mtl.data_modules.table import TableDataModule
from mtl.data_modules.tables.labels import TargetOptions
from scipy.optimize import minimize
from scipy.special import expit, log_softmax
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from torch import nn

import mtl
from mtl.checkpoints.files import read
from mtl.checks import InputError
from mtl.cli.use import predict as predict_command
from mtl.files.run_files import read_json
from mtl.nn.calibration import Calibration
from mtl.pipeline.run import run
from mtl.predictions import interval, to_predictions
from mtl.runs.predictions_file import read_predictions
from mtl.training.fit_calibration import conformal_scores, fit_calibration, isotonic, platt, temperature
from mtl.types import NetworkOutput, TaskSpec
from mtl.use import program
from mtl.use.export import export_run
from mtl.use.prune import prune_run
from mtl.use.serve import Predictor
from tests.integration.helpers import resume_small
from tests.loaded import loaded
from tests.trees import few_trees

pytestmark = pytest.mark.usefixtures("few_trees")
BINARY, CLASSES = TaskSpec("a", "binary"), TaskSpec("a", "multiclass", num_classes=3)
TASKS: dict[str, Any] = {
    "clicked": {"kind": "binary", "pos_weight": 8.0, "metrics": ["logloss", "auroc"]},
    "bought": {"kind": "binary", "after": "clicked", "metrics": ["logloss"]},
    "plan": {"kind": "multiclass", "class_weights": {"gold": 5.0}, "metrics": ["logloss"]},
    "minutes": {"kind": "regression"},
    "price": {"kind": "regression", "loss": "quantile", "transform": "log"},
}
SMALL = {"recipe.embedding_dim": 4, "recipe.expert_units": [8], "recipe.head_units": [8], "recipe.num_experts": 3}
SMALL |= {"callbacks.routing.figures": False}
QUICK: dict[str, Any] = {"max_epochs": 2, "accelerator": "cpu", "progress": False, "report": False, "options": SMALL}
QUICK |= {"lr": 0.02, "blend": ["linear"], "logger": "none"}


def drawn(rows: int = 1500, seed: int = 0) -> tuple[Any, Any, Any]:
    """Return the logits of a network that is too sure and too low, labels and weights."""
    draw = np.random.default_rng(seed)
    z = draw.normal(0, 1.5, rows)
    return 2.5 * z - 1, (draw.random(rows) < expit(z)).astype(float), draw.uniform(0.2, 2, rows)


def visits(rows: int = 2000, seed: int = 0) -> pl.DataFrame:
    """Return rows with labels of five kinds, some of them missing, and weights."""
    draw = np.random.default_rng(seed)
    age = draw.normal(size=rows)
    clicked = draw.random(rows) < expit(age - 0.5)
    table = {
        "age": age,
        "city": draw.choice(["Lyon", "Oslo"], rows),
        "w": draw.uniform(0, 2, rows),
        "clicked": clicked.astype(int),
        "bought": (clicked & (draw.random(rows) < expit(age))).astype(int),
        "plan": np.where(age + draw.normal(size=rows) > 1, "gold", np.where(draw.random(rows) < 0.5, "silver", "none")),
        "minutes": 3 * age + draw.normal(0, 1, rows),
        "price": np.exp(age + draw.normal(0, 0.3, rows)),
    }
    missing = pl.Series(draw.random(rows) < 0.1)
    return pl.DataFrame(table).with_columns(
        pl.when(~missing).then(pl.col(name)).alias(name) for name in ("plan", "minutes")
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, rows = tmp_path_factory.mktemp("calibrated") / "run", tmp_path_factory.mktemp("rows") / "rows.csv"
    visits().write_csv(rows)
    options = {"calibrate": True, "weight_column": "w", "static_gate": True, "folder": path}
    with few_trees():
        mtl.fit(rows, TASKS, **QUICK | options | {"blend": "auto"})
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return mtl.load(folder)


def test_temperature_is_the_optimum() -> None:
    draw = np.random.default_rng(0)
    z = draw.normal(0, 1, (800, 3))
    label = np.array([draw.choice(3, p=np.exp(row)) for row in log_softmax(z, -1)], dtype=float)
    weight = draw.uniform(0.2, 2, 800)

    def loss(t: Any) -> float:
        return float(-(weight * log_softmax(3 * z / t[0], -1)[np.arange(800), label.astype(int)]).sum())

    best = minimize(loss, [1.0], method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-10}).x[0]
    assert temperature(3 * z, label, weight).scale == pytest.approx(1 / best, rel=1e-5)
    assert best == pytest.approx(3, rel=0.2)


def test_platt_is_logistic_regression_on_platts_targets() -> None:
    """Each row is a positive one with the weight of its target, and a negative one with the rest."""
    x, y, w = drawn()
    positives, all_rows = (w * y).sum(), w.sum()
    target = np.where(y == 1, (positives + 1) / (positives + 2), 1 / (all_rows - positives + 2))
    other = LogisticRegression(C=1e9, tol=1e-10, max_iter=1000)
    other.fit(np.tile(x, 2)[:, None], np.repeat([1, 0], len(x)), np.concatenate([w * target, w * (1 - target)]))
    found = platt(x, y, w)
    assert (found.scale, found.shift) == pytest.approx((other.coef_[0, 0], other.intercept_[0]), abs=1e-5)
    assert found.scale == pytest.approx(0.4, abs=0.1)
    separated = platt(np.array([-1.0, -2, 1, 2]), np.array([0.0, 0, 1, 1]), np.ones(4))
    assert 0 < separated.scale < 10


def test_isotonic_has_the_probabilities_of_scikit_learn() -> None:
    """With few distinct logits, each is a bin, with one more row; a knot stands at the mean logit of a block."""
    x, y, w = drawn()
    x = np.round(x / 0.5).clip(-8, 8) * 0.5
    bins = np.unique(x)
    more = np.concatenate([x, bins]), np.append(y, np.full(len(bins), np.average(y, weights=w)))
    other = IsotonicRegression().fit(*more, np.append(w, np.ones(len(bins)))).predict
    values = np.unique(other(bins))
    at = [np.average(x[other(x) == value], weights=w[other(x) == value]) for value in values]
    knots = np.array(isotonic(x, y, w).knots)
    assert knots[:, 0] == pytest.approx(at)
    assert expit(knots[:, 1]) == pytest.approx(values)
    assert len(knots) > 5


def test_isotonic_map_is_increasing_and_continues_with_slope_one() -> None:
    found = isotonic(*drawn())
    (x, y), (high_x, high_y) = found.knots[0], found.knots[-1]
    assert len(found.knots) <= 50
    grid = torch.linspace(-20, 20, 2001, dtype=torch.float64)
    values = found.apply(grid)
    knots = np.array(found.knots)
    inside = (grid > x) & (grid < high_x)
    assert values[inside].numpy() == pytest.approx(np.interp(grid[inside].numpy(), *knots.T))
    assert bool((values.diff() > 0).all())
    assert values[[0, -1]].tolist() == pytest.approx([y + (-20 - x), high_y + (20 - high_x)])


@pytest.mark.parametrize("noise", [0.0, 1e-9])
def test_a_network_that_predicts_a_constant_gets_a_finite_map(noise: float) -> None:
    _, y, w = drawn()
    logits = 0.3 + noise * np.arange(len(y))
    found = isotonic(logits, np.sort(y), w).apply(torch.tensor(logits, dtype=torch.float32))
    assert bool(found.isfinite().all())
    constant = isotonic(np.full(len(y), 0.3), y, w).apply(torch.tensor([0.3])).sigmoid()
    assert float(constant) == pytest.approx(np.average(y, weights=w))


def test_the_best_method_is_chosen_on_rows_that_it_has_not_seen() -> None:
    weight = torch.ones(4000)

    def chosen(logits: Any, true: Any) -> str:
        label = (np.random.default_rng(1).random(4000) < true).astype(float)
        return fit_calibration(BINARY, torch.tensor(logits), torch.tensor(label), weight)[1]

    z = np.random.default_rng(0).normal(0, 1.5, 4000)
    assert chosen(z, expit(z)).startswith("not calibrated")
    assert chosen(2 * z - 1, expit(z)).startswith("calibrated by Platt")
    assert chosen(z, np.where(z > 1, 0.9, np.where(z > -0.5, 0.5, 0.02))).startswith("calibrated by isotonic")
    rows = torch.randn(4000, 3)
    classes = torch.distributions.Categorical(logits=rows).sample()
    found, said = fit_calibration(CLASSES, 2 * rows, classes, weight)
    assert found is not None
    assert found.scale == pytest.approx(0.5, abs=0.05)
    assert "temperature" in said


@pytest.mark.parametrize("label", [torch.tensor([0.0, 1.0] * 20), torch.zeros(500), torch.tensor([1.0] * 9 + [0] * 99)])
def test_too_few_labels_leave_a_task_as_it_is(label: torch.Tensor) -> None:
    found, said = fit_calibration(BINARY, torch.randn(len(label)), label, torch.ones(len(label)))
    assert found is None
    assert said.startswith("not calibrated: this needs 50 validation rows with labels, 10 of each class")


def test_rows_of_weight_zero_do_not_count() -> None:
    x, y, w = (torch.tensor(each) for each in drawn())
    more = [torch.cat([x, torch.full((500,), 3.0)]), torch.cat([y, torch.zeros(500)]), torch.cat([w, torch.zeros(500)])]
    assert fit_calibration(BINARY, *more) == fit_calibration(BINARY, x, y, w)


KINDS = {
    "plain": TaskSpec("y", "regression", mean=3.0, std=2.0),
    "log": TaskSpec("y", "regression", mean=0.5, std=0.7, transform="log"),
    "quantile": TaskSpec("y", "regression", mean=3.0, std=2.0, loss="quantile", quantiles=(0.3, 0.5, 0.7)),
    "one quantile": TaskSpec("y", "regression", loss="quantile", quantiles=(0.9,)),
    "poisson": TaskSpec("y", "regression", mean=1.0, loss="poisson"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_intervals_cover_new_rows_at_their_level(kind: str) -> None:
    """With n = 99 rows, the expected coverage is exactly the level if scores have no ties, at least it else."""
    task, draw, covered = KINDS[kind], torch.Generator().manual_seed(0), []
    for _ in range(200):
        x = torch.randn(299, generator=draw)
        output = 0.8 * x[:, None] + torch.linspace(-0.1, 0.1, task.outputs) if task.quantiles else 0.8 * x[:, None]
        output = output if task.outputs > 1 else output[:, 0]
        noise = (1 + x.abs()) * torch.randn(299, generator=draw)
        standard = x + noise if task.outputs == 1 else (x + noise)[:, None].expand(-1, 3)
        y = task.unstandardize(standard).reshape(299, -1)[:, 0]
        if kind == "poisson":
            y = torch.poisson(y.clamp(max=50), generator=draw)
        known = replace(task, calibration=conformal_scores(task, output[:99], y[:99]))
        low, high = interval(known, task.unstandardize(output[99:]), known.interval_margin(0.9))
        covered.append(float(((low <= y[99:]) & (y[99:] <= high)).double().mean()))
        assert bool((low <= high).all())
    error = np.std(covered) / np.sqrt(len(covered))
    assert np.mean(covered) > 0.9 - 4 * error
    assert kind == "poisson" or np.mean(covered) < 0.9 + 4 * error


def test_the_rank_of_a_level_is_exact() -> None:
    task = TaskSpec("y", "regression")
    found = conformal_scores(task, torch.zeros(20), torch.arange(1.0, 21).flip(0))
    known = replace(task, calibration=found)
    for level in (0.05, 0.5, 0.9, 0.95):
        assert known.interval_margin(level) == np.ceil(np.round(21 * level, 9))
    assert known.interval_margin(0.9519) == 20  # as 0.952: its interval may be wider, never narrower
    with pytest.raises(InputError, match=r"interval=0\.96: the labelled .* of task 'y' .* for levels up to 0\.952$"):
        known.interval_margin(0.96)
    with pytest.raises(InputError, match="rows of task 'y' are enough for no interval"):
        task.interval_margin(0.5)
    assert len(conformal_scores(task, torch.zeros(5000), torch.randn(5000)).scores) == 999


def test_narrow_levels_do_not_cross() -> None:
    """At a low level, quantiles that are too far apart meet in the middle."""
    low, high = interval(KINDS["quantile"], torch.tensor([[1.0, 2.0, 4.0]]), -5.0)
    assert low.tolist() == high.tolist() == [2.5]


@torch.no_grad()
def test_all_ways_to_use_a_model_give_the_same_numbers(folder: Path, model: Any, tmp_path: Path) -> None:
    """Those of the blend of all models, and of one of them alone."""
    assert model.network.weights["clicked"]["linear"] > 0
    assert {task.name for task in model.spec.tasks if task.calibration} >= {"clicked", "minutes", "price"}
    rows = visits(300, seed=1)
    found = model.predict(rows, interval=0.9)
    model.save(tmp_path / "saved.ckpt")
    numbers = [name for name, kind in found.schema.items() if kind.is_float()]
    again = mtl.load(tmp_path / "saved.ckpt").predict(rows, interval=0.9)
    assert found.equals(again)
    with Predictor(model, interval=0.9) as predictor:
        served = pl.DataFrame(predictor.submit(rows.select(model.columns).to_dicts()[:200]).result())
    assert served.select(numbers).to_numpy() == pytest.approx(found[:200].select(numbers).to_numpy(), abs=1e-6)
    export_run(folder, tmp_path)
    inputs = model.encode(rows.select(model.columns))
    exported = torch.export.load(tmp_path / "model.pt2").module()(inputs)
    names = {"clicked": "clicked_probability", "bought_given_clicked": "bought_probability_given_clicked"}
    for output, column in {**names, "bought": "bought_probability", "minutes": "minutes_prediction"}.items():
        assert exported[output].numpy() == pytest.approx(found[column].to_numpy(), abs=1e-6)
    gold = exported["plan"][:, 0].numpy()
    assert gold == pytest.approx(found["plan_probability_gold"].to_numpy(), abs=1e-6)
    described = json.loads((tmp_path / "preprocessing.json").read_text())["outputs"]
    margin = described["minutes"]["interval"]["0.9"]
    assert (found["minutes_prediction"] + margin).to_numpy() == pytest.approx(found["minutes_high"].to_numpy())
    margin = described["price"]["interval"]["0.9"]
    low = np.log(found["price_quantile_0.1"].to_numpy()) - margin
    assert np.exp(low) == pytest.approx(found["price_low"].to_numpy())


def test_tests_and_pages_see_calibrated_probabilities(folder: Path, model: Any, tmp_path: Path) -> None:
    record = read_json(folder / "results.json")["numbers"]["test"]["blend"]
    assert model.metrics["clicked/logloss"] == record["clicked/logloss"]
    predicted = read_predictions(folder)[1]["clicked"]
    assert float(-(1 - predicted.error).log().mean()) == pytest.approx(record["clicked/logloss"], rel=1e-6)  # float32
    raw = replace(model, spec=replace(model.spec, tasks=[replace(t, calibration=None) for t in model.spec.tasks]))
    rows = visits(3000, seed=2)
    before, after = raw.evaluate(rows), model.evaluate(rows)
    for task in ("clicked", "bought", "plan"):
        assert after[f"{task}/logloss"] < before[f"{task}/logloss"]
    assert after["clicked/auroc"] == pytest.approx(before["clicked/auroc"], abs=1e-5)
    likely = model.predict(rows)["clicked_probability"].to_numpy().astype(float)
    label = rows["clicked"].to_numpy()
    assert after["clicked/logloss"] == pytest.approx(-np.log(np.where(label == 1, likely, 1 - likely)).mean(), abs=1e-5)
    inside = model.predict(rows, ["minutes"], interval=0.9).with_columns(y=rows["minutes"]).drop_nulls()
    share = inside.select(pl.col("y").is_between("minutes_low", "minutes_high").mean()).item()
    assert share == pytest.approx(0.9, abs=0.06)  # 180 validation rows


@torch.no_grad()
def test_pruned_programs_are_the_network_alone(folder: Path, model: Any, tmp_path: Path) -> None:
    report = prune_run(folder, ["clicked"], tmp_path)
    assert report["clicked"]["difference"] < 1e-6
    cut = torch.export.load(tmp_path / "clicked.pt2").module()(model.encode(visits(50).select(model.columns)))
    alone = mtl.load(folder, model="network").predict(visits(50))["clicked_probability"]
    assert cut["clicked"].numpy() == pytest.approx(alone.to_numpy(), abs=1e-6)


class Outputs(nn.Module):
    """A network whose inputs are its logits."""

    tasks = (
        replace(BINARY, calibration=isotonic(*drawn()), sampling_rate=0.2),
        replace(BINARY, name="b", calibration=Calibration(0.7, -0.3)),
        replace(CLASSES, name="c", calibration=Calibration(0.4)),
    )

    def forward(self, inputs: dict[str, torch.Tensor]) -> NetworkOutput:
        return NetworkOutput({name: inputs[f"logits_{name}"] for name in "abc"})


def test_onnx_has_the_calibrated_probabilities(tmp_path: Path) -> None:
    inputs = {"logits_a": 4 * torch.randn(300), "logits_b": torch.randn(300), "logits_c": torch.randn(300, 3)}
    exported = program.export(program.Readable(Outputs()), inputs)
    session = program.save_onnx(exported, [*inputs], ["a", "b", "c"], tmp_path / "model.onnx")
    a, b, c = session.run(["a", "b", "c"], {name: value.numpy() for name, value in inputs.items()})
    known = Outputs.tasks[0].calibration
    assert known is not None
    odds = np.exp(known.apply(inputs["logits_a"].double()).numpy()) * 0.2
    assert a == pytest.approx(odds / (1 + odds), abs=1e-6)
    assert b == pytest.approx(expit(0.7 * inputs["logits_b"].numpy() - 0.3), abs=1e-6)
    assert c == pytest.approx(np.exp(log_softmax(0.4 * inputs["logits_c"].numpy(), -1)), abs=1e-6)


def test_without_the_option_probabilities_stay_as_they_are(folder: Path) -> None:
    model = mtl.fit(visits(), TASKS, weight_column="w", static_gate=True, **QUICK)
    known = {task.name for task in model.spec.tasks if task.calibration is not None}
    assert known == {"minutes", "price"}
    weights, others = (m.network.state_dict() for m in (model, mtl.load(folder)))
    for name, value in weights.items():  # sums of the linear model depend on where tensors lie in memory
        torch.testing.assert_close(value, others[name], atol=1e-7 * ("linear" in name), rtol=0)


def test_a_resumed_run_is_calibrated_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    """What the first end taught is forgotten, and a test of the checkpoint gives the metrics of its run."""
    tasks, options = {"clicked": TASKS["clicked"], "minutes": "regression"}, {**QUICK, "test_checkpoint": "last"}
    whole = mtl.fit(visits(1000), tasks, calibrate=True, **options | {"max_epochs": 3})
    mtl.fit(visits(1000), tasks, calibrate=True, folder=tmp_path / "run", **options)
    resumed = mtl.fit(visits(1000), tasks, resume=tmp_path / "run", **options | {"max_epochs": 3})
    assert [task.calibration for task in resumed.spec.tasks] == [task.calibration for task in whole.spec.tasks]
    assert resumed.metrics == whole.metrics
    plain = mtl.fit(visits(1000), tasks, resume=tmp_path / "run", calibrate=False, **options | {"max_epochs": 3})
    assert plain.spec.tasks[0].calibration is None
    started = mtl.fit(visits(1000), tasks, start_from=str(tmp_path / "run"), **options | {"max_epochs": 1})
    assert started.spec.tasks[0].calibration is None


def test_evaluate_has_the_calibration_of_its_checkpoint(folder: Path, tmp_path: Path) -> None:
    run(resume_small(folder / "checkpoints" / "best.ckpt", tmp_path / "again", evaluate=True))
    records = (read_json(path / "results.json")["numbers"] for path in (folder, tmp_path / "again"))
    before, after = (record["test"]["network"] for record in records)
    assert {name: after[name] for name in after} == {name: pytest.approx(before[name], abs=1e-6) for name in after}


def test_an_ensemble_calibrates_its_mean_and_the_console_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mtl"):
        tasks = {name: TASKS[name] for name in ("clicked", "plan", "minutes")}
        model = mtl.fit(visits(), tasks, calibrate=True, ensemble=2, **QUICK)
    lines = [line for line in caplog.messages if "calibrated" in line]
    assert [line.split(":")[0] for line in lines] == ["task clicked", "task plan"]
    assert all("before" in line and "after (cross-validated)" in line for line in lines)
    task, rows = model.spec.tasks[0], visits(100, seed=1)
    assert task.calibration is not None
    logits = model.network(model.encode(rows.select(model.columns))).predictions["clicked"].detach()
    expected = task.calibration.apply(logits).sigmoid().numpy()
    found = model.predict(rows, interval=0.8)
    assert found["clicked_probability"].to_numpy() == pytest.approx(expected, abs=1e-6)
    assert found["minutes_low"].is_between(-20, found["minutes_prediction"]).all()


def test_a_task_without_validation_labels(caplog: pytest.LogCaptureFixture) -> None:
    rows = visits(600)
    valid = rows.with_columns(clicked=pl.lit(None, pl.Int64), minutes=pl.lit(None, pl.Float64))
    tasks = {"clicked": "binary", "minutes": "regression", "plan": "multiclass"}
    with caplog.at_level(logging.INFO, "mtl"):
        model = mtl.fit(rows, tasks, valid=valid, ignore=["bought", "price"], calibrate=True, **QUICK)
    assert any("task clicked: not calibrated" in line and "there are 0" in line for line in caplog.messages)
    with pytest.raises(InputError, match="task 'minutes' are enough for no interval"):
        model.predict(rows, interval=0.9)
    assert len(model.predict(rows)) == 600


def test_sampled_negatives_are_counted_back_in(tmp_path: Path) -> None:
    """p / (p + (1 - p) / w) of He et al. 2014, in all uses but the metrics."""
    tasks = {"clicked": {"kind": "binary", "metrics": ["logloss"]}}
    sampled = {"clicked": {**tasks["clicked"], "sampling_rate": 0.1}}
    plain, model = (
        mtl.fit(visits(), given, calibrate=True, folder=tmp_path / name, **QUICK)
        for name, given in (("plain", tasks), ("sampled", sampled))
    )
    rows = visits(200, seed=1)
    p = plain.predict(rows)["clicked_probability"].to_numpy().astype(float)
    found = model.predict(rows)["clicked_probability"].to_numpy()
    assert found == pytest.approx(p / (p + (1 - p) / 0.1), abs=1e-6)
    assert model.metrics == plain.metrics
    assert model.evaluate(rows) == plain.evaluate(rows)
    with Predictor(model) as predictor:
        served = predictor.submit(rows.select(model.columns).to_dicts()).result()
    assert [row["clicked_probability"] for row in served] == pytest.approx(found, abs=1e-6)
    inputs = model.encode(rows.select(model.columns))
    assert program.Readable(model.network)(inputs)["clicked"].detach().numpy() == pytest.approx(found, abs=1e-6)
    sampled, other = (read_predictions(tmp_path / name)[1]["clicked"] for name in ("sampled", "plain"))
    assert torch.equal(sampled.prediction, other.prediction)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "regression", "sampling_rate": 0.5}, "sampling_rate=0.5 is for kind=binary, not regression"),
        ({"kind": "binary", "sampling_rate": 0}, "sampling_rate.*must be greater than 0"),
        ({"kind": "binary", "sampling_rate": 2}, "sampling_rate.*must be less than or equal to 1"),
        ({"kind": "binary", "sampling_rate": 0.5, "after": "b"}, "is for the first task of a chain"),
    ],
)
def test_a_sampling_rate_that_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TargetOptions.from_tasks({"a": options, "b": "binary"})


def test_a_sampled_logit_of_any_size_is_finite() -> None:
    task = replace(BINARY, sampling_rate=1e-6)
    assert to_predictions(task, torch.tensor([-200.0, 0.0, 200.0])).tolist() == pytest.approx([0, 1e-6 / (1 + 1e-6), 1])


def test_predict_writes_intervals(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    visits(20).write_csv(tmp_path / "new.csv")
    words = [str(folder), str(tmp_path / "new.csv"), "-o", str(tmp_path / "out.csv")]
    predict_command([*words, "--interval", "0.8", "--keep", ""])
    assert {"minutes_low", "price_high"} <= {*pl.read_csv(tmp_path / "out.csv").columns}
    for level, message in (("0.9999", "levels up to 0.9"), ("1", "must be less than 1")):
        with pytest.raises(SystemExit) as error:
            predict_command([*words, "--force", "--interval", level])
        assert message in str(error.value.code) + capsys.readouterr().err
    with pytest.raises(InputError, match="none of the tasks is a regression"):
        Predictor(mtl.load(folder)).model.predict(visits(3), ["clicked"], interval=0.9)


def test_a_map_is_kept_only_if_it_clearly_helps_on_other_rows() -> None:
    def names(scale: float) -> list[str]:
        """Return what is said of 20 tasks with 450 rows whose logits are ``scale`` times the right ones."""
        lines = []
        for seed in range(20):
            draw = np.random.default_rng(seed)
            z = draw.normal(0, 1.5, 450)
            y = torch.from_numpy((draw.random(450) < expit(z)).astype(float))
            lines.append(fit_calibration(BINARY, torch.from_numpy(scale * z), y, torch.ones(450))[1].split(":")[0])
        return lines

    assert names(1.0).count("not calibrated") >= 17
    assert names(2.0).count("calibrated by Platt scaling") >= 17  # the right map; an isotonic one has flat pieces


def test_calibration_is_measured_before_and_after_on_the_test_rows(folder: Path, tmp_path: Path) -> None:
    record = read_json(folder / "results.json")
    measured, predicted = record["calibration"], read_predictions(folder)[1]
    assert {*measured} == {name for name in ("clicked", "bought", "plan") if read(folder)["calibration"].get(name)}
    assert measured["clicked"]["logloss after"] == pytest.approx(
        record["numbers"]["test"]["blend"]["clicked/logloss"], rel=1e-5
    )
    assert measured["clicked"]["logloss after"] < measured["clicked"]["logloss before"]
    likely, label = predicted["clicked"].prediction.numpy(), predicted["clicked"].label.numpy()
    edges = np.ceil(likely * 15)
    parts = [
        abs(likely[edges == part].mean() - label[edges == part].mean()) * (edges == part).mean() for part in set(edges)
    ]
    assert measured["clicked"]["ECE after"] == pytest.approx(sum(parts), rel=1e-4)
    plan = predicted["plan"]
    assert measured["plan"]["logloss after"] == pytest.approx(float(-plan.likelihood.log().mean()), rel=1e-5)
    run(resume_small(folder / "checkpoints" / "best.ckpt", tmp_path / "again", evaluate=True))
    again = read_json(tmp_path / "again" / "results.json")["calibration"]
    assert again["plan"] == pytest.approx(measured["plan"], rel=1e-5)


def test_evaluate_measures_intervals_on_rows_with_labels(folder: Path, model: Any, tmp_path: Path) -> None:
    rows = visits(500, seed=4)
    rows.write_csv(tmp_path / "new.csv")
    words = [f"data.test_path={tmp_path}/new.csv", "interval=0.8"]
    run(resume_small(folder / "checkpoints" / "best.ckpt", tmp_path / "again", *words, evaluate=True))
    measured, values = read_json(tmp_path / "again/results.json")["intervals"], model.evaluate(rows, interval=0.8)
    predicted = model.predict(rows, interval=0.8).with_columns(minutes=rows["minutes"], price=rows["price"])
    for task in ("minutes", "price"):  # a prediction, and quantiles
        inside = predicted.drop_nulls(task).select(pl.col(task).is_between(f"{task}_low", f"{task}_high").mean()).item()
        labelled = predicted.drop_nulls(task)
        width = (labelled[f"{task}_high"] - labelled[f"{task}_low"]).mean()
        assert measured[task] == pytest.approx({"level": 0.8, "coverage": inside, "width": width}, rel=1e-5)
        assert values[f"{task}/interval_coverage"] == pytest.approx(inside)
        assert values[f"{task}/interval_width"] == pytest.approx(width, rel=1e-5)
    with pytest.raises(InputError, match=r"levels up to 0\.9"):
        run(resume_small(folder / "checkpoints/best.ckpt", tmp_path / "b", "interval=0.9999", evaluate=True))


def test_intervals_of_labels_that_are_never_negative_have_no_negative_end(tmp_path: Path) -> None:
    frame = visits(300).drop("w", "clicked", "bought", "plan").with_columns(pl.col("minutes") ** 2)
    tasks = {"minutes": "regression", "price": {"kind": "regression", "transform": "log"}, "age": "regression"}
    frame.write_csv(tmp_path / "rows.csv")
    data = loaded(TableDataModule(str(tmp_path / "rows.csv"), tasks, batch_size=32))
    specs = {task.name: task for task in data.spec.tasks}
    assert {name: task.not_negative for name, task in specs.items()} == {"minutes": True, "price": False, "age": False}
    low, _ = interval(specs["minutes"], torch.tensor([0.1, 5.0]), 2.0)
    assert low.tolist() == [0.0, 3.0]
    assert [float(end) for end in interval(specs["minutes"], torch.tensor([-3.0]), 2.0)] == [0, 0]  # in order
    assert interval(specs["age"], torch.tensor([0.1]), 2.0)[0].item() == pytest.approx(-1.9)
    frame.with_columns(pl.col("minutes") - 50).write_csv(tmp_path / "later.csv")
    again = TableDataModule(str(tmp_path / "later.csv"), tasks, batch_size=32)
    again.continue_from(data.state_dict())
    assert not loaded(again).spec.tasks[0].not_negative


def test_a_damaged_calibration_is_one_message(folder: Path, tmp_path: Path) -> None:
    content = dict(read(folder))
    for calibration in ({"minutes": {"scores": ("a",)}}, {"minutes": 3}, {"clicked": {"knots": ((1.0,),)}}):
        torch.save(content | {"calibration": calibration}, tmp_path / "bad.ckpt")
        with pytest.raises(InputError, match=r"bad\.ckpt.*calibration"):
            mtl.load(tmp_path / "bad.ckpt")
