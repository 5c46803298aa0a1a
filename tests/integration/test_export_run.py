"""Export what a run has trained, by the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mtl.data_modules.tables.example import visits

import mtl
from mtl.checkpoints.files import read
from mtl.cli.use import export as main
from mtl.config.resume import config_to_load
from mtl.use import program
from mtl.use.export import ROWS, rows_to_compare
from tests.disks import largest_file
from tests.integration.helpers import train_table

TASKS = "{click: {column: clicked, kind: binary}, minutes: {kind: regression}}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_table(tmp_path_factory.mktemp("trained"), visits()[:300], "gate=topk", f"data.tasks={TASKS}")


def test_program_gives_the_predictions_of_the_model(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, out = trained / "checkpoints" / "best.ckpt", tmp_path / "out"
    main([str(checkpoint), "--out", str(out)])
    shown = capsys.readouterr().out
    assert "on rows of the test split" in shown
    assert "dense, since the gate depends on the example: mixture" in shown
    model, rows = mtl.load(checkpoint, device="cpu"), visits()[300:320]
    found = torch.export.load(out / "model.pt2").module()(model.encode(rows))
    expected = model.predict(rows)
    for task, column in {"click": "click_probability", "minutes": "minutes_prediction"}.items():
        torch.testing.assert_close(found[task].detach(), expected[column].to_torch(), atol=1e-5, rtol=1e-5)
    described = json.loads((out / "preprocessing.json").read_text())
    assert described["outputs"]["click"]["classes"] == ["no", "yes"]
    assert described["inputs"]["city"] == {"shape": ["rows"], "dtype": "int64"}
    assert described["data"]["encoder"]["categorical"]["device"]["values"] == list(
        model.encoder.categorical["device"].values
    )


def test_without_the_data_rows_are_made_up(trained: Path) -> None:
    checkpoint, rows = trained / "checkpoints" / "best.ckpt", trained.parent / "rows.csv"
    model = mtl.load(checkpoint, device="cpu")
    rows.rename(trained.parent / "away.csv")
    try:
        inputs, of_test = rows_to_compare(model, read(checkpoint), config_to_load(read(checkpoint)))
    finally:
        (trained.parent / "away.csv").rename(rows)
    assert not of_test
    assert len(model.predict(inputs)) == ROWS


@pytest.mark.parametrize("name", ["model.pt2", "model.onnx"])
def test_full_disk_is_one_message_and_keeps_the_previous_program(
    name: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text("old")
    if name == "model.onnx":  # which is the smaller one
        monkeypatch.setattr(program, "save", lambda exported, path: exported.module())
    message = rf"^error: .*/{name} cannot be written: file too large; the previous .*/{name} is intact$"
    with largest_file(20_000), pytest.raises(SystemExit, match=message):
        main([str(trained / "checkpoints" / "best.ckpt"), "--out", str(tmp_path), "--onnx"])
    assert (tmp_path / name).read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {name, "preprocessing.json"}


def test_bad_checkpoint_gives_one_message() -> None:
    with pytest.raises(SystemExit, match=r"error: checkpoint nowhere.ckpt: no such file"):
        main(["nowhere.ckpt"])
