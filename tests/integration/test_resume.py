"""A run that is stopped anywhere and goes on equals the run that was not stopped, to the last bit."""

from __future__ import annotations

import errno
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from mtl.callbacks.last_checkpoint import LastCheckpoint
from mtl.callbacks.phase_length import ends_epoch
from pytorch_lightning import Callback

from mtl.checkpoints.files import previous_checkpoint, read, read_to_resume
from mtl.checks import InputError
from mtl.files.run_files import read_json
from mtl.pipeline.run import run
from tests.conftest import ROOT
from tests.integration.helpers import NARROW, SMALL, compose_small, resume_small
from tests.programs import Forked
from tests.stopping import assert_same, go_on, interrupted, resumed_everywhere, slow, watched

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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run(compose_small(folder, *WORDS))
    return folder


@pytest.mark.parametrize(
    "step", [0, slow(2), 4, slow(5), 6, 7, slow(8), slow(9), 12]
)  # epochs end with steps 4 and 9, hardening comes before step 7
def test_stopped_anywhere(step: int, whole: Path, tmp_path: Path) -> None:
    began = time.perf_counter()
    assert interrupted(tmp_path, step, *WORDS)["global_step"] == step + 1
    go_on(tmp_path)
    assert_same(tmp_path, whole)
    seconds = read(tmp_path / "checkpoints" / "last.ckpt")["callbacks"]["EpochReport"]["seconds"]
    assert len(seconds) == 3
    assert 0 < sum(seconds) < time.perf_counter() - began


@pytest.mark.parametrize(("stop", "length"), [(6, 7), (6, 3), (4, 2)])  # of epochs of 5 batches
def test_position_with_another_length_of_epochs(stop: int, length: int, tmp_path: Path) -> None:
    interrupted(tmp_path, stop, *WORDS, "trainer.limit_train_batches=5", "data.batch_size=40")
    Positions.seen = []
    cfg = resume_small(tmp_path / "checkpoints" / "last.ckpt", tmp_path)
    cfg.trainer.limit_train_batches = length
    run(watched(cfg, Positions))
    first = (stop + 1) % 5
    assert Positions.seen == [(1, batch) for batch in range(first, length)] + [(2, batch) for batch in range(length)]


class Positions(Callback):
    """Note the epoch from which the sampler takes each batch, and the number of the batch."""

    seen: list[tuple[int, int]]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        Positions.seen.append((trainer.train_dataloader.sampler.sampler.position()[0], batch_idx))


def test_an_epoch_that_would_end_before_the_checkpoint_is_refused(tmp_path: Path) -> None:
    run(compose_small(tmp_path, *WORDS, "trainer.max_steps=9", "~logger"))  # of epochs of 5 batches
    last = tmp_path / "checkpoints" / "last.ckpt"
    words = ["trainer.max_steps=-1", "trainer.limit_train_batches=4"]
    with pytest.raises(InputError, match=r"4 batches of an epoch are done, and an epoch has now 4 of them"):
        run(resume_small(last, tmp_path, *words))
    assert read(last)["global_step"] == 9


@pytest.mark.parametrize("gate", [slow("gate=remoe"), "gate=topk gate.bias_rate=0.01"])
def test_stopped_in_float64(gate: str, tmp_path: Path) -> None:
    """With gates whose penalty or bias adapts after each step."""
    words = [*WORDS, "trainer.precision=64-true", "trainer.max_epochs=2", *gate.split(), "network.static_gate=false"]
    run(compose_small(tmp_path / "whole", *words))
    interrupted(tmp_path / "parts", 6, *words)
    go_on(tmp_path / "parts")
    assert_same(tmp_path / "parts", tmp_path / "whole")


