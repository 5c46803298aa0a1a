"""The folder for a model hub: it is read as a checkpoint is, and its card says what the run has measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from mtl.data_modules.tables.example import visits

import mtl
from mtl.checkpoints.safetensors_weights import read_plain, write_plain
from mtl.checks import InputError
from mtl.cli.use import card
from mtl.report.runs import Results
from mtl.types import TaskSpec
from mtl.use import run_page
from mtl.use.card import card as make_card
from tests.trees import few_trees

TASKS = {"clicked": "binary", "minutes": {"kind": "regression", "loss": "quantile"}, "city": "multiclass"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card") / "my run"
    options = {"recipe.expert_units": [8], "recipe.head_units": [8], "recipe.embedding_dim": 4, "threads": 1}
    given = {"max_epochs": 1, "gate": "comet", "progress": False, "options": options, "ensemble": 2, "calibrate": True}
    with few_trees():
        mtl.fit(visits()[:600], TASKS, folder=folder, slices=["device"], **given)
    card([str(folder)])
    return folder


def test_the_folder_is_read_as_the_run_is(run: Path) -> None:
    """Predictions with intervals, metrics and the evaluation of rows are equal; no file of the folder is a pickle."""
    rows, own, other = visits()[600:700], mtl.load(run), mtl.load(run / "card")
    assert own.predict(rows, interval=0.5, experts=True).equals(other.predict(rows, interval=0.5, experts=True))
    assert own.metrics == other.metrics
    assert own.evaluate(rows) == other.evaluate(rows)
    assert own.drift(rows).equals(other.drift(rows))
    assert sorted(file.name for file in (run / "card").iterdir()) == ["README.md", "model.json", "model.safetensors"]
    json.loads((run / "card" / "model.json").read_text())


def test_the_card_has_the_metrics_of_the_test(run: Path) -> None:
    text = (run / "card" / "README.md").read_text()
    _, block, body = text.split("---\n", 2)
    results = yaml.safe_load(block)["model-index"][0]["results"]
    test = json.loads((run / "results.json").read_text())["numbers"]["test"]["blend"]
    for each in results:
        for metric in each["metrics"]:
            value = test[f"{each['task']['name']}/{metric['type']}"]
            assert metric["value"] == (value[0] if isinstance(value, list) else value)
    assert [each["task"]["name"] for each in results] == list(TASKS)
    assert "device: phone" in body


def test_what_is_written_is_read(tmp_path: Path) -> None:
    content = {"a": {"b": [torch.arange(3), (1, 2.5)], 3: None}, "c": {"x.y": torch.zeros(0)}, "d": math.inf, "e": "é"}
    write_plain(content, tmp_path)
    found = read_plain(tmp_path)
    assert torch.equal(found["a"]["b"][0], torch.arange(3))
    assert (found["a"]["b"][1], found["a"][3], found["d"], found["e"]) == ((1, 2.5), None, math.inf, "é")
    assert found["c"]["x.y"].shape == (0,)


@pytest.mark.parametrize("name", ["model.json", "model.safetensors"])
def test_damaged_files_are_one_message(name: str, run: Path, tmp_path: Path) -> None:
    for file in (run / "card").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: -100 if file.name == name else None])
    with pytest.raises(InputError, match="is damaged"):
        mtl.load(tmp_path)


def test_a_run_that_has_not_finished_has_no_card(run: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best.ckpt").write_bytes((run / "checkpoints" / "best.ckpt").read_bytes())
    with pytest.raises(SystemExit, match="is not the folder of a finished run"):
        card([str(tmp_path)])


def test_of_hundreds_of_tasks_page_and_card_show_the_best_and_the_worst() -> None:
    tasks = [f"t{index}" for index in range(100)]
    numbers = {"loss": 1.0, **{f"{task}/auroc": index / 100 for index, task in enumerate(tasks)}}
    record = {"numbers": {"test": {"network": numbers}}, "main_metrics": dict.fromkeys(tasks, "auroc"), "finished": ""}
    results = Results.model_validate(record)
    assert run_page._shown_tasks(results) == ["t99", "t98", "t97", "t96", "t0", "t1", "t2", "t3"]
    section = run_page._overview(results, [], {})
    assert [len(table.rows) for table in section.tables] == [1, 10]
    model = SimpleNamespace(
        spec=SimpleNamespace(tasks=[TaskSpec(task, "binary") for task in tasks]), core=None, columns=["x"]
    )
    text = make_card(model, results, "many")  # type: ignore[arg-type]  # a model of the parts that a card needs
    assert "auroc over 100 tasks" in text
    assert "t50" in text
    assert text.count("\n") < 80
