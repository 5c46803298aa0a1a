"""Two processes with half the batch each are one process with the whole batch."""

from __future__ import annotations

import csv
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import torch.distributed as dist
from polars.testing import assert_frame_equal
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from mtl.checkpoints.files import read
from mtl.cli import train
from mtl.config import resolvers
from mtl.distributed import destroy_process_group, warn_if_waiting
from mtl.pipeline.peers import lost_peers_reported
from mtl.runs import signals
from mtl.runs.signals import StopSignals
from mtl.training.measurements import Measurements
from tests.conftest import ROOT
from tests.integration.helpers import NARROW
from tests.programs import Forked, free_port, ranks
from tests.stopping import course
from tests.unit.test_metric_values import LABELS, check_values, evaluation_of

BASE = ["trainer.precision=64-true", "trainer.log_every_n_steps=1", "logger=csv", "callbacks.progress=null", "seed=3"]
BASE += ["callbacks.routing.figures=false"]
TWO = ["trainer=ddp_cpu", "trainer.devices=2"]


def fork(folder: Path, *words: str, processes: int = 1) -> Forked:
    """Start a run in a forked process, or in several as torchrun starts them; this saves their imports."""
    several = ["trainer=ddp_cpu", f"trainer.devices={processes}"] if processes > 1 else []
    output = folder.parent / f"{folder.name}_output"
    return Forked([*several, *words, f"hydra.run.dir={folder}"], output, processes, ROOT)


def ended(*runs: Forked) -> None:
    for run in runs:
        outcome = run.wait()
        assert outcome.status == 0, outcome.output


def result(folder: Path) -> dict[str, float]:
    """Return the metrics of the test, also those of the models beside the network."""
    measured = Measurements.from_plain(json.loads((folder / "results.json").read_text())["numbers"])
    return {str(key): value for key, (value, sem) in measured.items() if key.split == "test" and sem is None}


def errors(folder: Path) -> dict[str, float]:
    """Return the standard errors of the network's leads over the other models."""
    measured = Measurements.from_plain(json.loads((folder / "results.json").read_text())["numbers"])
    return {str(key): sem for key, (_, sem) in measured.items() if sem is not None}


def weights(folder: Path) -> dict[str, Any]:
    return read(folder / "checkpoints" / "last.ckpt")["state_dict"]


def assert_close(found: Path, expected: Path, steps: int) -> None:
    """Compare losses of at least ``steps`` steps, weights, results and predictions of two runs."""
    assert len(course(expected)) >= steps
    assert course(found) == pytest.approx(course(expected), abs=1e-6)
    theirs = weights(found)
    for name, value in weights(expected).items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(theirs[name], value, rtol=0, atol=1e-6)
    # AdaTT's weights may be negative, which leaves their entropy undefined
    assert result(found) == pytest.approx(result(expected), abs=1e-6, nan_ok=True)
    assert errors(found) == pytest.approx(errors(expected), rel=1e-3)
    assert conflicts(found) == pytest.approx(conflicts(expected), abs=1e-6, nan_ok=True)
    files = [pl.read_parquet(folder / "predictions.parquet") for folder in (found, expected)]
    assert_frame_equal(*files, check_exact=False, abs_tol=1e-6)
    for entry in AFTER:
        assert after_training(found, entry) == pytest.approx(after_training(expected, entry), abs=1e-6)


AFTER = ("predicted", "calibration")  # entries of a checkpoint that the validation rows of all processes teach


def after_training(folder: Path, entry: str) -> dict[str, Any]:
    """Return the numbers of an entry of the tested checkpoint by their place in it."""
    flat: dict[str, Any] = {}

    def flatten(place: str, value: Any) -> None:
        if isinstance(value, dict | list | tuple):
            for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                flatten(f"{place}/{key}", part)
        elif value is not None:
            flat[place] = value

    flatten(entry, read(folder / "checkpoints" / "best.ckpt").get(entry, {}))
    return flat


def conflicts(folder: Path) -> dict[tuple[str, ...], float]:
    """Return what was measured of the gradients' conflict, if it was."""
    file = folder / "conflict.csv"
    rows = csv.reader(file.read_text().splitlines()[1:] if file.is_file() else ())
    return {tuple(names): float(value or "nan") for *names, value in rows}