TASKS = [  # matrices drawn in every step, steps of two tasks in random order, dropout
    *("data=four_mnists", "network=routed_mnists", "gate=gumbel_matrix", "schedule=matrix_temperature"),
    *("data.tasks_per_step=2", "data.task_order=temperature", "trainer.max_epochs=2", "logger=csv"),
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
    interrupted(tmp_path, step, *TASKS, f"paths.data_dir={tiny_data}")
    go_on(tmp_path, f"paths.data_dir={tiny_data}")
    assert_same(tmp_path, whole_of_tasks)


def test_a_finished_run_keeps_the_numbers_of_its_training(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    before = read_json(tmp_path / "run" / "results.json")
    run(resume_small(tmp_path / "run" / "checkpoints" / "last.ckpt", tmp_path / "run"))
    after = read_json(tmp_path / "run" / "results.json")
    assert before["seconds_per_epoch"] > 0
    for name in ("seconds_per_epoch", "numbers", "epochs"):
        assert after[name] == before[name], name


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
    monkeypatch.setattr(LastCheckpoint, "_is_due", lambda self, trainer: ends_epoch(trainer))
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
    words += ["data.rows=[600,200,200]", "data.num_groups=1", "data.tasks_per_group=3", f"hydra.run.dir={folder}"]
    for number, name in enumerate(moments):
        running = Forked([*words, "logger.csv.flush_logs_every_n_steps=1"], tmp_path / f"output_{number}", cwd=ROOT)
        running.wait_for(folder / name, after=time.time_ns() if number else 0)
        running.signal(signal.SIGKILL)
        assert running.wait().status == -signal.SIGKILL
        assert not list(folder.glob("checkpoints/*.ckpt"))
    outcome = Forked(words, tmp_path / "output", cwd=ROOT).wait()
    assert outcome.status == 0, outcome.output
    assert_same(folder, tmp_path / "whole")


def test_steps_and_minutes(tmp_path: Path) -> None:
    Saves.seen = []
    run(watched(compose_small(tmp_path, "trainer.max_epochs=1", "callbacks.last.every_n_steps=2"), Saves))
    assert sorted(set(Saves.seen)) == [2, 4, 5]
    with pytest.raises(InputError, match=r"callbacks.last.every_n_minutes=0"):
        run(compose_small(tmp_path / "b", "callbacks.last.every_n_minutes=0"))


class Saves(Callback):
    seen: list[int]

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
    cfg = watched(compose_small(tmp_path, "trainer.max_epochs=3"), Poison, step=7, what=what)
    kind = "experts" if "experts" in what else "tasks"
    with pytest.raises(InputError, match=r"step \d+: .*not finite|is nan|is inf") as error:
        run(cfg)
    assert f"{what} ({kind} 1)" in str(error.value)
    last = read(tmp_path / "checkpoints" / "last.ckpt")
    assert last["epoch"] == 0
    assert all(torch.isfinite(v).all() for v in last["state_dict"].values() if isinstance(v, torch.Tensor))


SPARSE = ["trainer.gradient_clip_val=0.1", "callbacks.ema.decay=0.9", "lr_schedule=one_cycle", "trainer.max_epochs=2"]


@pytest.mark.parametrize("name", ["rowwise_adagrad", slow("sparse_adam")])
def test_killed_with_sparse_tables(name: str, tmp_path: Path, tiny_data: Path) -> None:
    words = [*NARROW, *SPARSE, f"embedding_optimizer={name}", "data=movielens", f"paths.data_dir={tiny_data}"]
    words += ["trainer.accumulate_grad_batches=2", "data.batch_size=20", "callbacks.last.every_n_steps=2", "logger=csv"]
    run(compose_small(tmp_path / "whole", *words))
    interrupted(tmp_path / "parts", 5, *words, how="kill")
    go_on(tmp_path / "parts", f"paths.data_dir={tiny_data}")
    assert_same(tmp_path / "parts", tmp_path / "whole", logged=False)


# Epochs of 3 steps with a validation after the second; learning rates at which losses rise again
EVERYWHERE = ["data.batch_size=200", "trainer.val_check_interval=2", "recipe.dropout=0.3", "recipe.num_experts=4"]
EVERYWHERE += ["recipe.head_units=[8]", "recipe.expert_units=[8]", "trainer.max_epochs=3"]
STATEFUL = {
    "early": ["optimizer.lr=0.3", "callbacks.early_stopping.patience=1", "lr_schedule=plateau"],
    "average": ["callbacks.ema.decay=0.9", "callbacks.conflict.every_n_steps=2", "weighting=gradnorm"],
    "permuted": ["permutation=sinkhorn", "recipe.permutation.epochs=1.4", "permutation.noise=0.1", "weighting=dwa"],
    "remoe": ["gate=remoe", "network.static_gate=false", "optimizer=adagrad", "weighting=uncertainty"],
    "biased": ["gate=topk", "gate.bias_rate=0.01", "network.static_gate=false", "optimizer=sgd", "weighting=nash_mtl"],
    "ensemble": ["ensemble=2", "gate=topk", "weighting=pcgrad", "callbacks.last.every_n_minutes=1e-6"],
    "annealed": ["gate=softmax_selector", "schedule=temperature", "lr_schedule=one_cycle", "optimizer=adamw"],
    "famo": ["weighting=famo", "network=stem"],
    "representation": ["weighting=gradvac", "weighting.grad_wrt=representation", "network=adatt"],
}


@pytest.mark.slow
def test_tasks_with_separate_rows_resumed_at_every_step(tmp_path: Path, tiny_data: Path) -> None:
    words = [word for word in TASKS if not word.startswith(("logger", "trainer.log_every"))]
    local = (f"paths.data_dir={tiny_data}",)
    found = resumed_everywhere(tmp_path, *words, *local, local=local)
    assert len(found) == 27
    assert found == {step: [] for step in found}


@pytest.mark.parametrize("name", [name if name == "early" else slow(name) for name in STATEFUL])
def test_resumed_at_every_step(name: str, tmp_path: Path) -> None:
    found = resumed_everywhere(tmp_path, *EVERYWHERE, *STATEFUL[name])
    assert len(found) >= 5
    assert found == {step: [] for step in found}
