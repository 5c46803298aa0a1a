"""The constant prediction and the quick models that a test has beside the network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from mtl.callbacks.baselines import leads
from mtl.data_modules.constant_predictions import fit_constant
from torch import Tensor

import mtl
from mtl import table_models
from mtl.checkpoints.files import read
from mtl.files.run_files import read_json
from mtl.pipeline.run import run
from mtl.table_models import choose_model
from mtl.table_models.base import Constant, TableModel, split_outputs
from mtl.table_models.linear import Linear
from mtl.table_models.trees import LightGBM
from mtl.training.evaluation import Evaluation
from mtl.training.losses import task_loss_sums
from mtl.training.measurements import Key
from mtl.types import Bag, Batch, Categorical, DataSpec, Numeric, TaskSpec
from tests.integration.helpers import compose_small, resume_small, train_table
from tests.unit.test_fit import QUICK, TASKS, visits

ROWS = 400
NUMBER, SKEWED = TaskSpec("number", "regression", mean=3.0, std=2.0), {"kind": "regression", "mean": 1.0, "std": 0.5}
KINDS = [
    TaskSpec("binary", "binary"),
    TaskSpec("classes", "multiclass", 3),
    NUMBER,
    TaskSpec("log", transform="log", **SKEWED),
    TaskSpec("mae", loss="mae", **SKEWED),
    TaskSpec("quantile", loss="quantile", quantiles=(0.1, 0.5, 0.9), **SKEWED),
    TaskSpec("poisson", "regression", mean=0.5, loss="poisson"),
]


def labels(task: TaskSpec, draw: np.random.Generator, signal: np.ndarray) -> Tensor:
    """Return labels ``[ROWS]`` that follow ``signal``, a tenth of them missing."""
    noisy = signal + 0.1 * draw.normal(size=ROWS)
    if task.kind == "binary":
        values = torch.tensor(noisy > 0.5).float()
    elif task.kind == "multiclass":
        values = torch.tensor(np.digitize(noisy, [-1.0, 1.0]))
    else:
        values = torch.tensor(draw.poisson(np.exp(signal)) if task.loss == "poisson" else np.exp(0.3 * noisy)).double()
    missing = torch.tensor(draw.random(ROWS) < 0.1)
    return values.masked_fill(missing, -100 if task.kind == "multiclass" else torch.nan)


def table() -> tuple[DataSpec, Batch]:
    """Return rows in which a number, a category and the elements of a list say what the labels are."""
    draw = np.random.default_rng(0)
    x, city, tags = draw.normal(size=ROWS), draw.integers(1, 5, ROWS), draw.integers(0, 4, (ROWS, 3))
    signal = x + np.array([0.0, -1.0, 0.0, 1.0, 0.5])[city] + 0.5 * (tags == 1).sum(1)
    inputs = {"city": torch.tensor(city), "tags": torch.tensor(tags), "numbers": torch.tensor(x).float()[:, None]}
    spec = DataSpec({"city": Categorical(6), "tags": Bag(4, 3), "numbers": Numeric(1)}, KINDS)
    targets = {task.name: labels(task, draw, signal) for task in KINDS}
    return replace(spec, tasks=[replace(t, constant=fit_constant(t, targets[t.name])) for t in KINDS]), Batch(
        inputs, targets
    )


def losses(spec: DataSpec, rows: Batch, predictions: dict[str, Tensor]) -> dict[str, float]:
    names, totals, counts = task_loss_sums({task.name: task for task in spec.tasks}, predictions, rows.targets)
    return dict(zip(names, (totals / counts).tolist(), strict=True))


def test_no_other_constant_has_a_lower_loss() -> None:
    spec, rows = table()
    best = losses(spec, rows, Constant(spec.tasks, spec.inputs).predict(rows.inputs))
    flat = torch.tensor([number for task in spec.tasks for number in task.constant])
    assert torch.isfinite(flat).all()
    for index in range(len(flat)):
        for step in (-0.05, 0.05):
            moved = flat + step * (torch.arange(len(flat)) == index)
            others = losses(spec, rows, split_outputs(spec.tasks, moved.expand(ROWS, -1)))
            assert all(others[name] >= best[name] - 1e-6 for name in best)
    assert fit_constant(NUMBER, torch.full((3,), torch.nan)) == ()


def test_error_of_a_difference_is_that_of_the_paired_rows() -> None:
    rows = table()[1]
    draw, evaluations, losses = np.random.default_rng(1), [Evaluation([NUMBER]) for _ in range(2)], []
    common = torch.tensor(draw.normal(size=ROWS))
    for evaluation in evaluations:
        predicted = common + 0.1 * torch.tensor(draw.normal(size=ROWS))
        for part in torch.arange(ROWS).split(150):
            evaluation.update({"number": predicted[part]}, {"number": rows.targets["number"][part]})
        labelled = ~rows.targets["number"].isnan()
        losses.append((NUMBER.unstandardize(predicted) - rows.targets["number"])[labelled].square().numpy())
    metric = evaluations[0].main_metrics()["number"]
    assert metric == "mse"
    expected = (losses[0] - losses[1]).std(ddof=1) / np.sqrt(len(losses[0]))
    key = Key("test", "number", "mse", "network - linear")
    mean = float((losses[0] - losses[1]).mean())
    assert leads(*evaluations, "linear") == {key: pytest.approx((mean, expected), rel=0.25)}
    assert leads(evaluations[0], evaluations[0], "linear") == {key: (0.0, 0.0)}
    found, other = leads(*evaluations, "linear"), [Evaluation([NUMBER]) for _ in range(2)]
    for before, after in zip(evaluations, other, strict=True):
        after._batches["number"] = before._batches["number"][::-1]
    assert leads(*other, "linear") == found  # in another order of the rows
    alone = losses[0].std() / np.sqrt(ROWS)
    assert expected < 0.5 * alone  # the pairs count


def fit(model: type[TableModel], spec: DataSpec, rows: Batch) -> TableModel:
    return model(spec.tasks, spec.inputs).fit(rows.inputs, rows.targets, rows.weights)


@pytest.mark.parametrize("model", [Linear, LightGBM])
def test_models_learn_what_the_inputs_say(model: type[TableModel]) -> None:
    spec, rows = table()
    found = losses(spec, rows, fit(model, spec, rows).predict(rows.inputs))
    best = losses(spec, rows, Constant(spec.tasks, spec.inputs).predict(rows.inputs))
    assert all(found[name] < 0.6 * best[name] for name in best if name != "poisson"), (found, best)
    assert found["poisson"] < best["poisson"]  # whose labels are mostly noise


@pytest.mark.parametrize("model", [Constant, Linear, LightGBM])
def test_a_model_predicts_alike_from_its_saved_state(model: type[TableModel], tmp_path: Path) -> None:
    """Also ids that it has not seen; a second fit forgets the first."""
    spec, rows = table()
    fitted = fit(model, spec, rows)
    torch.save(fitted.state_dict(), tmp_path / "state.pt")
    restored = model(spec.tasks, spec.inputs)
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    inputs = {**rows.inputs, "city": torch.arange(ROWS) % 6}
    first, second = (each.predict(inputs) for each in (fitted, restored))
    assert [*first] == [*second] == [task.name for task in spec.tasks]
    assert [value.shape[1:].numel() for value in first.values()] == [task.outputs for task in spec.tasks]
    assert all(value.dtype == torch.float32 and torch.equal(value, second[name]) for name, value in first.items())
    restored.fit(rows.inputs, rows.targets)
    assert all(torch.equal(value, first[name]) for name, value in restored.predict(inputs).items())


@pytest.mark.parametrize("model", [Linear, LightGBM])
def test_models_take_few_rows_unknown_ids_and_weights(model: type[TableModel]) -> None:
    spec, rows = table()
    few = rows.select(torch.arange(4))
    found = fit(model, spec, few).predict({**rows.inputs, "city": torch.full((ROWS,), 5)})
    assert all(bool(value.isfinite().all()) for value in found.values())
    wrong = {"number": torch.where(torch.arange(ROWS) % 2 == 0, rows.targets["number"], 100.0)}
    weights = {"number": (torch.arange(ROWS) % 2 == 0).double() * 2}
    [task] = [task for task in spec.tasks if task.name == "number"]
    found = fit(model, replace(spec, tasks=[task]), Batch(rows.inputs, wrong, weights)).predict(rows.inputs)
    assert float(task.unstandardize(found["number"]).max()) < 10


@pytest.mark.parametrize("model", [Linear, LightGBM])
def test_a_task_without_a_label_in_the_rows_is_predicted_as_constant(model: type[TableModel]) -> None:
    spec, rows = table()
    rows.targets["number"].fill_(torch.nan)
    fitted = fit(model, spec, rows)
    fitted.load_state_dict(fitted.state_dict())
    [task] = [task for task in spec.tasks if task.name == "number"]
    assert fitted.predict(rows.inputs)["number"].tolist() == pytest.approx([*task.constant] * ROWS)


def test_trees_are_for_few_outputs_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [replace(NUMBER, name=str(number)) for number in range(33)]
    lists, columns = {"tags": Bag(4, 3)}, {"x": Numeric(1), "tags": Bag(4, 3)}
    assert [choose_model("auto", columns, tasks) for tasks in (KINDS, many)] == ["lightgbm", "linear"]
    assert [choose_model("lightgbm", lists, KINDS), choose_model("none", columns, KINDS)] == ["linear", "none"]
    monkeypatch.setattr(table_models, "find_spec", lambda name: None)
    assert choose_model("auto", columns, KINDS) == "linear"


def test_a_trained_model_stands_beside_a_constant_and_a_quick_model(tmp_path: Path) -> None:
    test = visits(100, seed=1)
    model = mtl.fit(visits(), TASKS, test=test, baseline="linear", **QUICK)
    table = model.metrics_table()
    assert table.columns == ["task", "metric", "network", "constant", "linear"]
    assert table["metric"].to_list() == ["auroc", "accuracy", "mse", "mae", "r2", "macro_f1"]
    values = {(task, metric): constant for task, metric, _, constant, _ in table.iter_rows()}
    usual = int(visits()["clicked"].mean() > 0.5)
    assert values["clicked", "accuracy"] == pytest.approx((test["clicked"].drop_nulls() == usual).mean())
    assert values["clicked", "auroc"] == 0.5
    assert -0.1 < values["minutes", "r2"] <= 0
    model.save(tmp_path / "model.ckpt")
    assert mtl.load(tmp_path / "model.ckpt").metrics_table().equals(table)
    plain = mtl.fit(visits(), TASKS, test=test, baseline="none", **QUICK)
    assert plain.metrics_table().columns == ["task", "metric", "network", "constant"]


def test_a_test_alone_has_the_constant_of_the_training(tmp_path: Path) -> None:
    folder = train_table(tmp_path, visits(), "data.tasks.clicked={kind: binary}", "data.ignore=[plan,minutes]")
    run(resume_small(folder / "checkpoints" / "best.ckpt", tmp_path / "again", evaluate=True))
    before, after = (read_json(path / "results.json")["numbers"]["test"] for path in (folder, tmp_path / "again"))
    assert before.keys() >= {"network", "constant", "lightgbm"}
    assert "lightgbm" not in after
    assert after["constant"] == before["constant"]


def test_each_task_of_a_chain_has_its_own_share(tmp_path: Path) -> None:
    frame = pl.DataFrame({"x": range(300), "click": [0, 1, 1] * 100, "buy": [0, 0, 1] * 100})
    words = ("data.tasks.click={kind: binary}", "data.tasks.buy={kind: binary, after: click, metrics: [logloss]}")
    folder = train_table(tmp_path, frame, *words)
    model = mtl.load(folder)
    share = 1 / (1 + np.exp(-np.array([task.constant[0] for task in model.spec.tasks])))
    assert share == pytest.approx([2 / 3, 1 / 3], abs=0.05)
    test = model.baselines["constant"]["buy/logloss"]
    assert test == pytest.approx(0.64, abs=0.1)  # that of a third
    assert set(model.baselines["lightgbm"]) == {"click/auroc", "click/accuracy", "buy/logloss"}


def test_lightgbm_writes_nothing_and_reads_ids_with_gaps(capfd: pytest.CaptureFixture[str]) -> None:
    """Its threads warn of sparse ids whatever the verbosity; ids that its rows lack are predicted as any other."""
    draw, threads = np.random.default_rng(0), torch.get_num_threads()
    many, few = draw.integers(0, 3000, 2000), draw.choice([7, 250, 900], 2000)
    spec = DataSpec({"many": Categorical(3000), "few": Categorical(1000)}, [TaskSpec("y", "binary", constant=(0.0,))])
    label = (few == 250) ^ (draw.random(2000) < 0.1)
    rows = Batch({"many": torch.tensor(many), "few": torch.tensor(few)}, {"y": torch.tensor(label).float()})
    torch.set_num_threads(2)
    try:
        model = fit(LightGBM, spec, rows)
        model.load_state_dict(model.state_dict())
        logits = model.predict({"many": torch.arange(4) + 10, "few": torch.tensor([250, 7, 8, 999])})["y"]
    finally:
        torch.set_num_threads(threads)
    assert capfd.readouterr() == ("", "")
    assert logits[0] > 1
    assert (logits[1:] < -1).all()


def test_a_constant_ranks_nothing(tmp_path: Path) -> None:
    frame = pl.DataFrame({"x": range(300), "user": [n % 9 for n in range(300)], "y": [n % 2 for n in range(300)]})
    words = ("data.tasks.y={kind: binary, metrics: [ndcg@3, auroc]}", "data.group_column=user")
    model = mtl.load(train_table(tmp_path, frame, *words))
    assert set(model.baselines["constant"]) == {"y/auroc", "average"}
    assert set(model.baselines["lightgbm"]) == {"y/ndcg@3", "y/auroc", "average"}


def test_data_that_are_no_table_have_constants_alone(tmp_path: Path, tiny_data: Path) -> None:
    for data in ("movielens", "four_mnists"):
        words = [] if data == "movielens" else ["network=routed_mnists", "gate=gumbel_matrix"]
        run(compose_small(tmp_path / data, f"data={data}", *words, f"paths.data_dir={tiny_data}"))
        models = read_json(tmp_path / data / "results.json")["numbers"]["test"]
        assert models.keys() - {"network - constant"} == {"network", "constant"}


def test_undefined_metrics_stay_undefined() -> None:
    task = replace(KINDS[0], constant=(0.0,))
    evaluation = Evaluation([task])
    evaluation.update(Constant([task], {}).predict({"x": torch.zeros(3)}), {"binary": torch.zeros(3)})
    assert np.isnan(evaluation.compute()["binary/auroc"])


def test_a_checkpoint_of_before_has_no_constants(tmp_path: Path) -> None:
    folder = train_table(tmp_path, visits(), "data.tasks.clicked={kind: binary}", "data.ignore=[plan,minutes]")
    content: Any = read(folder / "checkpoints" / "best.ckpt")
    for task in content["data"]["spec"]["tasks"]:
        del task["constant"]
    torch.save(dict(content), tmp_path / "old.ckpt")
    run(resume_small(tmp_path / "old.ckpt", tmp_path / "again", evaluate=True))
    assert set(read_json(tmp_path / "again" / "results.json")["numbers"]["test"]) == {"network"}
