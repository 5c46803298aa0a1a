"""Metrics by name in whole runs: what is monitored, undefined metrics, weights of rows, averages of tasks."""

from __future__ import annotations

import csv
import json
import logging
import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from mtl.callbacks.best_checkpoint import BestCheckpoint
from mtl.callbacks.early_stopping import EarlyStop

from mtl.checkpoints.files import read
from mtl.cli.report import main
from mtl.config import build
from mtl.pipeline.run import run
from mtl.types import Batch
from tests.integration.helpers import NARROW, compose_small

METRICS = "metrics: [auroc, auprc, f1, accuracy, ece, logloss, base_rate, ndcg@3, mrr]"
SMALL = [
    *NARROW,
    "recipe.dropout=0",
    "recipe.batch_size=40",
    "~logger",
    "data.split.by=column",
    "data.split.column=part",
    "data.group_column=user",
]


def table(folder: Path, positives: bool = True, *words: str) -> list[str]:
    """Write 240 rows, and return the words of a run; without ``positives`` nothing is clicked in val and test."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(240, generator=generator), torch.randn(240, generator=generator)
    part = ["train"] * 160 + ["val"] * 40 + ["test"] * 40
    clicked = [bool(value > 0) and (positives or name == "train") for value, name in zip(x + y, part, strict=True)]
    columns = {"user": [f"u{row % 8}" for row in range(240)], "x": x.numpy(), "y": y.numpy(), "part": part}
    columns |= {"click": ["yes" if one else "no" for one in clicked], "price": (1000 + 300 * x).numpy()}
    pl.DataFrame(columns).write_csv(folder / "rows.csv")
    tasks = [
        f"data.tasks.click={{kind: binary, {METRICS}}}",
        "data.tasks.price={kind: regression, metrics: [rmse, r2]}",
    ]
    return [f"data.path={folder / 'rows.csv'}", "data=table", *SMALL, *tasks, *words]


def test_one_choice_for_the_best_checkpoint_early_stopping_and_the_learning_rate(tmp_path: Path) -> None:
    words = [*table(tmp_path), "monitor=val/click/auprc", "lr_schedule=plateau", "trainer.max_epochs=9"]
    words += ["recipe.patience=1", "callbacks.early_stopping.min_delta=2"]  # nothing improves by so much
    cfg = compose_small(tmp_path / "run", *words)
    own = compose_small(tmp_path, *words, "callbacks.early_stopping.monitor=val/price/rmse", "callbacks.best.mode=min")
    found = []
    for each in (cfg, own):
        watchers = [one for one in build.build_trainer(each).callbacks if isinstance(one, BestCheckpoint | EarlyStop)]
        found.append({type(one): (one.monitor, one.mode) for one in watchers})
    assert found[0] == dict.fromkeys([BestCheckpoint, EarlyStop], ("val/click/auprc", "max"))
    assert found[1] == {BestCheckpoint: ("val/click/auprc", "min"), EarlyStop: ("val/price/rmse", "min")}
    best = run(cfg)
    record = json.loads((tmp_path / "run" / "results.json").read_text())
    assert record["epochs"] == 2
    assert record["best"] == best
    assert 0 < best <= 1
    saved = read(tmp_path / "run" / "checkpoints" / "best.ckpt")
    state = next(state for name, state in saved["callbacks"].items() if name.startswith("BestCheckpoint"))
    assert float(state["best_model_score"]) == best
    test = record["numbers"]["test"]["network"]
    names = {f"click/{name}" for name in ("auroc", "auprc", "ece", "ndcg@3", "mrr")} | {"price/rmse", "price/r2"}
    assert names <= test.keys()
    assert test["price/rmse"] > 10 * math.sqrt(test["price/loss"])  # in the units of the column


def test_an_undefined_monitor_neither_stops_nor_fails_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = [*table(tmp_path, False), "monitor=val/click/auprc", "lr_schedule=plateau", "recipe.patience=0"]
    with caplog.at_level(logging.WARNING):
        run(compose_small(tmp_path / "run", *words, "trainer.max_epochs=3"))
    record: dict[str, Any] = json.loads((tmp_path / "run" / "results.json").read_text())
    assert record["epochs"] == 3
    test = record["numbers"]["test"]["network"]
    assert test["click/auroc"] is test["click/mrr"] is record["best"] is None
    assert test["click/base_rate"] == 0
    assert test["price/r2"] is not None
    said = [line.getMessage() for line in caplog.records if "undefined" in line.getMessage()]
    assert [line.partition(": ")[2].split(", ") for line in said] == [
        [f"{part}/click/{name}" for name in ("auprc", "auroc", "mrr", "ndcg@3")] for part in ("val", "test")
    ]
    assert "no finite val/click/auprc was measured: testing the last weights" in caplog.text
    assert " - " in capsys.readouterr().out


def hide(folder: Path, part: str, *columns: str) -> None:
    """Take the labels of ``columns`` away from the rows of a part."""
    nothing = [pl.when(pl.col("part") == part).then(None).otherwise(pl.col(name)).alias(name) for name in columns]
    pl.read_csv(folder / "rows.csv").with_columns(*nothing).write_csv(folder / "rows.csv")


@pytest.mark.parametrize("part", ["val", "test"])
def test_a_split_without_labels_has_no_loss(part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its loss is undefined: one warning, never the best value, null in the results."""
    words = [*table(tmp_path), "trainer.max_epochs=2"]
    hide(tmp_path, part, "click", "price")
    with caplog.at_level(logging.WARNING):
        best = run(compose_small(tmp_path / "run", *words))
    record = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (record["numbers"]["test"]["network"]["loss"] is None) == (part == "test")
    assert (record["best"] is None) == (part == "val")
    assert best == record["numbers"]["test"]["network"]["loss"] if part == "val" else best == record["best"]
    assert caplog.text.count("undefined, since the rows lack the labels for them: ") == 1
    assert f" {part}/loss," in caplog.text


