"""The CSV file of a run: columns that come later, and what a resumed run keeps."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from mtl.loggers.csv import CSVLog


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