def one_equals_two(folder: Path, words: list[str], batch: int, steps: int) -> tuple[Path, Path]:
    """Run ``words`` in one process and in two with half of each batch, and compare them; return their folders."""
    one, two = folder / "one", folder / "two"
    ended(
        fork(one, *words, f"data.batch_size={batch}"), fork(two, *words, f"data.batch_size={batch // 2}", processes=2)
    )
    assert_close(two, one, steps)
    return one, two


def test_two_processes_equal_one(tmp_path: Path) -> None:
    """Over 15 steps of float64 and across the hardening of a permutation; evaluation of 1001 rows exactly."""
    words = [*BASE, "data.rows=[640,1001,1001]", "data.eval_batch_size=300", "trainer.max_epochs=3"]
    words += ["data.num_groups=1", "data.tasks_per_group=3"]
    words += ["permutation=sinkhorn", "recipe.permutation.epochs=1.3", "gate=topk", "gate.noisy=false"]
    words += ["gate.importance_weight=0.1", "gate.balance_weight=0.1", "gate.z_weight=0.01"]
    words += ["lr_schedule=plateau", "callbacks.lr_schedule.mode=max", "callbacks.lr_schedule.patience=1"]
    words += ["callbacks.ema.decay=0.9"]
    one, two = one_equals_two(tmp_path, words, 128, 15)
    assert bool(weights(two)["network.mixture.gate.permutation.hardened"])
    assert result(two) == pytest.approx(result(one), abs=1e-9)
    best = one / "checkpoints" / "best.ckpt"  # the weights of one process, evaluated by two
    ended(fork(tmp_path / "again", f"evaluate={best}", BASE[0], processes=2))
    assert result(tmp_path / "again") == pytest.approx(result(one), rel=1e-9)


MOVIELENS = ["data=movielens", *NARROW, "recipe.dropout=0", "trainer.max_epochs=2"]
MOVIELENS += ["data.metrics={watch: [auprc, logloss, ndcg@10, hit_rate@1, mrr], rating: [r2, rmse]}"]
SPARSE = ["trainer.gradient_clip_val=0.1", "callbacks.ema.decay=0.9", "lr_schedule=one_cycle"]
SPARSE += ["embedding_optimizer=rowwise_adagrad", "gate=topk", "gate.bias_rate=0.01", "gate.columns=[item]"]
SPARSE += ["callbacks.conflict.every_n_steps=2"]  # only the first of two processes has validation rows
ROUTED = ["data=four_mnists", "network=routed_mnists", "gate=dselect_k", "weighting=gradnorm", "network.dropout=0"]
ROUTED += ["data.rows=[60,20,20]", "trainer.max_epochs=2", "data.tasks_per_step=2"]
PAIRS = ["data=omniglot", "data.alphabets=[Gujarati,Sylheti,Tibetan]", "data.side=56", "recipe.num_experts=2"]
PAIRS += ["callbacks.conflict.every_n_steps=2"]  # each of two processes has validation rows of other tasks
PAIRS += ["recipe.dropout=0", "data.tasks_per_step=2", "gate=fixed", "weighting=uncertainty", "trainer.max_epochs=2"]


@pytest.mark.parametrize(
    ("words", "batch"),
    [
        pytest.param([*MOVIELENS, "weighting=pcgrad", "network=ple", "gate=remoe"], 40, id="pcgrad"),
        pytest.param([*MOVIELENS, *SPARSE, "loss_reduction=labels"], 40, id="sparse tables"),
        pytest.param(ROUTED, 10, id="routed"),
        pytest.param(PAIRS, 10, id="super-batches"),
    ],
)
def test_labels_of_all_processes_count(words: list[str], batch: int, tmp_path: Path, tiny_data: Path) -> None:
    """Missing labels, metrics of groups, states of gates and weightings, tasks with separate rows."""
    _, two = one_equals_two(tmp_path, [*BASE, *words, f"paths.data_dir={tiny_data}"], batch, 6)
    assert bool(conflicts(two)) == any("conflict" in word for word in words)


