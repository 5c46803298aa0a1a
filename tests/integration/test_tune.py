"""Real trials: a run that reports and is pruned, every study's file, and workers that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import hydra
import optuna
import pytest

from mtl.cli import tune
from mtl.files.run_files import read_json
from mtl.jobs.job import Job, JobResult, Prune
from mtl.pipeline.run import run
from mtl.python.fit import own_hydra
from mtl.runs.caller import Caller
from mtl.runs.trial import FITTED, TrialEnd
from mtl.tune.definition import read
from mtl.tune.space import distributions, write_overrides
from mtl.tune.trials import read_study
from tests.conftest import ROOT
from tests.integration.helpers import accepted, compose_small
from tests.run_folders import write_run

STUDIES = sorted((ROOT / "conf" / "study").glob("*.yaml"))
SMALL = [
    "data.rows=[400,80,80]",
    "data.num_groups=1",
    "data.tasks_per_group=3",
    "data.batch_size=20",
    "trainer.accelerator=cpu",
]
SMALL += ["callbacks.routing.figures_every_n_epochs=null", "trainer.max_epochs=5"]


@pytest.mark.parametrize("monitor", ["val/loss", "train/loss"])
def test_a_pruned_run_stops_and_is_tested(monitor: str, tmp_path: Path) -> None:
    (ours, theirs), said = Pipe(), list[Any]()

    def worker() -> None:
        while (message := ours.recv()) != FITTED:
            said.append(message)
            ours.send(message[0] == 1)

    thread = threading.Thread(target=worker)
    thread.start()
    caller = Caller(trial=TrialEnd(theirs))
    run(compose_small(tmp_path, "trainer.max_epochs=4", f"monitor={monitor}"), caller=caller)
    thread.join()
    ours.close()
    results = read_json(tmp_path / "results.json")
    assert [epoch for epoch, _ in said] == [0, 1]
    assert min(value for _, value in said) == results["best"]
    assert results["epochs"] == 2
    assert not (tmp_path / "predictions.parquet").exists()  # a study would have as many as trials


@pytest.mark.parametrize("gates", ["last", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_study_has_trials_that_train_accepts(path: Path, gates: str) -> None:
    """Compose a trial of each gate, with the first and the last value of each option; or of the last gate alone."""
    text = path.read_text()
    assert text.startswith("# @package _global_\n# ")
    assert f"Example: mtl tune study={path.stem}" in text.splitlines()[1]
    with own_hydra():
        found = read(hydra.compose("tune", [f"study={path.stem}"]), path.stem, [], [])
    assert all(each.space for each in found)
    for each in found if gates == "all" else found[-1:]:
        for first in (True, False) if gates == "all" else (False,):
            values = {key: end(d, first) for key, d in distributions(each.space).items()}
            assert accepted([*each.overrides, *write_overrides(values)]).monitor in ("val/loss", "val/average")


def end(distribution: Any, first: bool) -> Any:
    """Return the first or the last value of a distribution."""
    if hasattr(distribution, "choices"):
        return distribution.choices[0 if first else -1]
    return distribution.low if first else distribution.high


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "mtl", "tune", "study=synthetic_moe", "gate=topk", "name=small", *SMALL, *options]


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*options),
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def children(number: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{number}/task/{number}/children").read_text().split()]


@pytest.mark.slow
def test_a_killed_trial_is_run_again_and_the_best_is_trained_again_to_the_same_value(tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "studies" / "small"
    one = start(tmp_path, "n_trials=4")
    deadline = time.monotonic() + 300
    while not list(folder.glob("topk/trial_*/checkpoints/last.ckpt")):
        assert one.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    two = start(tmp_path, "n_trials=4")
    [run_of_one] = [run for server in children(one.pid) for run in children(server)]
    os.kill(one.pid, signal.SIGKILL)
    os.kill(run_of_one, signal.SIGKILL)
    one.communicate()
    output, _ = two.communicate(timeout=900)
    assert two.returncode == 0, output
    assert " again: " in output
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder}/study.db")
    study = optuna.load_study(study_name="small/topk", storage=storage)
    trials, best = study.trials, study.best_trial
    storage.engine.dispose()
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 4
    starts = [read_json(folder / "topk" / f"trial_{trial.number:05d}" / "job.json")["starts"] for trial in trials]
    assert sorted(starts) == [1, 1, 1, 2]
    again = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *best.user_attrs["command"], f"hydra.run.dir={tmp_path}/again"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert again.returncode == 0, again.stderr
    assert read_json(tmp_path / "again" / "results.json")["best"] == best.value
    killed = trials[starts.index(2)]
    subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *killed.user_attrs["command"], f"hydra.run.dir={tmp_path}/whole"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    assert read_json(tmp_path / "whole" / "results.json")["best"] == killed.value


def test_a_study_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    text = "# @package _global_\nfixed: [data=synthetic_moe]\nspace:\n  gate.{}: [1, 2]\n"
    for name, option in (("mine", "k"), ("wrong", "kk")):
        (tmp_path / "study" / f"{name}.yaml").write_text(text.format(option))
    given = [f"hydra.searchpath=[file://{tmp_path}]", "gate=topk", "show=best", f"paths.output_dir={tmp_path}"]
    for name, message in (
        ("mine", ".*studies/mine: nothing has been run yet"),
        ("wrong", r"gate\.kk=.: no such option; did you mean gate\.k\?"),
    ):
        with pytest.raises(SystemExit, match=f"^error: {message}"):
            tune.main([f"study={name}", *given])


def test_the_defaults_are_a_run_beside_the_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has none of the options that are searched, is done once, and counts as no trial."""
    done: dict[str, list[str]] = {}

    def do(job: Job, prune: Prune) -> JobResult:
        done[job.name] = [override.partition("=")[0] for override in job.overrides]
        write_run(job.folder, job.overrides, {"loss": 1.0})
        return JobResult(1.0)

    monkeypatch.setattr("mtl.jobs.job.do", do)
    given = ["study=synthetic_moe", "gate=topk", "n_trials=1", "try_defaults=true", f"paths.output_dir={tmp_path}"]
    for _ in range(2):
        tune.main(given)
        assert list(done) == ["synthetic_moe/topk/defaults trial 0", "synthetic_moe/topk trial 0"]
    assert "with the defaults: 0.4000, better than each trial" in capsys.readouterr().out
    of_defaults, of_trial = done.values()
    assert {"gate", "seed"} <= {*of_defaults} < {*of_trial}
    assert len(of_trial) > len(of_defaults)
    trials = read_study("synthetic_moe", None, tmp_path / "studies" / "synthetic_moe")
    assert (len(trials.runs.table), [*trials.defaults]) == (1, ["topk"])


def test_no_connection_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtl.jobs.job.do", lambda job, prune: JobResult(1.0))
    given = ["study=synthetic_moe", "gate=topk", f"paths.output_dir={tmp_path}"]
    for more in ("n_trials=1", "show=best"):
        tune.main([*given, more])
        files = [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]
        assert not [file for file in files if "study.db" in file]


def test_tune_answers_mistakes_with_one_message() -> None:
    for given, message in (
        (["study=synthetic_moe", "show=worst"], "show=worst: must be best or the number of a trial"),
        (["study=synthetic_moe", "show=best", "name=none"], ".*studies/none: nothing has been run yet"),
        (["gate=topk"], "give a study, as in study=comet_movielens; there are "),
    ):
        with pytest.raises(SystemExit, match=f"^error: {message}"):
            tune.main(given)
