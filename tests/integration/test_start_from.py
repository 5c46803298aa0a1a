"""A new run from the weights of another one: what fits is copied, what does not is reported."""

from __future__ import annotations

import itertools
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtl.checkpoints.files import CheckpointIO, read
from mtl.checkpoints.warm_start import grouped, start_from
from mtl.checks import InputError
from mtl.cli.train import Source, start
from mtl.config import build
from mtl.gates import FixedGate
from mtl.pipeline.run import run
from mtl.runs.caller import Caller
from mtl.runs.commands import CommandLine
from tests.integration.helpers import compose_small, resume_small
from tests.stopping import assert_same, interrupted

WORDS = ["permutation=sinkhorn", "recipe.permutation.epochs=0.5", "recipe.dropout=0.3", "recipe.head_units=[8]"]
SHORT = ["trainer.max_epochs=1", "logger=csv", "trainer.log_every_n_steps=1"]


def saved(folder: Path, state: dict[str, Any], **config: Any) -> Path:
    """Write a checkpoint with these weights of a network."""
    content = {"config": config, "state_dict": {f"network.{k}": v for k, v in state.items()}}
    CheckpointIO().save_checkpoint(content, folder / "x.ckpt")
    return folder / "x.ckpt"


def stack(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    run(compose_small(folder, *WORDS, *SHORT))
    return folder / "checkpoints" / "last.ckpt"


def test_weights_and_buffers_are_copied(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = compose_small(tmp_path, *WORDS, "data.tasks_per_group=12", "permutation.tau=0.5", "seed=9")
    data = build.build_data(cfg)
    data.prepare_data()
    data.setup()
    network = build.build_network(cfg, data.spec)
    before = {name: value.clone() for name, value in network.state_dict().items() if isinstance(value, Tensor)}
    with caplog.at_level(logging.INFO):
        start_from(network, read(source))
    [line] = [record.message for record in caplog.records if record.name == "mtl.checkpoints.warm_start"]
    old = {name.removeprefix("network."): value for name, value in read(source)["state_dict"].items()}
    copied = 0
    for name, value in network.state_dict().items():
        if isinstance(value, Tensor):
            fits = name in old and old[name].shape == value.shape and not name.endswith(("tau", "rounds"))
            assert torch.equal(value, old[name] if fits else before[name]), name
            copied += fits
    permutation = network.mixture.gate.permutation
    assert permutation.is_hard  # a buffer of the other run, as the order is
    assert float(permutation.tau) == 0.5  # an option of this run
    assert f"start_from={source}: {copied} of " in line
    assert re.search(r"of another shape: .*mixture.gate.gate \(\d\)", line)


def test_report_and_refusal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, new = (
        nn.ModuleDict({"body": stack(3, 4, 5), "old": stack(2, 2, 2)}),
        nn.ModuleDict({"body": stack(3, 4, 6, 2)}),
    )
    with caplog.at_level(logging.INFO):
        start_from(new, read(saved(tmp_path, old.state_dict())))
    assert torch.equal(new["body"][0].weight, old["body"][0].weight)
    assert caplog.messages[-1].endswith(
        "x.ckpt: 2 of 6 tensors are set; not in the checkpoint: body.* (2); not in this network: old.* (4); "
        "of another shape: body.* (2)"
    )
    with pytest.raises(InputError, match=r"none of its weights fits this network; it has body\.\* .* network has 1 "):
        start_from(nn.Sequential(nn.Identity(), nn.Linear(7, 1)), read(saved(tmp_path, old.state_dict())))
    names = [f"part{index}.weight" for index in range(30)]
    assert grouped(names).endswith("part19 (1), ... (30 in all)")
    assert grouped(["layers.0.a.weight", "layers.11.a.bias", "unit"]) == "layers.*.a (2), unit (1)"


def test_the_pattern_of_a_fixed_gate_is_that_of_the_new_run(tmp_path: Path) -> None:
    old, new = (nn.ModuleDict({"gate": FixedGate(2, 4, pattern=p), "unit": nn.Linear(3, 1)}) for p in ("full", "none"))
    start_from(new, read(saved(tmp_path, old.state_dict())))
    assert torch.equal(new["unit"].weight, old["unit"].weight)
    assert new["gate"].weights.tolist() == [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]]


def test_integers_do_not_take_real_numbers(tmp_path: Path) -> None:
    new = stack(3, 4)
    new.register_buffer("table", torch.arange(3))
    start_from(new, read(saved(tmp_path, {**stack(3, 4).state_dict(), "table": torch.rand(3)})))
    assert new.table.tolist() == [0, 1, 2]


def test_nothing_of_the_configuration_of_a_stranger_is_used(tmp_path: Path) -> None:
    evil = {"data": {"_target_": "os.system", "command": "touch evil"}, "start_from": "${oc.env:HOME}"}
    path = saved(tmp_path, stack(3, 4).state_dict(), **evil)
    with pytest.raises(InputError):
        read(path).config()
    start_from(stack(3, 4), read(path))


def test_a_run_starts_fresh_and_resumes_without_the_file(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = tmp_path / "source.ckpt"
    copy.write_bytes(source.read_bytes())
    words = [*WORDS, *SHORT, "trainer.max_epochs=2", f"start_from='{copy}'", "seed=5"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with caplog.at_level(logging.INFO):
        run(compose_small(whole, *words))
        interrupted(parts, 6, *words)
    copy.unlink()
    again = resume_small(parts / "checkpoints" / "last.ckpt", parts, "+callbacks.stop=null")
    assert again.start_from == str(copy)  # where its weights came from
    run(again)
    assert [record.name for record in caplog.records].count("mtl.checkpoints.warm_start") == 2  # not when it resumed
    assert_same(parts, whole)
    assert read(whole / "checkpoints" / "last.ckpt")["global_step"] == 10


@pytest.mark.parametrize("other", ["ckpt", "evaluate"])
def test_two_checkpoints_are_one_message(other: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{other} and start_from: give one or the other"):
        begin(tmp_path, "start_from=a.ckpt", f"{other}=b.ckpt")


def test_missing_and_damaged_files_are_reported_before_data_are_touched(tmp_path: Path) -> None:
    words = ["data=movielens", f"paths.data_dir='{tmp_path}/none'", "data.download=false"]
    with pytest.raises(InputError, match=r"none.ckpt: no such file"):
        begin(tmp_path, *words, f"start_from='{tmp_path}/none.ckpt'")
    (tmp_path / "x.ckpt").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"x.ckpt .* is damaged"):
        begin(tmp_path, *words, f"start_from='{tmp_path}/x.ckpt'")
    with pytest.raises(InputError, match="start_from=5: must be text"):
        begin(tmp_path, "start_from=5")


def begin(folder: Path, *words: str) -> None:
    """Do what the program does with this command line."""
    runtime = SimpleNamespace(output_dir=str(folder), choices={}, config_sources=[])
    hydra: Any = SimpleNamespace(overrides=SimpleNamespace(task=list(words), hydra=[]), runtime=runtime, mode=None)
    start(compose_small(folder, *words), hydra, Caller(CommandLine(overrides=words)), Source())
