"""The blend of a network and of models of a table: its weights, and that all ways to use it agree."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from scipy.special import expit

import mtl
from mtl.checkpoints.files import read
from mtl.checks import InputError
from mtl.cli.use import predict as predict_command
from mtl.files.run_files import read_json
from mtl.pipeline.run import run
from mtl.report.baseline_comparison import compare_with_baselines
from mtl.table_models.blend import PRIOR, STEPS, choose_weights
from mtl.training.labeled_predictions import LabeledPredictions
from mtl.training.measurements import Measurements
from mtl.types import TaskSpec
from mtl.use.compare import compare_runs
from tests.integration.helpers import resume_small
from tests.trees import few_trees
from tests.unit.test_fit import QUICK, TASKS, visits

CLICK, PRICE = TaskSpec("click", "binary"), TaskSpec("price", "regression", mean=3.0, std=2.0)
MODELS = ("network", "linear", "lightgbm")


def predicted(label: torch.Tensor, outputs: torch.Tensor, weight: torch.Tensor | None = None) -> LabeledPredictions:
    weights = {} if weight is None else {"weight": weight}
    return LabeledPredictions(outputs, label, row_id=torch.arange(len(label)), output=outputs, **weights)


def test_weights_are_the_mean_of_the_grid_by_relative_losses() -> None:
    """Against a search that is written anew in numpy, for two kinds of tasks, one of them with weights of rows."""
    draw = np.random.default_rng(0)
    signal, weight = draw.normal(size=300), draw.uniform(0.2, 2, 300)
    labels = {"click": draw.random(300) < expit(signal), "price": 3 + 2 * (signal + 0.3 * draw.normal(size=300))}
    noises = dict(zip(MODELS, (0.6, 0.5, 0.7), strict=True))
    outputs = {n: {m: signal + noise * draw.normal(size=300) for m, noise in noises.items()} for n in labels}
    rows = {
        model: {
            "click": predicted(torch.tensor(labels["click"]).long(), torch.tensor(outputs["click"][model])),
            "price": predicted(*(torch.tensor(v) for v in (labels["price"], outputs["price"][model], weight))),
        }
        for model in MODELS
    }
    grid, losses = [parts for parts in itertools.product(range(STEPS + 1), repeat=3) if sum(parts) == STEPS], []
    for parts in grid:
        mixed = {n: sum(p / STEPS * by[m] for p, m in zip(parts, MODELS, strict=True)) for n, by in outputs.items()}
        log_loss = np.logaddexp(0, np.where(labels["click"], -mixed["click"], mixed["click"])).mean()
        squares = weight * (mixed["price"] - (labels["price"] - 3) / 2) ** 2
        losses.append([log_loss, squares.mean()])
    relative = np.array(losses) / np.min(losses, 0)  # [G, tasks]
    chosen = choose_weights([CLICK, PRICE, replace(CLICK, name="unlabelled")], rows)
    for index, task in enumerate(["click", "price", "unlabelled"]):
        evidence = 300 * relative[:, index] if index < 2 else 0.0
        score = -(evidence + PRIOR * relative.mean(1)) / 2
        likely = np.exp(score - score.max())
        expected = (likely[:, None] * np.array(grid)).sum(0) / likely.sum() / STEPS
        assert [*chosen[task]] == [*MODELS]
        assert [*chosen[task].values()] == pytest.approx(expected, abs=1e-9)


def test_models_that_are_no_use_have_no_weight() -> None:
    label = (torch.arange(900) % 3 == 0).long()
    output = 2.0 * label - 1
    right, wrong, infinite = ({"click": predicted(label, value)} for value in (output, -output, output * torch.inf))
    alone = {"network": 1.0}
    assert choose_weights([CLICK], {"network": right, "linear": wrong, "lightgbm": infinite}) == {"click": alone}
    assert choose_weights([CLICK], {"network": wrong, "linear": right}) == {"click": {"network": 0.0, "linear": 1.0}}
    assert choose_weights([CLICK], {model: {} for model in MODELS}) == {"click": alone}  # no labels
    equal = choose_weights([CLICK], dict.fromkeys(MODELS, right))["click"]
    assert equal == pytest.approx(dict.fromkeys(MODELS, 1 / 3))


def test_a_model_that_left_out_a_task_has_no_weight_there() -> None:
    """Nor has it for a task without labels; for others it counts as if that task did not exist."""
    label = (torch.arange(900) % 3 == 0).long()
    good, bad = ({"click": predicted(label, sign * (2.0 * label - 1))} for sign in (1, -1))
    both = [CLICK, replace(CLICK, name="late"), replace(CLICK, name="unlabelled")]
    network, trees = {**bad, "late": bad["click"]}, {**good}
    chosen = choose_weights(both, {"network": network, "lightgbm": trees}, {"lightgbm": {"late", "unlabelled"}})
    assert chosen == {
        "click": {"network": 0.0, "lightgbm": 1.0},
        "late": {"network": 1.0},
        "unlabelled": {"network": 1.0},
    }


def test_weights_are_finite_where_a_model_left_out_all_tasks_with_labels() -> None:
    label = (torch.arange(900) % 3 == 0).long()
    rows = {model: {"click": predicted(label, 2.0 * label - 1)} for model in ("network", "linear")} | {"lightgbm": {}}
    chosen = choose_weights([CLICK, replace(CLICK, name="unlabelled")], rows, {"lightgbm": {"click"}})
    half = {"network": pytest.approx(0.5), "linear": pytest.approx(0.5)}
    assert chosen == {"click": half, "unlabelled": half}


def test_parts_of_the_grid_give_the_weights_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    label, draw = (torch.arange(900) % 3 == 0).long(), torch.Generator().manual_seed(0)
    rows = {model: {"click": predicted(label, torch.randn(900, generator=draw))} for model in MODELS}
    whole = choose_weights([CLICK], rows)
    monkeypatch.setattr("mtl.table_models.blend.MAX_NUMBERS", 2000)
    assert choose_weights([CLICK], rows)["click"] == pytest.approx(whole["click"])


def test_a_task_after_another_counts_where_that_one_is_positive() -> None:
    buy, draw = TaskSpec("buy", "binary", after="click"), torch.Generator().manual_seed(0)
    click = (torch.rand(4000, generator=draw) < 0.5).long()
    label = click * (torch.rand(4000, generator=draw) < 0.5).long()
    right, wrong = (4.0 * label - 2).double(), torch.randn(4000, generator=draw).double()
    by_model = {
        "network": {"click": predicted(click, wrong), "buy": predicted(label, torch.where(click == 1, right, -right))},
        "linear": {"click": predicted(click, wrong), "buy": predicted(label, torch.where(click == 1, wrong, right))},
    }
    assert choose_weights([CLICK, buy], by_model)["buy"]["network"] > 0.95


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, rows = tmp_path_factory.mktemp("blend") / "run", tmp_path_factory.mktemp("rows") / "rows.csv"
    visits(600).write_csv(rows)
    with few_trees():
        mtl.fit(rows, TASKS, folder=path, ensemble=2, **QUICK | {"max_epochs": 30, "blend": "auto"})
    return path


def test_the_run_shows_all_models_and_its_weights(folder: Path) -> None:
    record = read_json(folder / "results.json")
    assert [sum(weights.values()) for weights in record["blend"].values()] == pytest.approx([1] * 3)
    assert {"network", "constant", "linear", "lightgbm", "blend"} <= record["numbers"]["test"].keys()
    assert record["advice"][0].startswith("Predictions are those of a blend of network ")
    assert len(pl.read_parquet(folder / "predictions.parquet")["model"].unique()) == 5


def test_a_model_is_the_weighted_mean_of_its_models(folder: Path) -> None:
    rows, weights = visits(100, seed=1), read_json(folder / "results.json")["blend"]
    blend = mtl.load(folder)
    outputs = {name: mtl.load(folder, model=name).network(blend.encode(rows)).predictions for name in MODELS}
    mixed = blend.network(blend.encode(rows)).predictions
    for task, values in mixed.items():
        mean = sum(weights[task].get(name, 0.0) * outputs[name][task] for name in MODELS)
        assert torch.allclose(values, mean, atol=1e-6)
    assert blend.metrics == read_metrics(folder, "blend")
    assert mtl.load(folder, model="linear").metrics == read_metrics(folder, "linear")
    assert {"clicked_spread", "minutes_spread"} <= {*blend.predict(rows).columns}
    assert "blend of network" in repr(blend)
    with pytest.raises(InputError, match=r"model=trees: checkpoint .*best.ckpt has blend, network, linear.* lightgbm"):
        mtl.load(folder, model="trees")


def read_metrics(folder: Path, model: str) -> dict[str, Any]:
    numbers = read_json(folder / "results.json")["numbers"]["test"][model]
    return {name: value[0] if isinstance(value, list) else value for name, value in numbers.items()}


def test_saved_and_tested_again_it_predicts_alike(folder: Path, tmp_path: Path, capsys: Any) -> None:
    blend, rows = mtl.load(folder), visits(100, seed=1)
    blend.save(tmp_path / "saved.ckpt")
    saved = mtl.load(tmp_path / "saved.ckpt")
    assert saved.predict(rows).equals(blend.predict(rows))
    assert saved.metrics_by_model == blend.metrics_by_model
    mtl.load(folder, model="linear").save(tmp_path / "linear.ckpt")
    assert mtl.load(tmp_path / "linear.ckpt").predict(rows).equals(mtl.load(folder, model="linear").predict(rows))
    mtl.load(folder, model="network").save(tmp_path / "network.ckpt")
    assert "blend" not in repr(mtl.load(tmp_path / "network.ckpt"))
    run(resume_small(folder / "checkpoints" / "best.ckpt", tmp_path / "again", evaluate=True))
    before, after = (read_json(path / "results.json")["numbers"]["test"] for path in (folder, tmp_path / "again"))
    assert after == before
    assert compare_runs(folder, tmp_path / "again")["difference"].to_list() == [0.0] * 3
    rows.write_csv(tmp_path / "rows.csv")
    predict_command([str(folder), str(tmp_path / "rows.csv"), "-o", str(tmp_path / "out.csv"), "--model", "lightgbm"])
    expected = mtl.load(folder, model="lightgbm").predict(rows)["clicked_probability"]
    written = pl.read_csv(tmp_path / "out.csv")["clicked_probability"]
    assert written.to_numpy() == pytest.approx(expected.to_numpy(), abs=1e-6)


def test_a_network_of_weight_0_is_said() -> None:
    numbers = {"blend": {"a/auroc": 0.8}, "network": {"a/auroc": 0.7}, "blend - network": {"a/auroc": [0.1, 0.01]}}
    weights = {"a": {"network": 0.0, "linear": 1.0}}
    lines = compare_with_baselines(Measurements.from_plain({"test": numbers}), {"a": "auroc"}, weights)
    assert lines == [
        "Predictions are those of a blend of network 0.00, linear 1.00, which the validation rows chose.",
        "The weight of the network is 0: on the validation rows the other models predict as well without it.",
        "Against network on these test rows: the blend is better in a.",
    ]


def test_a_time_limit_ends_the_training_and_leaves_models_out(caplog: pytest.LogCaptureFixture) -> None:
    model = mtl.fit(visits(), TASKS, time_limit=1e-3, **QUICK | {"max_epochs": 500, "blend": "auto"})
    assert model.model_name == "network"
    assert "time_limit=0.001: the training ended in epoch " in caplog.text
    assert " of at most 500; left out: linear, lightgbm" in caplog.text
    caplog.clear()
    mtl.fit(visits(), TASKS, time_limit=600.0, **QUICK | {"blend": ["linear"]})
    assert "time_limit" not in caplog.text


@pytest.mark.parametrize(
    "forge",
    [
        lambda blend: blend.pop("weights"),
        lambda blend: blend["weights"]["clicked"].update(network=5.0),
        lambda blend: blend["weights"]["clicked"].update(other=0.0),
        lambda blend: blend["weights"]["clicked"].update(network=float("nan")),
        lambda blend: blend["weights"].pop("clicked"),
        lambda blend: blend["models"]["lightgbm"]["forests.0.left_out"].fill_(value=True),
        lambda blend: blend["models"]["linear"].clear(),
        lambda blend: blend["models"]["linear"]["table"].fill_(torch.nan),
        lambda blend: blend["models"]["lightgbm"]["forests.0.value"].fill_(torch.inf),
        lambda blend: blend["models"]["linear"].update(bias=torch.zeros(1, 2, 3)),
    ],
)
def test_a_forged_blend_is_one_message(forge: Any, folder: Path, tmp_path: Path) -> None:
    content = copy.deepcopy(dict(read(folder)))
    forge(content["blend"])
    torch.save(content, tmp_path / "forged.ckpt")
    with pytest.raises(InputError, match=r"checkpoint .*forged.ckpt is damaged or not of this program"):
        mtl.load(tmp_path / "forged.ckpt")
    with pytest.raises(InputError, match=r"checkpoint .*forged.ckpt is damaged or not of this program"):
        run(resume_small(tmp_path / "forged.ckpt", tmp_path / "again", evaluate=True))


@pytest.mark.usefixtures("few_trees")
def test_what_was_learnt_after_the_training_is_in_the_checkpoint_that_is_used(tmp_path: Path) -> None:
    options = {"test_checkpoint": "last", "blend": "auto", "folder": tmp_path / "run"}
    model = mtl.fit(visits(), TASKS, **QUICK | options)
    assert mtl.load(tmp_path / "run").predict(visits(50, seed=1)).equals(model.predict(visits(50, seed=1)))


def test_one_model_alone_keeps_its_metrics_and_has_no_intervals(folder: Path, tmp_path: Path) -> None:
    linear = mtl.load(folder, model="linear")
    linear.save(tmp_path / "linear.ckpt")
    assert mtl.load(tmp_path / "linear.ckpt").metrics == linear.metrics
    with pytest.raises(InputError, match=r"intervals are those of the blend; use it, without model=linear"):
        linear.predict(visits(50), interval=0.9)


@pytest.mark.usefixtures("few_trees")
def test_a_model_that_learns_nothing_finite_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The run ends well, and its checkpoint is read."""
    monkeypatch.setattr("mtl.table_models.linear.PENALTIES", (float("nan"),))
    folder = tmp_path / "run"
    assert "linear" not in mtl.fit(visits(), TASKS, folder=folder, **QUICK | {"blend": "auto"}).metrics_by_model
    assert mtl.load(folder).model_name == "blend"