CHAIN = ["data.tasks.click={kind: binary}", "data.tasks.cart={kind: binary, after: click}"]
LOSSES = ["data.tasks.click={kind: binary, loss: focal}", "data.tasks.minutes={kind: regression, loss: quantile}"]
LOSSES += [
    f"data.tasks.{loss}={{column: minutes, kind: regression, loss: {loss}}}" for loss in ("huber", "mae", "poisson")
]
LOSSES += ["data.tasks.log={column: minutes, kind: regression, transform: log}", "data.tasks.rare={kind: binary}"]
DEEP = ["network=ple", "network.num_levels=3", "callbacks.conflict.every_n_steps=2"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize(
    "words",
    [
        pytest.param([*CHAIN, "heads=aitm"], id="chain"),
        pytest.param([*CHAIN, "heads=aitm", "weighting=pcgrad"], id="chain, pcgrad"),
        pytest.param([*CHAIN, *DEEP, "weighting=upgrad"], id="three levels, upgrad, conflict"),
        pytest.param([*LOSSES, "callbacks.conflict.every_n_steps=2"], id="losses, conflict"),
        pytest.param([*LOSSES, "gate=remoe"], id="remoe"),
        pytest.param([*LOSSES, "gate=topk", "gate.bias_rate=0.01"], id="bias"),
        pytest.param([*LOSSES, "weighting=mgda"], id="mgda"),
        pytest.param([*LOSSES, "weighting=upgrad", "weighting.grad_wrt=representation"], id="representation"),
        pytest.param([*LOSSES, "weighting=famo", "network=adatt", "network.num_shared_experts=1"], id="famo, adatt"),
        pytest.param([*LOSSES, "network=stem", "gate=topk", "recipe.num_experts=3"], id="stem"),
        pytest.param([*LOSSES, "ensemble=3", "recipe.number_dim=2", "data.normalize_losses=true"], id="ensemble"),
    ],
)
def test_several_processes_equal_one(words: list[str], processes: int, tmp_path: Path) -> None:
    """Two and four processes with their parts of each batch, in float64, up to rounding.

    The last training batch has 6 of 40 rows, which four processes cannot divide evenly; there are 3 validation and 10
    test rows; the task "rare" has one labelled row in six.
    """
    draw = np.random.default_rng(0)
    rows = {"x": draw.normal(size=219), "city": draw.choice(["a", "b", "c"], 219), "click": draw.integers(2, size=219)}
    frame = pl.DataFrame(rows).with_columns(
        cart=pl.when(pl.col("click") == 1).then((pl.col("x") > 0).cast(int)).otherwise(0),
        minutes=pl.col("x").abs() + 0.5 + pl.col("click"),
        rare=pl.when(pl.int_range(219) % 6 == 0).then((pl.col("x") > 0).cast(int)),
        part=pl.Series(["train"] * 206 + ["val"] * 3 + ["test"] * 10),
    )
    used = [name for name in ("click", "cart", "minutes", "rare") if any(f"{name}" in word for word in words)]
    frame.select("x", "city", "part", *used).write_parquet(tmp_path / "t.parquet")
    words = [
        *BASE,
        *NARROW,
        "data=table",
        f"data.path={tmp_path}/t.parquet",
        "data.split.by=column",
        "data.split.column=part",
        *words,
    ]
    words += ["recipe.dropout=0", "trainer.max_epochs=2", "trainer.log_every_n_steps=1"]
    one, several = tmp_path / "one", tmp_path / "several"
    ended(fork(one, *words, "data.batch_size=40"))
    ended(fork(several, *words, f"data.batch_size={40 // processes}", processes=processes))
    assert_close(several, one, 12)
    expected = weights(one)
    pairs = [(expected[n], value) for n, value in weights(several).items() if isinstance(value, torch.Tensor)]
    largest = max(float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel())
    print(f"largest difference of a weight: {largest:.1e}")
    assert largest < 1e-9


def evaluate_half() -> None:
    """Evaluate half of the rows in this process, and write the values of all rows; the second has an empty batch."""
    dist.init_process_group("gloo")
    halves = [[[*range(5)], [6], [7, 8]], [[5], [9], []]]
    found = {labels: evaluation_of(labels, halves[dist.get_rank()]).compute() for labels in LABELS}
    Path(f"{sys.argv[1]}_{dist.get_rank()}").write_text(json.dumps(found))
    destroy_process_group()


def test_two_processes_report_the_metrics_of_all_rows(tmp_path: Path) -> None:
    outcome = Forked([str(tmp_path / "found")], tmp_path / "out", processes=2, main=evaluate_half).wait()
    assert outcome.status == 0, outcome.output
    first, second = ((tmp_path / f"found_{rank}").read_text() for rank in range(2))
    assert first == second
    for labels, found in json.loads(first).items():
        check_values(found, labels)


def test_processes_that_differ_stop_at_once(tmp_path: Path) -> None:
    port, runs = free_port(), []
    for rank, more in enumerate([[], ["gate.gamma=0.5"]]):
        words = [*TWO, "seed=1", *more, f"hydra.run.dir={tmp_path / str(rank)}"]
        runs.append(Forked(words, tmp_path / f"output_{rank}", cwd=ROOT, env=ranks(rank, 2, port)))
    first, second = [run.wait() for run in runs]
    assert (first.status, second.status) == (1, 1)
    assert "process 1 has a different configuration from process 0: gate.gamma is 0.5, not 5.0" in first.output.replace(
        "\n", " "
    )


def wait_for_each_other() -> None:
    """Wait for what no process sends."""
    signals.STOP_TIMEOUT_S = 0.5
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(sys.argv[2])))
    stop_signals = StopSignals()
    with stop_signals.listening(), stop_signals.watching(), lost_peers_reported("resume", "x"):
        stop_signals.training_starts("x")
        Path(f"{sys.argv[1]}_{dist.get_rank()}").touch()
        dist.recv(torch.zeros(1), 1 - dist.get_rank())


