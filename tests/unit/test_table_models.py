"""Models of a table's inputs: what they learn, their tensors, and their programs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import catboost
import lightgbm
import numpy as np
import pytest
import torch
from mtl.data_modules.constant_predictions import fit_constant
from torch import Tensor

from mtl import table_models
from mtl.table_models import MODELS, choose_models
from mtl.table_models.base import Constant, TableModel
from mtl.table_models.catboost import CatBoost, target_statistic
from mtl.table_models.lightgbm import LightGBM
from mtl.table_models.linear import Linear
from mtl.table_models.trees import MAX_LIST_IDS, Rows
from mtl.training.losses import task_loss_sums
from mtl.types import Bag, Batch, Categorical, DataSpec, Numeric, TaskSpec, has_label
from mtl.use.program import export, random_inputs, save, save_onnx

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


@pytest.fixture(autouse=True)
def _early_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the growth of trees end earlier than in use."""
    for name in ("lightgbm", "catboost"):
        monkeypatch.setattr(f"mtl.table_models.{name}.TREES", 200)
        monkeypatch.setattr(f"mtl.table_models.{name}.PATIENCE", 20)


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


def fit(model: type[TableModel], spec: DataSpec, rows: Batch) -> TableModel:
    return model(spec.tasks, spec.inputs).fit(rows)


@cache
def fitted_to_table(model: type[TableModel]) -> TableModel:
    """Return a model of the rows of ``table``, which several tests use."""
    return fit(model, *table())


@pytest.mark.parametrize("model", [*MODELS.values()])
def test_models_learn_what_the_inputs_say(model: type[TableModel]) -> None:
    spec, rows = table()
    found = losses(spec, rows, fitted_to_table(model)(rows.inputs))
    best = losses(spec, rows, Constant(spec.tasks, spec.inputs)(rows.inputs))
    assert all(found[name] < 0.6 * best[name] for name in best if name != "poisson"), (found, best)
    assert found["poisson"] < best["poisson"]  # whose labels are mostly noise


@pytest.mark.parametrize("model", [Constant, *MODELS.values()])
def test_a_model_predicts_alike_from_its_saved_state(model: type[TableModel], tmp_path: Path) -> None:
    """Also ids that it has not seen; a second fit forgets the first."""
    spec, rows = table()
    fitted = fitted_to_table(model)
    torch.save(fitted.state_dict(), tmp_path / "state.pt")
    restored = model(spec.tasks, spec.inputs)
    restored.load_learned(torch.load(tmp_path / "state.pt", weights_only=True))
    inputs = {**rows.inputs, "city": torch.arange(ROWS) % 6}
    first, second = (model(inputs) for model in (fitted, restored))
    assert [*first] == [*second] == [task.name for task in spec.tasks]
    assert [value.shape[1:].numel() for value in first.values()] == [task.outputs for task in spec.tasks]
    assert all(value.dtype == torch.float32 and torch.equal(value, second[name]) for name, value in first.items())
    restored.fit(rows)
    assert all(torch.equal(value, first[name]) for name, value in restored(inputs).items())


class Models(torch.nn.Module):
    """Several models beside each other: a program for all takes less time than one for each."""

    def __init__(self, models: dict[str, TableModel]) -> None:
        super().__init__()
        self.models = torch.nn.ModuleDict(models)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"{n}/{task}": value for n, model in self.models.items() for task, value in model(inputs).items()}


