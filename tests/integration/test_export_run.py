"""Export and prune what a run has trained, by the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mtl.data_modules.tables.example import visits

import mtl
from mtl.cli.use import export as main
from mtl.cli.use import prune as pruned_by
from mtl.pipeline.run import run
from mtl.use import program
from tests.disks import largest_file
from tests.integration.helpers import compose_small, train_table
from tests.trees import few_trees

TASKS = "{click: {column: clicked, kind: binary}, minutes: {kind: regression}}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, words = tmp_path_factory.mktemp("trained"), ("gate=topk", "blend=auto", f"data.tasks={TASKS}")
    with few_trees():
        return train_table(folder, visits()[:300], *words)


def test_program_gives_the_predictions_of_the_model(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, out = trained / "checkpoints" / "best.ckpt", tmp_path / "out"
    main([str(checkpoint), "--out", str(out)])
    shown = capsys.readouterr().out
    assert "all experts are computed in mixture, since the gate depends on the example" in shown
    model, rows = mtl.load(checkpoint, device="cpu"), visits()[300:320]
    found = torch.export.load(out / "model.pt2").module()(model.encode(rows))
    expected = model.predict(rows)
    for task, column in {"click": "click_probability", "minutes": "minutes_prediction"}.items():
        torch.testing.assert_close(found[task].detach(), expected[column].to_torch(), atol=1e-5, rtol=1e-5)
    described = json.loads((out / "preprocessing.json").read_text())
    assert described["outputs"]["click"]["classes"] == ["no", "yes"]
    assert described["inputs"]["city"] == {"shape": ["rows"], "dtype": "int64"}
    assert described["data"]["encoder"]["columns_by_name"]["device"]["vocabularies"]["device"]["values"] == list(
        model.encoder.vocabularies["device"].values
    )


def test_full_disk_is_one_message_and_keeps_the_previous_program(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.onnx"
    (tmp_path / name).write_text("old")
    monkeypatch.setattr(program, "save", lambda exported, path: exported.module())  # a larger file
    message = rf"^error: .*/{name} cannot be written: file too large; the previous .*/{name} is intact$"
    with largest_file(20_000), pytest.raises(SystemExit, match=message):
        main([str(trained / "checkpoints" / "best.ckpt"), "--out", str(tmp_path), "--onnx"])
    assert (tmp_path / name).read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {name, "preprocessing.json"}


MIXTURE = ("data.num_groups=1", "data.tasks_per_group=2", "gate=topk", "network.static_gate=true")


def test_every_task_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(compose_small(tmp_path, *MIXTURE, "trainer.max_epochs=1"))
    checkpoint = tmp_path / "checkpoints" / "best.ckpt"
    pruned_by([str(checkpoint)])
    shown = capsys.readouterr().out
    report = json.loads((tmp_path / "pruned" / "savings.json").read_text())
    model = mtl.load(checkpoint, device="cpu")
    network, inputs = model.network, program.random_inputs(model.spec.inputs, 3)
    assert list(report) == [task.name for task in network.tasks]
    for task, row in report.items():
        assert task in shown
        assert f"{row['pruned_flops']:,}" in shown
        assert row["difference"] <= 1e-5
        assert row["pruned_parameters"] < row["parameters"]
        assert row["pruned_flops"] < row["flops"]
        found = torch.export.load(tmp_path / "pruned" / f"{task}.pt2").module()(inputs)[task]
        torch.testing.assert_close(found, program.Readable(network)(inputs)[task], atol=1e-5, rtol=0)
