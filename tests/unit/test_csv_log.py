"""The CSV file of a run: columns that come later, and what a resumed run keeps; values that are logged at once."""

from __future__ import annotations

import csv
import os
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.loggers.logger import DummyLogger
from torch import Tensor

from mtl.loggers.csv import CSVLog
from mtl.training.measurements import log_values


def rows(path: Path) -> list[dict[str, str]]:
    lines = (path / "csv" / "metrics.csv").read_text().splitlines()
    return [{name: value for name, value in row.items() if value} for row in csv.DictReader(lines)]


def write(path: Path, records: list[tuple[int, dict[str, Any]]], at: int = 0) -> None:
    logger = CSVLog(str(path))
    logger.resume_at(at)
    for step, values in records:
        logger.log_metrics(values, step)
        logger.save()
    logger.finalize("success")


WHOLE = [
    (0, {"train/step_loss": torch.tensor(1.5)}),
    (1, {"train/step_loss": 1.25, "epoch": 0}),
    (1, {"val/loss": 0.5, "epoch": 0}),
    (2, {"train/step_loss": 1.0}),
    (3, {"train/step_loss": 0.75, "schedule/x": 1}),
    (4, {"test/loss": 0.25}),
]


def test_columns_may_come_later(tmp_path: Path) -> None:
    write(tmp_path, WHOLE)
    found = rows(tmp_path)
    assert [int(row["step"]) for row in found] == [0, 1, 1, 2, 3, 4]
    assert found[0] == {"step": "0", "train/step_loss": "1.5"}
    assert found[2] == {"step": "1", "val/loss": "0.5", "epoch": "0"}
    assert found[-1] == {"step": "4", "test/loss": "0.25"}


@pytest.mark.parametrize("saved", [0, 1, 3])
@pytest.mark.parametrize("killed", [2, 4, 6])
def test_resumed_file_equals_that_of_an_uninterrupted_run(saved: int, killed: int, tmp_path: Path) -> None:
    write(tmp_path / "whole", WHOLE)
    done = [record for record in WHOLE if record[0] < saved]
    write(tmp_path / "parts", WHOLE[: max(killed, len(done))])  # rows after the save are computed again
    name = Path("csv") / "metrics.csv"
    with (tmp_path / "parts" / name).open("a") as file:
        file.write("9,0.")  # the kill cut a row off
    write(tmp_path / "parts", WHOLE[len(done) :], at=saved)
    assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_new_run_does_not_keep_the_rows_of_another(tmp_path: Path) -> None:
    write(tmp_path, WHOLE)
    write(tmp_path, WHOLE[:1])
    assert rows(tmp_path) == [{"step": "0", "train/step_loss": "1.5"}]


def test_a_kill_while_rewriting_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, WHOLE[:3])
    before = rows(tmp_path)

    def killed(number: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, WHOLE[3:], at=1)
    assert rows(tmp_path) == before


def test_a_file_that_is_no_table_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "metrics.csv").write_bytes(b"\xff\x00nothing\n\n,,\n")
    write(tmp_path, WHOLE[:1], at=3)
    assert rows(tmp_path) == [{"step": "0", "train/step_loss": "1.5"}]


class Kept(DummyLogger):
    """Keep what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, Any]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


class Model(LightningModule):
    """Log one value by ``log_values`` and another by Lightning, at the end of each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.weight.sum()

    def validation_step(self, batch: Tensor, index: int) -> None: ...

    test_step = validation_step

    def _both(self, stage: str) -> None:
        log_values(self.trainer, {f"{stage}/a/auroc": 0.1, f"{stage}/b/loss": torch.tensor(2.0)})
        self.log(f"{stage}/lightning", 3.0)

    on_train_epoch_end = partialmethod(_both, "train")
    on_validation_epoch_end = partialmethod(_both, "val")
    on_test_epoch_end = partialmethod(_both, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_values_have_the_steps_of_lightning_and_monitors_see_them(tmp_path: Path) -> None:
    logger, data = Kept(), torch.utils.data.DataLoader(torch.zeros(6, 1), 2)
    trainer = Trainer(
        max_epochs=2, logger=logger, accelerator="cpu", enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, default_root_dir=tmp_path, log_every_n_steps=1,
    )  # fmt: skip
    model = Model()
    trainer.fit(model, data, data)
    fitted = dict(trainer.callback_metrics)
    trainer.test(model, data, verbose=False)
    ours = [(step, row) for step, row in logger.rows if "lightning" not in str(row)]
    theirs = [(step, row["epoch"]) for step, row in logger.rows if "lightning" in str(row)]
    assert theirs == [(2, 0), (2, 0), (5, 1), (5, 1), (6, 2)]
    assert [(step, row.pop("epoch")) for step, row in ours] == theirs
    curves = {"val/a/auroc": pytest.approx(0.1), "val/b/loss": 2.0}
    assert [row for _, row in ours[2:]] == [
        curves,
        {"train/a/auroc": pytest.approx(0.1), "train/b/loss": 2.0},
        {"test/a/auroc": pytest.approx(0.1), "test/b/loss": 2.0},
    ]
    assert {"val/a/auroc", "train/b/loss", "val/lightning"} <= fitted.keys()
    assert set(trainer.callback_metrics) == {"test/a/auroc", "test/b/loss", "test/lightning"}
    assert all(isinstance(value, Tensor) for value in fitted.values())  # as those that watch values expect


def test_a_sanity_check_reaches_no_logger() -> None:
    logger = Kept()
    trainer = SimpleNamespace(callback_metrics={}, sanity_checking=True, loggers=[logger])
    log_values(trainer, {"val/loss": 1.0})
    assert trainer.callback_metrics == {"val/loss": 1.0}
    assert logger.rows == []