@pytest.mark.parametrize("ends", ["signal", "timeout"])
def test_processes_that_wait_for_each_other_end(ends: str, tmp_path: Path) -> None:
    words = [str(tmp_path / "begun"), "200" if ends == "signal" else "1"]
    running = Forked(words, tmp_path / "out", processes=2, main=wait_for_each_other)
    for rank in range(2):
        running.wait_for(tmp_path / f"begun_{rank}")
    if ends == "signal":
        running.signal(signal.SIGTERM)
    outcome = running.wait()
    if ends == "signal":
        assert outcome.status == 128 + signal.SIGTERM
        assert "stopped by SIGTERM after 0 s of waiting for other processes, without saving; resume" in outcome.output
    else:
        assert "InputError: another process of this run has not answered in time; resume with: x" in outcome.output


def test_a_wait_for_other_processes_is_announced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for silent, met in ((True, False), (False, True), (False, False)):
        monkeypatch.setattr(dist, "is_initialized", lambda met=met: met)
        with warn_if_waiting(range(2, 4), 8, silent, seconds=0.01):
            time.sleep(0.1)
    line = (
        "still waiting for some of the 8 processes of this run: this machine has ranks 2 to 3; start the same command"
    )
    assert capsys.readouterr().err.startswith(line)


def test_a_sweep_takes_one_device_per_job(tmp_path: Path) -> None:
    outcome = Forked(["-m", "seed=1,2", *TWO, f"paths.output_dir={tmp_path}"], tmp_path / "output", cwd=ROOT).wait()
    assert outcome.status == 1
    assert "trainer.devices=2 makes 2 processes: -m would run" in outcome.output


RESUMED = [*BASE[1:], "data.rows=[960,200,200]", "data.batch_size=32", "permutation=sinkhorn", "recipe.dropout=0.3"]
RESUMED += [
    "data.num_groups=1",
    "data.tasks_per_group=3",
    "recipe.head_units=[8]",
    "trainer.max_epochs=3",
    "callbacks.last.every_n_steps=5",
]
RESUMED += ["lr_schedule=linear", "callbacks.lr_schedule.warmup=0.2"]


