"""A run that is stopped anywhere and goes on equals the run that was not stopped, to the last bit."""

from __future__ import annotations

import csv
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import open_dict
from pytorch_lightning import Callback

from mtl.checkpoints.files import previous_checkpoint, read, read_to_resume
from mtl.checks import InputError
from mtl.cli.run import run
from mtl.cli.signals import Stopped
from tests.conftest import ROOT
from tests.integration.helpers import SMALL, compose_small, resume_small
from tests.programs import LIMIT, Forked

# dropout, noise and a permutation that hardens in the second of three epochs of 5 steps
WORDS = [
    "trainer.max_epochs=3",
    "recipe.dropout=0.3",
    "recipe.head_units=[8]",
    "permutation=sinkhorn",
    "recipe.permutation.epochs=1.4",
    "permutation.noise=0.1",
    "logger=csv",
    "trainer.log_every_n_steps=1",
]


def slow(*values: Any) -> Any:
    """Return values that only the slow tests try: they repeat the kind of others."""
    return pytest.param(*values, marks=pytest.mark.slow)


class StopAt(Callback):
    """Send the process a signal in the middle of a step."""

    def __init__(self, step: int, number: int = signal.SIGTERM) -> None:
        self.step, self.number = step, number

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)


def state(folder: Path) -> dict[str, Any]:
    """Return what must be the same: weights, optimiser, best score, early stopping, test."""
    last = read(folder / "checkpoints" / "last.ckpt")
    callbacks = {k: v for k, v in last["callbacks"].items() if "EarlyStop" in k or "RandomState" in k}
    best = [v["best_model_score"] for k, v in last["callbacks"].items() if "BestCheckpoint" in k]
    test = json.loads((folder / "results.json").read_text())["test"]
    return {
        "w": last["state_dict"],
        "o": last["optimizer_states"],
        "c": callbacks,
        "b": best,
        "t": test,
    }


def losses(folder: Path) -> dict[tuple[str, int], str]:
    """Return what was logged of the training losses, as written."""
    rows = csv.DictReader((folder / "csv" / "metrics.csv").read_text().splitlines())
    names = ("train/step_loss", "train/loss", "val/loss")
    return {(name, int(row["step"])): row[name] for row in rows for name in names if row.get(name)}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole")
    run(compose_small(folder, *WORDS))
    return {"state": state(folder), "losses": losses(folder)}


@pytest.mark.parametrize(
    "step", [0, slow(2), 4, slow(5), 6, 7, slow(8), slow(9), 12]
)  # epochs end with steps 4 and 9, hardening comes before step 7
def test_stopped_anywhere(step: int, whole: dict[str, Any], tmp_path: Path) -> None:
    began = time.perf_counter()
    cfg = compose_small(tmp_path, *WORDS)
    with open_dict(cfg):
        cfg.callbacks.stop = {"_target_": f"{__name__}.StopAt", "step": step}
    with pytest.raises(Stopped, match=r"stopped by SIGTERM after step \d+, saved; resume with: python train.py ckpt="):
        run(cfg)
    saved = read(tmp_path / "checkpoints" / "last.ckpt")
    assert saved["global_step"] == step + 1
    torch.manual_seed(99)  # what the new process draws before it goes on does not count
    go_on(tmp_path)
    again, logged = state(tmp_path), losses(tmp_path)
    for key, value in whole["state"].items():
        assert same(value, again[key]), key
    assert logged == whole["losses"]
    seconds = read(tmp_path / "checkpoints" / "last.ckpt")["callbacks"]["EpochReport"]["seconds"]
    assert len(seconds) == 3
    assert 0 < sum(seconds) < time.perf_counter() - began


@pytest.mark.parametrize(("stop", "length"), [(6, 7), (6, 3), (4, 2)])  # of epochs of 5 batches
def test_position_with_another_length_of_epochs(stop: int, length: int, tmp_path: Path) -> None:
    cfg = compose_small(tmp_path, *WORDS, "trainer.limit_train_batches=5", "data.batch_size=40")
    with open_dict(cfg):
        cfg.callbacks.stop = {"_target_": f"{__name__}.StopAt", "step": stop}
    with pytest.raises(Stopped):
        run(cfg)
    Positions.seen = []
    cfg = resume_small(tmp_path / "checkpoints" / "last.ckpt", tmp_path, "+callbacks.stop=null")
    cfg.trainer.limit_train_batches = length
    with open_dict(cfg):
        cfg.callbacks.positions = {"_target_": f"{__name__}.Positions"}
    run(cfg)
    first = (stop + 1) % 5
    assert Positions.seen == [(1, batch) for batch in range(first, length)] + [(2, batch) for batch in range(length)]