@pytest.mark.usefixtures("few_trees")
def test_models_are_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of any number of rows, of inputs with and without ids and numbers, and of trees in several parts."""
    monkeypatch.setattr("mtl.table_models.forest.TREES", 30)
    spec, rows = table()
    spec, rows = replace(spec, tasks=spec.tasks[:3]), rows.select(torch.arange(60))  # so that trees are small
    models = {name: fit(model, spec, rows) for name, model in {"constant": Constant, **MODELS}.items()}
    for left_out in ("city", "numbers"):
        columns = {name: column for name, column in spec.inputs.items() if name != left_out}
        models[f"without {left_out}"] = fit(LightGBM, replace(spec, tasks=spec.tasks[:1], inputs=columns), rows)
    every, inputs = Models(models).eval(), random_inputs(spec.inputs, 300)
    expected, program = every(inputs), export(every, random_inputs(spec.inputs, 5))
    session = save_onnx(program, [*inputs], [*expected], tmp_path / "model.onnx")
    onnx = session.run(None, {x.name: inputs[x.name].numpy() for x in session.get_inputs()})
    for outputs in (
        save(program, tmp_path / "model.pt2")(inputs),
        dict(zip(expected, map(torch.tensor, onnx), strict=True)),
    ):
        for name, value in expected.items():
            torch.testing.assert_close(outputs[name], value, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("has_missing", [False, True])
def test_forest_equals_lightgbm(has_missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    boosters, train = list[Any](), lightgbm.train
    monkeypatch.setattr(lightgbm, "train", lambda *args, **kw: boosters.append(train(*args, **kw)) or boosters[-1])
    (spec, rows), inputs = table(), new_inputs()
    rows.inputs["numbers"][::5] = torch.nan if has_missing else 0.0
    fitted = fit(LightGBM, spec, rows)
    codes = np.array([9, 0, 1, 2, 3, 9])[inputs["city"]]  # those of cities that the rows do not have: one more number
    tags = (inputs["tags"][..., None] == torch.arange(1, 4)).any(1).float()
    matrix = np.column_stack([codes, inputs["numbers"], tags])
    expected = [booster.predict(matrix, raw_score=True).reshape(ROWS, -1) for booster in boosters]
    outputs_by_task = fitted(inputs)
    outputs = torch.cat([outputs_by_task[task.name].view(ROWS, -1) for task in fitted.order], 1)
    torch.testing.assert_close(outputs.double(), torch.tensor(np.hstack(expected)), atol=1e-5, rtol=0)


def new_inputs() -> dict[str, Tensor]:
    """Return other rows than those of ``table``, also with unknown cities and missing numbers."""
    draw = torch.Generator().manual_seed(1)
    numbers = torch.randn(ROWS, 1, generator=draw).index_fill(0, torch.arange(0, ROWS, 7), torch.nan)
    return {"city": torch.arange(ROWS) % 6, "tags": torch.ones(ROWS, 3, dtype=torch.long), "numbers": numbers}


@pytest.mark.parametrize("has_missing", [False, True])
def test_forest_equals_catboost(has_missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each task, on the labelled rows that stop the trees."""
    pairs, fit_library = list[tuple[Any, Any]](), catboost.CatBoost.fit

    def recorded(model: Any, train: Any, eval_set: Any, callbacks: Any) -> None:
        pairs.append((fit_library(model, train, eval_set=eval_set, callbacks=callbacks), eval_set))

    monkeypatch.setattr(catboost.CatBoost, "fit", recorded)
    spec, rows = table()
    valid = Batch(new_inputs(), rows.targets)
    valid.inputs["numbers"].nan_to_num_(0.5)
    if has_missing:
        rows.inputs["numbers"][::5], valid.inputs["numbers"][::5] = torch.nan, torch.nan
    fitted = CatBoost(spec.tasks, spec.inputs).fit(rows, valid)
    outputs = fitted(valid.inputs)
    for task in fitted.order:  # in which their trees were grown
        output = outputs[task.name][has_label(task, rows.targets[task.name])].double()
        predictions = [model.predict(pool) for model, pool in (pairs.pop(0) for _ in task.quantiles or [None])]
        expected = np.stack(predictions, -1).reshape(output.shape)
        torch.testing.assert_close(output, torch.tensor(expected), atol=1e-5, rtol=0)


