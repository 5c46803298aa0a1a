"""Prune what a run has trained, by the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mtl.cli.run import run
from mtl.cli.use import prune as main
from mtl.use.trained import network_and_data
from tests.disks import largest_file
from tests.integration.helpers import compose_small

PAIRS = ("data=synthetic_pairs", "data.num_pairs=1", "network=routed_dense", "gate=gumbel_matrix")
MIXTURE = ("data.num_groups=1", "data.tasks_per_group=2", "gate=topk", "network.static_gate=true")


@pytest.mark.parametrize("words", [PAIRS, MIXTURE], ids=["routed", "mixture"])
def test_every_task_of_a_run(words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(compose_small(tmp_path, *words, "trainer.max_epochs=1"))
    checkpoint = tmp_path / "checkpoints" / "best.ckpt"
    main([str(checkpoint)])
    shown = capsys.readouterr().out
    report = json.loads((tmp_path / "pruned" / "savings.json").read_text())
    network, data = network_and_data(checkpoint)
    inputs = next(iter(data.test_dataloader())).inputs
    assert list(report) == [task.name for task in network.tasks]
    for task, row in report.items():
        assert task in shown
        assert f"{row['pruned_flops']:,}" in shown
        assert row["difference"] <= 1e-5
        assert row["pruned_parameters"] < row["parameters"]
        assert row["pruned_flops"] < row["flops"]
        program = torch.export.load(tmp_path / "pruned" / f"{task}.pt2").module()
        some = {name: value[:3] for name, value in inputs.items()}
        found, expected = program(some).float(), network(some, [task]).predictions[task]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_full_disk_is_one_message_and_no_file(tmp_path: Path) -> None:
    run(compose_small(tmp_path, "gate=dselect_k", "trainer.max_epochs=1"))
    message = r"^error: .*pruned/.*\.pt2 cannot be written: file too large$"
    with largest_file(20_000), pytest.raises(SystemExit, match=message):
        main([str(tmp_path / "checkpoints" / "best.ckpt")])
    assert not list((tmp_path / "pruned").iterdir())