class Positions(Callback):
    """Note the epoch from which the sampler takes each batch, and the number of the batch."""

    seen: list[tuple[int, int]]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        Positions.seen.append((trainer.train_dataloader.sampler.sampler.epoch, batch_idx))


def test_an_epoch_that_would_end_before_the_checkpoint_is_refused(tmp_path: Path) -> None:
    run(compose_small(tmp_path, *WORDS, "trainer.max_steps=9", "~logger"))  # of epochs of 5 batches
    last = tmp_path / "checkpoints" / "last.ckpt"
    words = ["trainer.max_steps=-1", "trainer.limit_train_batches=4"]
    with pytest.raises(InputError, match=r"4 batches of an epoch are done, and an epoch has now 4 of them"):
        run(resume_small(last, tmp_path, *words))
    assert read(last)["global_step"] == 9


def test_stopped_in_float64(tmp_path: Path) -> None:
    words = [*WORDS, "trainer.precision=64-true", "trainer.max_epochs=2"]
    run(compose_small(tmp_path / "whole", *words))
    cfg = compose_small(tmp_path / "parts", *words)
    with open_dict(cfg):
        cfg.callbacks.stop = {"_target_": f"{__name__}.StopAt", "step": 6}
    with pytest.raises(Stopped):
        run(cfg)
    go_on(tmp_path / "parts")
    for key, value in state(tmp_path / "whole").items():
        assert same(value, state(tmp_path / "parts")[key]), key


TASKS = [  # matrices drawn in every step, steps of two tasks in random order, dropout
    *("data=four_mnists", "network=routed_mnists", "gate=gumbel_matrix", "schedule=matrix_temperature"),
    *("data.tasks_per_step=2", "data.order=temperature", "trainer.max_epochs=2", "logger=csv"),
    "trainer.log_every_n_steps=1",
]


@pytest.fixture(scope="module")
def whole_of_tasks(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    folder = tmp_path_factory.mktemp("whole_of_tasks")
    run(compose_small(folder, *TASKS, f"paths.data_dir={tiny_data}"))
    return folder


@pytest.mark.parametrize("step", [slow(3), 13, 20])  # of 14 steps in an epoch
def test_stopped_run_of_tasks_with_separate_rows(
    step: int, whole_of_tasks: Path, tmp_path: Path, tiny_data: Path
) -> None:
    whole, parts = whole_of_tasks, tmp_path
    cfg = compose_small(parts, *TASKS, f"paths.data_dir={tiny_data}")
    with open_dict(cfg):
        cfg.callbacks.stop = {"_target_": f"{__name__}.StopAt", "step": step}
    with pytest.raises(Stopped):
        run(cfg)
    torch.manual_seed(99)
    go_on(parts, f"paths.data_dir={tiny_data}")
    expected, got = state(whole), state(parts)
    for key, value in expected.items():
        assert same(value, got[key]), key
    assert losses(parts) == losses(whole)


def go_on(folder: Path, *words: str) -> None:
    run(resume_small(folder / "checkpoints" / "last.ckpt", folder, "+callbacks.stop=null", *words))


def test_damaged_last_checkpoint_falls_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(compose_small(tmp_path, "trainer.max_epochs=2"))
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert read_to_resume(last).path == last
    assert read(previous_checkpoint(last))["epoch"] == 0
    last.write_bytes(last.read_bytes()[:2000])
    assert read_to_resume(last).path == previous_checkpoint(last)
    assert "damaged or truncated" in caplog.text
    assert "resuming from the previous checkpoint" in caplog.text
    previous_checkpoint(last).write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"last.previous.ckpt .* is damaged"):
        read_to_resume(last)


