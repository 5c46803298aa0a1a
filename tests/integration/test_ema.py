"""Runs that average their weights: the average is evaluated and saved, training is as without it, resuming is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pytorch_lightning import Callback
from torch import Tensor

from mtl.checkpoints.files import read
from mtl.pipeline.run import run
from tests.integration.helpers import compose_small, resume_small
from tests.integration.test_accumulation import rows
from tests.integration.test_run import losses as results
from tests.stopping import assert_same, go_on, interrupted, losses, same, slow, watched

# Epochs of 10 batches and 5 steps, validated after 4, 8 and 10 batches; the permutation is hardened after step 7
WORDS = [
    *("data.batch_size=64", "trainer.accumulate_grad_batches=2", "trainer.val_check_interval=4", "recipe.dropout=0.3"),
    *("permutation=sinkhorn", "recipe.permutation.epochs=1.4", "permutation.noise=0.1"),
    *("lr_schedule=one_cycle", "logger=csv", "trainer.log_every_n_steps=1"),
]
EMA = "callbacks.ema.decay=0.7"


class Watch(Callback):
    """Keep the trained parameters after each optimiser step."""

    seen: ClassVar[dict[int, dict[str, Tensor]]] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        Watch.seen[trainer.global_step] = {name: p.detach().clone() for name, p in pl_module.named_parameters()}


def saved(folder: Path, name: str = "last") -> dict[str, Any]:
    return read(folder / "checkpoints" / f"{name}.ckpt")


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("averaged")
    run(watched(compose_small(folder, *WORDS, EMA), Watch))
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    run(compose_small(folder, *WORDS))
    return folder


def test_average_by_hand(averaged: Path) -> None:
    last = saved(averaged)
    trained = last["callbacks"]["WeightAverage"]["parameters"]
    courses = [Watch.seen[step] for step in range(10)] + [trained]
    for name in trained:
        average = courses[0][name].double()
        for step, course in enumerate(courses[1:]):
            decay = min(0.7, (1 + step) / (10 + step))
            average = decay * average + (1 - decay) * course[name].double()
        torch.testing.assert_close(last["state_dict"][name], average.float())
    names = set(last["state_dict"]) - set(trained)
    assert {name.rsplit(".", 1)[-1] for name in names} >= {"order", "hardened", "tau", "_extra_state"}
    assert bool(last["state_dict"]["network.mixture.gate.permutation.hardened"])


def test_training_is_as_without_the_average(averaged: Path, plain: Path) -> None:
    expected, found = (losses(folder) for folder in (plain, averaged))
    trained = {key: value for key, value in expected.items() if key[0] != "val/loss"}
    assert trained == {key: value for key, value in found.items() if key[0] != "val/loss"}
    assert not set(expected.items()) & {item for item in found.items() if item[0][0] == "val/loss"}
    parameters = saved(averaged)["callbacks"]["WeightAverage"]["parameters"]
    assert all(torch.equal(value, saved(plain)["state_dict"][name]) for name, value in parameters.items())


def test_average_is_what_is_tested(averaged: Path, tmp_path: Path) -> None:
    """The best checkpoint, evaluated without training, gives the results of the run."""
    best = averaged / "checkpoints" / "best.ckpt"
    run(resume_small(best, tmp_path, "+callbacks.stop=null", evaluate=True))
    assert results(tmp_path) == results(averaged)


@pytest.mark.parametrize(
    "batch", [slow(2), 7, slow(13)]
)  # within an epoch, at the step of a validation, after the hardening
def test_stopped_run_resumes_exactly(batch: int, averaged: Path, tmp_path: Path) -> None:
    interrupted(tmp_path, batch, *WORDS, EMA)
    go_on(tmp_path)
    assert_same(tmp_path, averaged)
    assert same(saved(averaged)["callbacks"]["WeightAverage"], saved(tmp_path)["callbacks"]["WeightAverage"])
    assert [row for row in rows(tmp_path) if "train/lr" in row] == [row for row in rows(averaged) if "train/lr" in row]


def test_average_may_be_left_out_on_resuming(plain: Path, tmp_path: Path) -> None:
    """Training goes on from the trained weights: not a bit of it depends on the average."""
    interrupted(tmp_path, 7, *WORDS, EMA)
    go_on(tmp_path, "callbacks.ema.decay=null")
    assert "WeightAverage" not in saved(tmp_path)["callbacks"]
    assert same(saved(tmp_path)["state_dict"], saved(plain)["state_dict"])


def test_average_may_be_taken_up_on_resuming(tmp_path: Path) -> None:
    before = interrupted(tmp_path, 9, *WORDS)
    assert before["global_step"] == 5
    go_on(tmp_path, EMA, "trainer.max_steps=6")
    last, decay = saved(tmp_path), 6 / 15
    for name, value in last["callbacks"]["WeightAverage"]["parameters"].items():
        expected = decay * before["state_dict"][name] + (1 - decay) * value
        torch.testing.assert_close(last["state_dict"][name], expected)


def test_weights_alone(tmp_path: Path) -> None:
    run(compose_small(tmp_path, EMA, "trainer.precision=64-true", "callbacks.best.save_weights_only=true"))
    best, last = saved(tmp_path, "best"), saved(tmp_path)
    assert "callbacks" not in best
    assert best["global_step"] == last["global_step"]  # the loss falls
    for name, value in last["callbacks"]["WeightAverage"]["parameters"].items():
        average = best["state_dict"][name]
        assert torch.equal(average, last["state_dict"][name])
        assert average.dtype == value.dtype == torch.float64
        assert not torch.equal(average, value)
