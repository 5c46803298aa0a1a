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

import mtl
from mtl.checkpoints.files import read
from mtl.files.run_files import read_json
from mtl.pipeline.run import run
from mtl.table_models.base import Constant, split_outputs
from mtl.training.evaluation import Evaluation
from mtl.training.measurements import Key
from tests.integration.helpers import compose_small, resume_small, train_table
from tests.unit.test_fit import QUICK, TASKS, visits
from tests.unit.test_table_models import KINDS, NUMBER, ROWS, losses, table


def test_no_other_constant_has_a_lower_loss() -> None:
    spec, rows = table()
    best = losses(spec, rows, Constant(spec.tasks, spec.inputs)(rows.inputs))
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
    first, second = evaluations
    measured = leads({"network": first, "linear": second}, "network")
    assert measured == {key: pytest.approx((mean, expected), rel=0.25)}
    assert leads({"network": first, "linear": first}, "network") == {key: (0.0, 0.0)}
    two = leads({"network": first, "linear": second, "same": first}, "network")
    assert two == {key: pytest.approx((mean, expected), rel=0.25), key._replace(model="network - same"): (0.0, 0.0)}
    other = {"network": Evaluation([NUMBER]), "linear": Evaluation([NUMBER])}
    for before, after in zip(evaluations, other.values(), strict=True):
        after._blocks = before._blocks[::-1]
    assert leads(other, "network") == measured  # in another order of the rows
    alone = losses[0].std() / np.sqrt(ROWS)
    assert expected < 0.5 * alone  # the pairs count


def test_a_trained_model_stands_beside_a_constant_and_a_quick_model(tmp_path: Path) -> None:
    test = visits(100, seed=1)
    model = mtl.fit(visits(), TASKS, test=test, **QUICK | {"blend": ["linear"]})
    table = model.metrics_table()
    assert table.columns == ["task", "metric", "network", "constant", "linear", "blend"]
    assert table["metric"].to_list() == ["auroc", "accuracy", "mse", "mae", "r2", "macro_f1"]
    values = {(task, metric): constant for task, metric, _, constant, *_ in table.iter_rows()}
    usual = int(visits()["clicked"].mean() > 0.5)
    assert values["clicked", "accuracy"] == pytest.approx((test["clicked"].drop_nulls() == usual).mean())
    assert values["clicked", "auroc"] == 0.5
    assert -0.1 < values["minutes", "r2"] <= 0
    model.save(tmp_path / "model.ckpt")
    assert mtl.load(tmp_path / "model.ckpt").metrics_table().equals(table)
    plain = mtl.fit(visits(), TASKS, test=test, **QUICK)
    assert plain.metrics_table().columns == ["task", "metric", "network", "constant"]


@pytest.mark.usefixtures("few_trees")
def test_a_test_alone_has_the_constant_of_the_training(tmp_path: Path) -> None:
    folder = train_table(
        tmp_path, visits(), "blend=auto", "data.tasks.clicked={kind: binary}", "data.ignore=[plan,minutes]"
    )
    run(resume_small(folder / "checkpoints" / "best.ckpt", tmp_path / "again", evaluate=True))
    before, after = (read_json(path / "results.json")["numbers"]["test"] for path in (folder, tmp_path / "again"))
    assert before.keys() >= {"network", "constant", "lightgbm", "blend"}
    assert after == before


@pytest.mark.usefixtures("few_trees")
def test_each_task_of_a_chain_has_its_own_share(tmp_path: Path) -> None:
    frame = pl.DataFrame({"x": range(300), "click": [0, 1, 1] * 100, "buy": [0, 0, 1] * 100})
    words = ("data.tasks.click={kind: binary}", "data.tasks.buy={kind: binary, after: click, metrics: [logloss]}")
    folder = train_table(tmp_path, frame, "blend=auto", *words)
    model = mtl.load(folder)
    share = 1 / (1 + np.exp(-np.array([task.constant[0] for task in model.spec.tasks])))
    assert share == pytest.approx([2 / 3, 1 / 3], abs=0.05)
    test = model.metrics_by_model["constant"]["buy/logloss"]
    assert test == pytest.approx(0.64, abs=0.1)  # that of a third
    assert set(model.metrics_by_model["lightgbm"]) == {"click/auroc", "click/accuracy", "buy/logloss"}


@pytest.mark.usefixtures("few_trees")
def test_a_constant_ranks_nothing(tmp_path: Path) -> None:
    frame = pl.DataFrame({"x": range(300), "user": [n % 9 for n in range(300)], "y": [n % 2 for n in range(300)]})
    words = ("data.tasks.y={kind: binary, metrics: [ndcg@3, auroc]}", "data.group_column=user")
    model = mtl.load(train_table(tmp_path, frame, "blend=auto", *words))
    assert set(model.metrics_by_model["constant"]) == {"y/auroc", "average"}
    assert set(model.metrics_by_model["lightgbm"]) == {"y/ndcg@3", "y/auroc", "average"}


def test_data_that_are_no_table_have_constants_alone(tmp_path: Path, tiny_data: Path) -> None:
    for data in ("movielens", "four_mnists"):
        words = [] if data == "movielens" else ["network=routed_mnists", "gate=gumbel_matrix"]
        run(compose_small(tmp_path / data, f"data={data}", *words, f"paths.data_dir={tiny_data}"))
        models = read_json(tmp_path / data / "results.json")["numbers"]["test"]
        assert models.keys() - {"network - constant"} == {"network", "constant"}


def test_undefined_metrics_stay_undefined() -> None:
    task = replace(KINDS[0], constant=(0.0,))
    evaluation = Evaluation([task])
    evaluation.update(Constant([task], {})({"x": torch.zeros(3)}), {"binary": torch.zeros(3)})
    assert np.isnan(evaluation.compute()["binary/auroc"])


@pytest.mark.usefixtures("few_trees")
def test_a_checkpoint_of_before_has_no_constants(tmp_path: Path) -> None:
    folder = train_table(
        tmp_path, visits(), "blend=auto", "data.tasks.clicked={kind: binary}", "data.ignore=[plan,minutes]"
    )
    content: Any = read(folder / "checkpoints" / "best.ckpt")
    for task in content["data"]["spec"]["tasks"]:
        del task["constant"]
    del content["blend"]
    torch.save(dict(content), tmp_path / "old.ckpt")
    run(resume_small(tmp_path / "old.ckpt", tmp_path / "again", evaluate=True))
    assert set(read_json(tmp_path / "again" / "results.json")["numbers"]["test"]) == {"network"}