def test_full_disk_keeps_previous_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = torch.save, []

    def save(content: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(file)
        if len(calls) > 4:  # best and last of two epochs
            file.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(content, file, *args, **kwargs)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(InputError, match=r"cannot be written: no space left .*; the previous .* is intact"):
        run(compose_small(tmp_path, "trainer.max_epochs=4"))
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["best.ckpt", "last.ckpt", "last.previous.ckpt"]
    assert read(folder / "last.ckpt")["epoch"] == 1


@pytest.mark.parametrize(
    "moments",
    [("csv/metrics.csv",), slow((".lock", "command.json", "config.yaml", "csv/metrics.csv", "csv/metrics.csv"))],
)
def test_killed_before_the_first_checkpoint_and_started_again(moments: tuple[str, ...], tmp_path: Path) -> None:
    """Killed as soon as a file is written, and started by the same command, until it runs to its end."""
    folder, words = tmp_path / "run", [*WORDS, "data.batch_size=8", "trainer.max_epochs=1"]
    run(compose_small(tmp_path / "whole", *words))
    words = [word for word in SMALL if not word.startswith("trainer.")] + ["trainer.accelerator=cpu", *words]
    words = list({word.partition("=")[0]: word for word in words}.values())
    words += ["data.rows=[600,200,200]", "data.tasks_per_group=3", f"hydra.run.dir={folder}"]
    for number, name in enumerate(moments):
        running = Forked([*words, "logger.csv.flush_logs_every_n_steps=1"], tmp_path / f"output_{number}", cwd=ROOT)
        running.wait_for(folder / name, after=time.time_ns() if number else 0)
        running.signal(signal.SIGKILL)
        assert running.wait().status == -signal.SIGKILL
        assert not list(folder.glob("checkpoints/*.ckpt"))
    outcome = Forked(words, tmp_path / "output", cwd=ROOT).wait()
    assert outcome.status == 0, outcome.output
    for key, value in state(tmp_path / "whole").items():
        assert same(value, state(folder)[key]), key
    assert losses(folder) == losses(tmp_path / "whole")


def test_steps_and_minutes(tmp_path: Path) -> None:
    cfg = compose_small(tmp_path, "trainer.max_epochs=1", "callbacks.last.every_steps=2")
    seen: list[int] = []
    with open_dict(cfg):
        cfg.callbacks.count = {"_target_": f"{__name__}.Saves", "seen": []}
    Saves.seen = seen
    run(cfg)
    assert sorted(set(seen)) == [2, 4, 5]
    with pytest.raises(InputError, match=r"callbacks.last.every_minutes=0"):
        run(compose_small(tmp_path / "b", "callbacks.last.every_minutes=0"))


class Saves(Callback):
    seen: list[int]

    def __init__(self, seen: list[int]) -> None:
        pass

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        Saves.seen.append(trainer.global_step)


class Poison(Callback):
    """Make a weight infinite after some steps."""

    def __init__(self, step: int, what: str) -> None:
        self.step, self.what = step, what

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            with torch.no_grad():
                pl_module.get_parameter(self.what)[1].fill_(float("inf"))


@pytest.mark.parametrize("what", ["network.mixture.experts.layers.0.weight", "network.mixture.gate.split_bias"])
def test_nan_or_infinite_numbers_stop_the_run(what: str, tmp_path: Path) -> None:
    cfg = compose_small(tmp_path, "trainer.max_epochs=3")
    with open_dict(cfg):
        cfg.callbacks.poison = {"_target_": f"{__name__}.Poison", "step": 7, "what": what}
    kind = "experts" if "experts" in what else "tasks"
    with pytest.raises(InputError, match=r"step \d+: .*not finite|is nan|is inf") as error:
        run(cfg)
    assert f"{what} ({kind} 1)" in str(error.value)
    last = read(tmp_path / "checkpoints" / "last.ckpt")
    assert last["epoch"] == 0
    assert all(torch.isfinite(v).all() for v in last["state_dict"].values() if isinstance(v, torch.Tensor))


def test_sigterm_from_outside(tmp_path: Path) -> None:
    """The command that a user types; other tests save its imports."""
    command = [sys.executable, str(ROOT / "train.py"), "trainer.max_epochs=500", "recipe.patience=500"]
    command += ["trainer.accelerator=cpu", "callbacks.progress=null", "callbacks.routing.pictures=false"]
    command += ["data.rows=[300,100,100]", "data.tasks_per_group=3", f"hydra.run.dir={tmp_path}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + LIMIT
    while not (tmp_path / "checkpoints" / "last.ckpt").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM after step" in output
    assert "Traceback" not in output
    assert not [path for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".")]
    read(tmp_path / "checkpoints" / "last.ckpt")