def test_a_task_without_labels_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = [*table(tmp_path), "trainer.max_epochs=2"]
    hide(tmp_path, "val", "price")
    with caplog.at_level(logging.WARNING):
        run(compose_small(tmp_path / "run", *words))
    record = json.loads((tmp_path / "run" / "results.json").read_text())
    assert record["numbers"]["test"]["network"]["click/auprc"] is not None
    assert caplog.text.count("the rows lack the labels for them: val/price/loss, val/price/r2, val/price/rmse") == 1


def test_weighted_steps_and_evaluation(tmp_path: Path) -> None:
    """Rows of weight 0 count as little as rows without a label, and halves of a batch add up to the batch."""
    words = [*table(tmp_path), "trainer.max_epochs=1", "data.tasks.price.standardize=false"]
    frame = pl.read_csv(tmp_path / "rows.csv").with_columns(w=pl.int_range(240) % 2 * 3.0)
    frame.write_csv(tmp_path / "rows.csv")
    cfg = compose_small(tmp_path / "run", *words, "data.weight_column=w", "trainer.accumulate_grad_batches=2")
    assert run(cfg) is not None
    data = build.build_data(cfg)
    data.setup()
    module = build.build_module(cfg, build.build_network(cfg, data.spec), data.spec).eval()
    module.log = lambda *args, **kwargs: None  # there is no trainer
    rows, odd = data.splits["val"], torch.arange(40) % 2 == 1
    without = {task: target.masked_fill(~odd, math.nan) for task, target in rows.targets.items()}
    losses = []
    for batch in (rows, Batch(rows.inputs, without, groups=rows.groups)):
        with torch.no_grad():
            module.validation_step(batch, 0)
        losses.append(module.evaluation.compute()["loss"])
        module.evaluation.reset()
    assert losses[0] == pytest.approx(losses[1])
    halves = [rows.select(torch.arange(start, 40, 2)) for start in (0, 1)]
    whole, *parts = (float(module.training_step(batch, 0)["loss"].detach()) for batch in (rows, *halves))
    assert sum(parts) / 2 == pytest.approx(whole)


def test_average_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    words = [*table(tmp_path), "data.tasks.price={kind: regression, metrics: [r2]}", "monitor=val/average"]
    folder = tmp_path / "sweep" / "0"
    with caplog.at_level(logging.INFO):
        best = run(compose_small(folder, *words))
    record = json.loads((folder / "results.json").read_text())
    test, shown = record["numbers"]["test"]["network"], capsys.readouterr().out
    assert test["average"] == pytest.approx((test["click/auroc"] + test["price/r2"]) / 2)
    assert f"\naverage of the tasks' main metrics: {test['average']:.4f}" in shown
    assert record["best"] == best
    assert record["monitor"] == "val/average"
    assert ", average 0." in caplog.text  # after each epoch

    main([str(folder.parent)])
    [row] = csv.DictReader((folder.parent / "summary.csv").read_text().splitlines())
    assert float(row["test/average"]) == test["average"]
    assert "average ↑" in capsys.readouterr().out
