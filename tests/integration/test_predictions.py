"""predictions.parquet of a run: its rows, its models, and the metrics that are computed from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from mtl.data_modules.table import TableDataModule

from mtl.checks import InputError
from mtl.files.run_files import PREDICTIONS
from mtl.pipeline.run import run
from mtl.runs.predictions_file import METADATA, read_predictions
from mtl.training.measurements import Measurements, is_routing
from mtl.training.metrics import value_of
from mtl.use.compare import compare_runs
from tests.integration.helpers import NARROW, compose_small
from tests.integration.test_configs import SMALL_TEXTS
from tests.loaded import loaded
from tests.visit_files import visits

TASKS = "{click: {kind: binary, metrics: [auroc, logloss, gauc]}, plan: {kind: multiclass, metrics: [auroc, ece]}, "
TASKS += "rare: {kind: binary, after: click}, minutes: {kind: regression, loss: quantile, quantiles: [0.1, 0.5, 0.9]}}"
TABLE = ["data=table", f"data.tasks={TASKS}", "data.group_column=user", "data.ignore=[part, cart]", *NARROW]
TABLE += ["calibrate=true", "data.batch_size=32", "trainer.max_epochs=1", "threads=1"]


def measured(folder: Path) -> Measurements:
    return Measurements.from_plain(json.loads((folder / "results.json").read_text())["numbers"])


def check_metrics(folder: Path, models: list[str]) -> None:
    """Compare the metrics of each task and model, computed from the file, with those of results.json."""
    numbers = measured(folder)
    assert numbers.models() == models
    compared = 0
    for split, model in [("val", "network"), *(("test", model) for model in models)]:
        tasks, predictions, _ = read_predictions(folder, split, model)
        for key, (value, _) in numbers.items():
            is_metric = (key.split, key.model) == (split, model) and key.task and key.metric != "loss"
            if is_metric and not is_routing(key.metric):
                found = torch.tensor(value_of(tasks[key.task].kind, key.metric, predictions[key.task])).item()
                assert found == pytest.approx(value, rel=0, abs=0, nan_ok=True)
                compared += 1
    assert compared >= 2 * (1 + len(models))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with visits.csv, and in ``parts`` the same rows in three Parquet files."""
    folder, frame = tmp_path_factory.mktemp("visits"), visits().with_columns(rare=pl.col("click").fill_null(0))
    frame.write_csv(folder / "visits.csv")
    (folder / "parts").mkdir()
    for number in range(3):
        frame[number * 80 : (number + 1) * 80].write_parquet(folder / "parts" / f"{number}.parquet")
    return folder


@pytest.mark.parametrize("streamed", [False, True])
def test_metrics_of_the_file_are_those_of_the_results(streamed: bool, rows: Path, tmp_path: Path) -> None:
    words = [*TABLE, "blend=[linear]", "data.slices=[city]"]
    path = [f"data.path={rows}/parts", "data.window_rows=320"] if streamed else [f"data.path={rows}/visits.csv"]
    run(compose_small(tmp_path, *words, *path, *(["data.weight_column=weight"] if not streamed else [])))
    check_metrics(tmp_path, ["network", "constant", "linear", "blend"])
    table = pl.read_parquet(tmp_path / PREDICTIONS)
    minutes = table.filter(split="test", model="network", task="minutes")
    assert minutes["row_id"].to_list() == list(range(24))
    assert ("file" in table.columns) == streamed
    parts = [pl.read_parquet(file) for file in sorted((rows / "parts").glob("*"))]
    frames = {str(rows / "parts" / f"{number}.parquet"): part for number, part in enumerate(parts)}
    for line in minutes.iter_rows(named=True):
        frame = frames[line["file"]] if streamed else pl.concat(parts)
        source = frame.row(line["file_row"] - 1, named=True)
        assert (source["minutes"], source["city"]) == (line["label"], line["slice_city"])
    assert (minutes["weight"].null_count() > 0) == streamed
    sizes = {each["value"]: each["rows"] for each in json.loads((tmp_path / "results.json").read_text())["slices"]}
    assert set(sizes) == {"Lyon", "Oslo", "Rome", "missing"}


