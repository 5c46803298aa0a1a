"""What a number measures, its name, and the record of all numbers."""

from __future__ import annotations

import json
import math

import pytest

from mtl.loggers.base import MAX_LISTED_TASKS
from mtl.training.measurements import LEAD, NETWORK, Key, Measurement, Measurements, of_few_tasks


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (Key("test", "click", "auroc"), "test/click/auroc"),
        (Key("val", "", "loss"), "val/loss"),
        (Key("test", "a/b", "mse"), "test/a/b/mse"),
        (Key("test", "a:b", "mse"), "test/a:b/mse"),
        (Key("test", "a:b", "mse", "linear"), "linear:test/a:b/mse"),
        (Key("training", "", "binary_after_layer_0"), "training/binary_after_layer_0"),
    ],
)
def test_the_text_of_a_key_can_be_read(key: Key, text: str) -> None:
    assert str(key) == text
    assert Key.of(text) == key


def measurements() -> Measurements:
    values = {"test/loss": 0.5, "test/a/b/loss": 0.5, "test/a/b/auroc": 0.9, "test/c/mse": math.nan}
    values |= {"val/a/b/auroc": 0.8, "test/c/experts_per_sample": 2.0, "linear:test/a/b/auroc": 0.7}
    return Measurements(
        {**Measurements.of(values), Key("test", "a/b", "auroc", f"{NETWORK}{LEAD}linear"): Measurement(0.2, 0.01)}
    )


def test_the_record_is_read_as_it_was_written() -> None:
    found = measurements()
    content = json.loads(json.dumps(found.plain()))
    assert content["test"]["network"]["c/mse"] is None
    assert content["test"]["network - linear"] == {"a/b/auroc": [0.2, 0.01]}
    again = Measurements.from_plain(content)
    assert again.keys() == found.keys()
    defined = {key: value for key, value in found.items() if not math.isnan(value.value)}
    assert defined.items() <= again.items()
    assert math.isnan(again[Key("test", "c", "mse")].value)


def test_values_are_found_by_what_they_measure() -> None:
    found = measurements()
    assert found.value("a/b", "auroc") == 0.9
    assert found.value("a/b", "auroc", "val") == 0.8
    assert found.value("a/b", "auroc", model="linear") == 0.7
    assert found.value("", "loss") == 0.5
    assert found.value("c", "mse") is found.value("c", "mae") is None
    assert found.lead_error("a/b", "auroc", "linear") == 0.01
    assert found.lead_error("a/b", "auroc", "constant") is None
    assert found.models() == [NETWORK, "linear"]
    assert found.models("val") == [NETWORK]


def test_models_stand_beside_each_other() -> None:
    table = measurements().by_model()
    assert table.columns == ["task", "metric", "network", "linear"]
    assert table.rows() == [("a/b", "auroc", 0.9, 0.7), ("c", "mse", None, None)]
    assert Measurements().by_model().columns == ["task", "metric", "network"]


def test_loggers_get_few_of_hundreds_of_tasks_and_their_distribution() -> None:
    tasks = [f"t/{index}" for index in range(MAX_LISTED_TASKS + 36)]
    row = {f"val/{task}/mse": float(index) for index, task in enumerate(tasks)} | {"val/loss": 1.0}
    row |= {f"train/weight/{task}": 1.0 for task in tasks} | {"train/aux/balance": 0.1}
    assert of_few_tasks(row, tasks[:MAX_LISTED_TASKS], []) == row
    few = of_few_tasks(row | {"val/t/99/mse": math.nan}, tasks, ["val/t/98/mse", None])
    shown = {name for task in tasks[:MAX_LISTED_TASKS] for name in (f"val/{task}/mse", f"train/weight/{task}")}
    means = {"val/mean_mse": 49.0, "val/quartile_1_mse": 24.5, "val/median_mse": 49.0, "val/quartile_3_mse": 73.5}
    assert few.keys() - shown == {"val/t/98/mse", "val/loss", "train/aux/balance", *means}
    assert {name: few[name] for name in means} == means  # of the 99 tasks where it is defined