def test_resuming_keeps_the_batches_with_another_number_of_processes(tmp_path: Path) -> None:
    """Stopped within the second epoch by two processes, and finished by one with twice the rows: the same run."""
    words = [
        *BASE,
        "data.rows=[330,100,100]",
        "recipe.dropout=0",
        "trainer.max_epochs=3",
        "data.num_groups=1",
        "data.tasks_per_group=3",
    ]
    one, two = tmp_path / "one", tmp_path / "two"
    last = two / "checkpoints" / "last.ckpt"
    runs = (
        fork(one, *words, "data.batch_size=32"),
        fork(two, *words, "data.batch_size=16", "trainer.max_steps=15", processes=2),
    )
    ended(*runs)
    go_on = [f"ckpt={last}", "trainer=default", "trainer.max_steps=-1"]
    refused = Forked([*go_on, f"hydra.run.dir={two}"], tmp_path / "refused", cwd=ROOT).wait()
    assert "data.batch_size=16 in 1 process makes batches of 16 rows" in refused.output
    assert "batches of 32 (16 in each of 2): to go on with these, give data.batch_size=32" in refused.output
    assert read(last)["global_step"] == 15
    ended(fork(two, *go_on, "data.batch_size=32"))
    assert course(two) == pytest.approx(course(one), abs=1e-6)
    assert result(two) == pytest.approx(result(one), abs=1e-6)


def same(parts: Path, whole: Path) -> None:
    expected = weights(whole)
    for name, value in weights(parts).items():
        assert torch.equal(value, expected[name]) if isinstance(value, torch.Tensor) else value == expected[name], name
    assert result(parts) == result(whole)


def elastic() -> None:
    """Be an agent of torchrun, with one process of the program on this node of two.

    The program runs in a fork of the agent; the command torchrun would import everything anew.
    """
    endpoint = os.environ.pop("ENDPOINT")
    config = LaunchConfig(2, 2, 1, run_id="mtl", rdzv_backend="c10d", rdzv_endpoint=endpoint, start_method="fork")
    elastic_launch(config, as_torchrun)()


def as_torchrun() -> None:
    resolvers.RANK = os.environ["RANK"]
    train.main()


def test_stopped_lost_and_resumed_on_two_nodes(tmp_path: Path) -> None:
    """Two processes are stopped, go on, lose one of them and go on as two nodes: they end as if nothing had happened.

    One of the two gets the signal, and both stop. Where they go on, Lightning starts the second. When it is killed, the
    other says so. Two agents of torchrun, as on two machines, do the rest.
    """
    whole, folder = fork(tmp_path / "whole", *RESUMED, processes=2), tmp_path / "run"
    ended(whole)
    running, last = fork(folder, *RESUMED, processes=2), folder / "checkpoints" / "last.ckpt"
    running.wait_for(last)
    running.signal(signal.SIGTERM)
    outcome = running.wait()
    assert outcome.status == 128 + signal.SIGTERM
    assert "stopped by SIGTERM after step" in outcome.output
    stopped_at, saved_at = read(last)["global_step"], last.stat().st_mtime_ns

    words = [f"ckpt={last}", "callbacks.progress=null"]
    running = Forked(words, tmp_path / "output", cwd=ROOT)
    running.wait_for(last, after=saved_at)
    [started] = running.started()
    os.kill(started, signal.SIGKILL)
    outcome = running.wait()
    if outcome.status != -signal.SIGKILL:  # on a busy machine, Lightning may notice it first, and kills the other one
        assert outcome.status == 1
        advice = f"another process of this run has ended; resume with: python train.py ckpt={last}"
        assert outcome.output.count("error: ") == outcome.output.count(advice) == 1
    assert stopped_at < read(last)["global_step"] < 90

    words += ["trainer.devices=1", "trainer.num_nodes=2"]
    env = {"ENDPOINT": f"127.0.0.1:{free_port()}"}
    ended(*[Forked(words, tmp_path / agent, cwd=ROOT, env=env, main=elastic) for agent in ("one", "two")])
    same(folder, tmp_path / "whole")