def test_tasks_with_rows_of_their_own(tmp_path: Path, tiny_data: Path) -> None:
    words = ["data=four_mnists", "network=routed_mnists", "gate=softmax", f"paths.data_dir={tiny_data}"]
    run(compose_small(tmp_path, *words, "data.rows=[60,20,21]", "data.eval_batch_size=8", "trainer.max_epochs=1"))
    check_metrics(tmp_path, ["network", "constant"])
    assert compare_runs(tmp_path, tmp_path, resamples=100)["verdict_on_b"].to_list() == ["as good"] * 4
    table = pl.read_parquet(tmp_path / PREDICTIONS).filter(split="test", model="network")
    for _, part in table.group_by("task"):
        assert part["row_id"].to_list() == list(range(len(part)))
    assert "file_row" not in table.columns


def test_spans_have_no_rows_and_the_file_can_be_left_out(tmp_path: Path, tiny_data: Path) -> None:
    words = ["data=squad", *SMALL_TEXTS, f"paths.data_dir={tiny_data}", "trainer.max_epochs=1"]
    run(compose_small(tmp_path / "spans", *words))
    assert measured(tmp_path / "spans").value("squad", "f1") is not None
    assert not (tmp_path / "spans" / PREDICTIONS).exists()
    run(compose_small(tmp_path / "without", "predictions=false", "trainer.max_epochs=1"))
    assert not (tmp_path / "without" / PREDICTIONS).exists()
    with pytest.raises(InputError, match=r"predictions\.parquet: must be a regular file"):
        read_predictions(tmp_path / "without")


def test_a_test_of_the_checkpoint_writes_the_same_rows(rows: Path, tmp_path: Path) -> None:
    run(compose_small(tmp_path / "run", *TABLE, f"data.path={rows}/visits.csv", "blend=none"))
    run(compose_small(tmp_path / "test", *TABLE, f"data.path={rows}/visits.csv", f"evaluate={tmp_path}/run"))
    first, second = (pl.read_parquet(tmp_path / name / PREDICTIONS).filter(split="test") for name in ("run", "test"))
    assert first.equals(second)
    digests = [digests_of(tmp_path / name)["test"] for name in ("run", "test")]
    assert digests[0] == digests[1]


def digests_of(folder: Path) -> dict[str, str]:
    content: dict[str, Any] = json.loads(pl.read_parquet_metadata(folder / PREDICTIONS)[METADATA])
    digests: dict[str, str] = content["digests"]
    return digests


def test_the_digest_is_that_of_the_rows(rows: Path) -> None:
    """It depends on the seed and the split, unless the rows have a file of their own, and not on the inputs."""

    def digest(**options: Any) -> str:
        data = loaded(TableDataModule(rows / "visits.csv", {"click": {"kind": "binary"}}, batch_size=8, **options))
        return str(data.rows_digest("test"))

    expected = digest()
    assert digest(ignore=["user"]) == expected
    splits: list[dict[str, Any]] = [{"by": "time", "column": "day"}, {"fractions": (0.7, 0.2, 0.1)}]
    others = [digest(seed=1), *(digest(split=split) for split in splits)]
    assert len({expected, *others}) == 4
    apart = {"test_path": rows / "visits.csv"}
    assert digest(**apart) == digest(**apart, split=splits[0])


@pytest.mark.parametrize("change", ["text", "class", "columns"])
def test_a_damaged_file_is_one_message(change: str, rows: Path, tmp_path: Path) -> None:
    run(compose_small(tmp_path, *TABLE, f"data.path={rows}/visits.csv", "blend=none"))
    path = tmp_path / PREDICTIONS
    table, metadata = pl.read_parquet(path), pl.read_parquet_metadata(path)
    if change == "text":
        path.write_text("no Parquet")
    elif change == "class":
        table.with_columns(label=pl.col("label") + 7).write_parquet(path, metadata={METADATA: metadata[METADATA]})
    else:
        table.drop("prediction").write_parquet(path, metadata={METADATA: metadata[METADATA]})
    with pytest.raises(InputError, match=r"predictions\.parquet"):
        read_predictions(tmp_path)