def test_target_statistics_of_training_rows_are_those_of_rows_before_them() -> None:
    ids, y = np.array([2, 2, 1, 2, 3, 1]), np.array([1.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    rows = Rows(ids[:, None], np.zeros((6, 0)), y, np.ones(6), np.array([False] * 5 + [True]))
    feature, values = target_statistic(0, ids, y, rows)
    prior = 0.8  # counts as one label
    assert feature.values == pytest.approx([prior, 1.8 / 2, 2.8 / 4, 1.8 / 2])
    assert feature.other == pytest.approx(prior)
    assert values[[2, 4, 5]] == pytest.approx([prior, prior, 1.8 / 2])  # first of their id, and a row that stops trees
    totals, sums = [y[[0, 1, 3]][list(order)] for order in permutations(range(3))], sorted(values[[0, 1, 3]])
    expected = [sorted([prior, (prior + t[0]) / 2, (prior + t[0] + t[1]) / 3]) for t in totals]
    assert any(sums == pytest.approx(value) for value in expected)


def test_each_task_of_a_linear_model_has_its_penalty(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an id for each two rows, a small penalty learns noise, and a large one misses what a number says."""
    draw = np.random.default_rng(0)
    x, noise = torch.tensor(draw.normal(size=(ROWS, 1))).float(), torch.tensor(draw.normal(size=ROWS))
    inputs = {"x": x, "id": torch.tensor(draw.integers(0, ROWS // 2, ROWS))}
    tasks = [TaskSpec(name, "regression", constant=(0.0,)) for name in ("noise", "number")]
    rows = Batch(inputs, {"noise": noise, "number": x[:, 0].double()})
    columns = {"x": Numeric(1), "id": Categorical(ROWS // 2)}
    sizes = {}
    for penalties in ((1000.0, 100.0, 10.0, 1.0), (1.0,)):
        monkeypatch.setattr("mtl.table_models.linear.PENALTIES", penalties)
        outputs = Linear(tasks, columns).fit(rows)(inputs)
        sizes[len(penalties)] = float(outputs["noise"].std())
        assert float((outputs["number"] - x[:, 0]).abs().mean()) < 0.05
    assert sizes[4] < 0.2 * sizes[1]


@pytest.mark.parametrize("model", [LightGBM, CatBoost])
def test_trees_take_rows_without_a_class_or_a_difference(model: type[TableModel]) -> None:
    """A class that only rows which stop trees have, a class that none has, and inputs that are all equal."""
    task = TaskSpec("y", "multiclass", 4, constant=(-0.1, -2.6, -5.0, -5.0))
    x, y = torch.arange(100.0)[:, None] % 3, (torch.arange(100) % 3 == 0).long()
    y[[0, 50]] = 2
    outputs = model([task], {"x": Numeric(1)}).fit(Batch({"x": x}, {"y": y}))({"x": x})["y"]
    assert outputs.isfinite().all()
    assert (outputs[1:50].argmax(1) == y[1:50]).all()
    for same, labels in ((x * 0, y), (x, torch.where(torch.arange(100) % 5 == 0, 2, y))):
        outputs = model([task], {"x": Numeric(1)}).fit(Batch({"x": same}, {"y": labels}))({"x": x})["y"]
        assert outputs[0].argmax() == 0


@pytest.mark.parametrize("model", [LightGBM, CatBoost])
def test_trees_read_the_number_of_a_column_that_also_has_ids(model: type[TableModel]) -> None:
    columns = {"year": Categorical(30), "city": Categorical(6), "numbers": Numeric(2, ("year", "x"))}
    assert list(model([], columns).columns) == ["city", "numbers"]


def test_trees_of_a_task_with_few_labels_read_the_outputs_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its labels follow those of the other task, which need more rows to learn."""
    monkeypatch.setattr("mtl.table_models.lightgbm.TREES", 200)
    draw, count = np.random.default_rng(0), 1600
    x = draw.normal(size=(count, 4))
    usual = np.sin(2 * x[:, 0]) + x[:, 1] + 0.1 * draw.normal(size=count)
    rare = usual + 0.1 * draw.normal(size=count)
    tasks = [TaskSpec(name, "regression", constant=(0.0,)) for name in ("usual", "rare")]
    rare_labels = torch.tensor(rare).masked_fill(torch.arange(count) >= 50, torch.nan)
    rows = Batch({"x": torch.tensor(x).float()}, {"usual": torch.tensor(usual), "rare": rare_labels})
    rows = rows.select(torch.arange(1000))
    columns, last = {"x": Numeric(4)}, {"x": torch.tensor(x).float()[1000:]}
    mse = []
    for names in (["rare"], ["usual", "rare"]):
        model = LightGBM([task for task in tasks if task.name in names], columns).fit(rows)
        mse.append(float((model(last)["rare"] - torch.tensor(rare)[1000:]).square().mean()))
        assert len(model.forests) == len(names)
    assert mse[1] < 0.7 * mse[0]
    restored = LightGBM(tasks, columns)
    restored.load_learned(model.state_dict())
    assert torch.equal(restored(last)["rare"], model(last)["rare"])
    torch.testing.assert_close(export(model, last).module()(last)["rare"], model(last)["rare"], atol=1e-5, rtol=0)


@pytest.mark.usefixtures("few_trees")
@pytest.mark.parametrize("model", [*MODELS.values()])
def test_models_take_few_rows_unknown_ids_and_weights(model: type[TableModel]) -> None:
    spec, rows = table()
    few = rows.select(torch.arange(4))
    found = fit(model, spec, few)({**rows.inputs, "city": torch.full((ROWS,), 5)})
    assert all(bool(value.isfinite().all()) for value in found.values())
    wrong = {"number": torch.where(torch.arange(ROWS) % 2 == 0, rows.targets["number"], 100.0)}
    weights = {"number": (torch.arange(ROWS) % 2 == 0).double() * 2}
    [task] = [task for task in spec.tasks if task.name == "number"]
    found = fit(model, replace(spec, tasks=[task]), Batch(rows.inputs, wrong, weights))(rows.inputs)
    assert float(task.unstandardize(found["number"]).max()) < 10


@pytest.mark.usefixtures("few_trees")
@pytest.mark.parametrize("model", [*MODELS.values()])
def test_a_task_without_a_label_in_the_rows_is_predicted_as_constant(model: type[TableModel]) -> None:
    spec, rows = table()
    rows.targets["number"].fill_(torch.nan)
    fitted = fit(model, spec, rows)
    fitted.load_learned(fitted.state_dict())
    [task] = [task for task in spec.tasks if task.name == "number"]
    assert fitted(rows.inputs)["number"].tolist() == pytest.approx([*task.constant] * ROWS)


@pytest.mark.parametrize("model", [LightGBM, CatBoost])
def test_trees_read_the_ids_of_a_list(model: type[TableModel]) -> None:
    """An id anywhere in the list is a 1, and id 0 is nothing."""
    tags = torch.randint(0, 5, (ROWS, 4), generator=torch.Generator().manual_seed(0))
    task = TaskSpec("y", "binary", constant=(0.0,))
    fitted = model([task], {"tags": Bag(5, 4)}).fit(Batch({"tags": tags}, {"y": (tags == 3).any(1).float()}))
    output = fitted({"tags": torch.tensor([[3, 0, 0, 0], [1, 2, 4, 3], [0, 0, 0, 0], [1, 2, 4, 4]])})["y"]
    assert output[:2].min() > 0.5
    assert output[2:].max() < -0.5


def test_trees_of_before_read_no_lists() -> None:
    """Their state does not say which tasks were left out."""
    spec, rows = table()
    columns = {name: column for name, column in spec.inputs.items() if name != "tags"}
    before, now = fit(LightGBM, replace(spec, inputs=columns), rows), LightGBM(spec.tasks, spec.inputs)
    now.load_learned({name: value for name, value in before.state_dict().items() if "left_out" not in name})
    assert all(torch.equal(value, before(rows.inputs)[name]) for name, value in now(rows.inputs).items())


def test_trees_read_lists_of_a_limited_number_of_ids() -> None:
    columns = {name: Bag(MAX_LIST_IDS // 2, 3) for name in ("a", "b", "c")} | {"x": Numeric(1), "y": Categorical(9)}
    assert list(LightGBM([], columns).columns) == ["a", "b", "x", "y"]


def test_a_task_after_one_that_is_left_out_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, rows = table()
    click = replace(spec.tasks[0], name="click")
    targets = {"click": rows.targets["binary"], "buy": rows.targets["binary"].masked_fill(torch.arange(ROWS) > 9, 1)}
    targets["click"] = targets["click"].masked_fill(torch.arange(ROWS) > 200, torch.nan)
    model, clock = (
        LightGBM([click, replace(click, name="buy", after="click")], spec.inputs),
        iter([0.0] * 2 + [9.0] * 9),
    )
    model.deadline = 1.0
    monkeypatch.setattr("mtl.table_models.trees.time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr("mtl.table_models.lightgbm.time", SimpleNamespace(monotonic=lambda: 0.0))
    assert model.fit(Batch(rows.inputs, targets)).left_out == {"click", "buy"}


def test_at_the_deadline_trees_of_the_tasks_with_most_labels_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, rows = table()
    tasks = [replace(spec.tasks[0], name=name) for name in ("few", "many")]
    y = rows.targets["binary"]
    rows.targets = {"few": y.masked_fill(torch.arange(ROWS) > 200, torch.nan), "many": y}
    model, clock = LightGBM(tasks, spec.inputs), iter([0.0] * 2 + [9.0] * 99)
    model.deadline = 1.0
    monkeypatch.setattr("mtl.table_models.trees.time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr("mtl.table_models.lightgbm.time", SimpleNamespace(monotonic=lambda: 0.0))
    model.fit(rows)
    again = LightGBM(tasks, spec.inputs)
    again.load_learned(model.state_dict())
    assert model.left_out == again.left_out == {"few"}
    assert again(rows.inputs)["few"].std() == 0 < again(rows.inputs)["many"].std()


def test_trees_are_for_few_outputs_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [replace(NUMBER, name=str(number)) for number in range(33)]
    columns = {"x": Numeric(1), "tags": Bag(4, 3)}
    assert [choose_models("auto", columns, tasks) for tasks in (KINDS, many)] == [["linear", "lightgbm"], ["linear"]]
    assert choose_models(["lightgbm"], columns, many) == ["lightgbm"]
    assert choose_models("auto", columns, many, is_limited=True) == ["linear", "lightgbm"]
    lists = {"tags": Bag(MAX_LIST_IDS + 1, 3)}
    assert [choose_models("auto", lists, KINDS), choose_models("none", columns, KINDS)] == [["linear"], []]
    monkeypatch.setattr(table_models, "find_spec", lambda name: None)
    assert choose_models("auto", columns, KINDS) == ["linear"]


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
        model.load_learned(model.state_dict())
        logits = model({"many": torch.arange(4) + 10, "few": torch.tensor([250, 7, 8, 999])})["y"]
    finally:
        torch.set_num_threads(threads)
    assert capfd.readouterr() == ("", "")
    assert logits[0] > 1
    assert (logits[1:] < -1).all()


@pytest.mark.parametrize("model", [*MODELS.values()])
def test_a_fit_ends_at_its_deadline_with_what_it_has(model: type[TableModel]) -> None:
    """The clock is over from the start: a model has one penalty or one tree for each output."""
    spec, rows = table()
    late = model(spec.tasks, spec.inputs)
    late.deadline = 0.0
    outputs, whole = late.fit(rows)(rows.inputs), fitted_to_table(model)(rows.inputs)
    assert all(bool(value.isfinite().all()) for value in outputs.values())
    assert losses(spec, rows, outputs)["number"] > losses(spec, rows, whole)["number"]
