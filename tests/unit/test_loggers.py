"""Loggers other than CSV: what they are given, and what a resumed run does; some need an extra."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas
import pytest
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

import mtl
from mtl.checks import InputError
from mtl.loggers.base import RunLogger
from mtl.loggers.mlflow import MLflowLog
from mtl.loggers.pictures import save_picture
from mtl.loggers.tensorboard import TensorBoardLog, compared
from mtl.loggers.wandb import WandbLog, earlier_id

VALUES = {
    "val/loss": 3.0,
    "val/a/loss": 2.0,
    "val/a/mse": 2.00001,
    "val/a/mae": 2.0,
    "val/b/loss": 1.0,
    "val/b/mse": 4.0,
}


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()


def test_tensorboard_gets_curves_alone(tmp_path: Path) -> None:
    logger = TensorBoardLog(str(tmp_path))
    logger.log_metrics(VALUES | {"epoch": 1}, 5)
    logger.finalize("success")
    logger.log_metrics({"test/loss": 1.0, "test/dead_experts": 0.0, "val/loss": 2.5}, 9)
    logger.close()
    found = events(tmp_path)
    assert set(found.Tags()["scalars"]) == VALUES.keys()
    assert [(event.step, event.value) for event in found.Scalars("val/loss")] == [(5, 3.0), (9, 2.5)]
    assert len(list(tmp_path.glob("events*"))) == 1  # one file for training and test


def test_tensorboard_compares_options_and_tests(tmp_path: Path) -> None:
    logger = TensorBoardLog(str(tmp_path))
    tasks = {"a": {"kind": "regression"}}
    overrides = ["paths.output_dir=a", "gate.k=4", "gate=topk", "+x='<b>'", "data=table"]
    config = {"seed": 3, "choices": {"gate": "topk", "data": "table"}, "gate": {"k": 4}, "overrides": overrides}
    logger.log_hyperparams(config | {"data": {"tasks": tasks}, "command": "mtl train --config-dir own gate.k=4"})
    logger.log_metrics({"test/loss": 1.0, "test/a/mse": 2.0, "test/dead_experts": 0.0}, 9)
    logger.close()
    found = events(tmp_path)
    assert found.Tags()["scalars"] == []
    [table] = found.Tensors("test/text_summary")[0].tensor_proto.string_val
    assert table.decode().splitlines()[2:] == ["| loss | 1.0000 |", "| a/mse | 2.0000 |", "| dead_experts | 0.0000 |"]
    [shown] = found.Tensors("run/text_summary")[0].tensor_proto.string_val
    assert shown == b"    mtl train --config-dir own gate.k=4\n    tasks.a.kind: regression"
    session = events(tmp_path / "test")
    assert {name: session.Scalars(name)[0].value for name in session.Tags()["scalars"]} == {"views/test_loss": 1}
    assert session.Tags()["tensors"] == []  # nothing that TensorBoard would take for the options of all runs
    content = HParamsPluginData.FromString(session.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content)
    options = content.session_start_info.hparams
    assert (options["gate"].string_value, options["gate.k"].number_value, options["seed"].number_value) == (
        "topk",
        4,
        3,
    )
    assert list(compared(config)) == ["gate", "seed", "gate.k", "x", "data"]  # no folders


def test_a_test_of_another_run_is_not_compared(tmp_path: Path) -> None:
    logger = TensorBoardLog(str(tmp_path))
    logger.log_hyperparams({"seed": 3, "choices": {"gate": "topk"}, "evaluate": "outputs/run"})
    logger.log_metrics({"test/loss": float("nan"), "test/a/mse": 2.0}, 9)
    logger.close()
    found = events(tmp_path)
    assert found.Tags()["scalars"] == []
    assert "\n| loss | - |\n" in found.Tensors("test/text_summary")[0].tensor_proto.string_val[0].decode()
    assert not (tmp_path / "test").exists()


class Shower(RunLogger):
    """A logger that shows pictures."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, bytes, int]] = []

    def log_picture(self, name: str, file: Path, step: int) -> None:
        self.shown.append((name, file.read_bytes(), step))


def test_loggers_show_the_picture_of_the_file(tmp_path: Path) -> None:
    figure = Figure(figsize=(1, 1))
    figure.add_subplot().plot([1, 2])
    one, tensorboard = Shower(), TensorBoardLog(str(tmp_path))
    file = tmp_path / "routing" / "share.png"
    save_picture(figure, file, [one, object(), tensorboard], 3)
    assert one.shown == [("views/share", file.read_bytes(), 3)]
    tensorboard.close()
    [image] = events(tmp_path).Images("views/share")
    assert image.encoded_image_string == file.read_bytes()
    assert (image.step, image.width, image.height) == (3, 100, 100)


def test_a_missing_package_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"logger=wandb needs the package wandb: pip install -e '.\[wandb\]'"):
        WandbLog(str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_the_latest_run_of_wandb_is_found_by_its_folder(tmp_path: Path) -> None:
    assert earlier_id(tmp_path) is None
    for name in ("offline-run-20260101_120000-zz", "run-20260301_120000-a-b", "offline-run-20260201_120000-yy"):
        (tmp_path / "wandb" / name).mkdir(parents=True)
    (tmp_path / "wandb" / "latest-run").symlink_to("offline-run-20260101_120000-zz")
    (tmp_path / "wandb" / "run-20270101_120000-file").touch()
    assert earlier_id(tmp_path) == "a-b"


@pytest.mark.filterwarnings("ignore")  # those of MLflow's own libraries
def test_mlflow_goes_on_in_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    for values, step in (({"val/a/ndcg@10": 0.5}, 3), ({"val/a/ndcg@10": 0.75}, 6)):
        logger = MLflowLog(str(tmp_path))
        logger.log_hyperparams({"trainer": {"max_epochs": step}, "data": {"tasks": {"größe": {"kind": "binary"}}}})
        logger.log_metrics(values, step)
        logger.finalize("success")
    history = logger.experiment.get_metric_history(logger.run_id, "val/a/ndcg_10")
    assert [(metric.step, metric.value) for metric in history] == [(3, 0.5), (6, 0.75)]
    run = logger.experiment.get_run(logger.run_id)
    assert run.data.params == {"trainer.max_epochs": "3", "data.tasks.gr__e.kind": "binary"}
    file = tmp_path / "share.png"
    file.write_bytes(b"png")
    logger.log_picture("views/share", file, 6)
    assert [path.name for path in (tmp_path / "mlflow" / "artifacts").rglob("*.png")] == ["share.png"]


@pytest.mark.filterwarnings("ignore")  # those of MLflow's own libraries
def test_mlflow_registers_the_network_of_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)  # where MLflow keeps the files of a database
    database = f"sqlite:///{tmp_path}/runs.db"
    rows = pandas.DataFrame({"x": [0.1, 0.9, 0.4, 0.6] * 30, "bought": [0, 1, 0, 1] * 30})
    options = {"logger": "mlflow", "logger.mlflow.tracking_uri": database, "logger.mlflow.register": "shop"}
    for number in (1, 2):
        folder = tmp_path / f"run{number}"
        model = mtl.fit(
            rows, {"bought": "binary"}, max_epochs=1, folder=folder, progress=False, report=False, options=options
        )
    mlflow.set_tracking_uri(database)
    registered = mlflow.pyfunc.load_model("models:/shop/2").predict(rows)
    pandas.testing.assert_frame_equal(registered, model.predict(rows))
    files = {path.name for path in Path(mlflow.artifacts.download_artifacts("models:/shop/2")).rglob("*")}
    assert {"model.safetensors", "model.json", "README.md"} <= files
    assert not {name for name in files if name.endswith((".pkl", ".pickle", ".ckpt", ".pt"))}


@pytest.mark.filterwarnings("ignore")  # those of wandb's own libraries
def test_wandb_goes_on_in_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    ids = []
    for step in (3, 6):
        logger = WandbLog(str(tmp_path))
        logger.log_hyperparams({"trainer": {"max_epochs": step}})
        logger.log_metrics({"val/loss": 1.0 / step}, step)
        logger.finalize("success")
        ids.append(logger.experiment.id)
        logger.close()
    assert ids[0] == ids[1]
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2
