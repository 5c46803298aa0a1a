"""``mtl share``: from the command line and from Python, killed and resumed, with two workers."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import polars as pl
import pytest

import mtl
from mtl.analysis.conflicts import as_table
from mtl.checks import InputError
from mtl.cli import share
from mtl.files.run_files import read_json
from mtl.files.writing import write_json
from mtl.jobs.job import Job, JobResult, Prune
from mtl.pipeline.run import run
from mtl.python.fit import own_hydra
from mtl.report.runs import read_runs
from mtl.sharing import command, page
from tests.conftest import ROOT
from tests.integration.helpers import accepted
from tests.run_folders import write_run

SMALL = ["data=synthetic_moe", "data.num_groups=1", "data.tasks_per_group=3", "data.rows=[60,40,40]", "logger=none"]
SMALL += ["recipe.batch_size=20", "trainer.max_epochs=1"]
TASKS = ["task_000", "task_001", "task_002"]
OWN = ["seeds=2", "gates=[]", "every_n_steps=2"]


def in_process(job: Job, prune: Prune) -> JobResult | None:
    cfg = accepted(list(job.overrides))
    cfg.paths.run_dir = str(job.folder)
    run(cfg)
    choices = {name: str(value) for name, value in cfg.choices.items()}
    write_json(job.folder / "command.json", {"overrides": [], "choices": choices, "seed": cfg.seed})
    return job.result()


def at_once(job: Job, prune: Prune) -> JobResult | None:
    """Write the results of a run that was not trained, with made-up losses."""
    label, seed = job.folder.parent.name, int(job.overrides[-1].removeprefix("seed="))
    draw = random.Random(f"{label} {seed}")
    losses = {f"{task}/mse": 1 + draw.random() for task in TASKS}
    choices = {"network": "single_task" if label == "alone" else "mmoe", "data": "synthetic_moe"}
    validation = {f"{task}/mse": 1 + draw.random() for task in TASKS}
    test, main = {"loss": 1.0, **losses}, dict.fromkeys(TASKS, "mse")
    write_run(job.folder, [], test, main, seed, choices=choices, numbers={"val": {"network": validation}})
    if label == "together":
        rows = [(2, "affinity", "all", task, other, draw.random()) for task in TASKS for other in TASKS]
        as_table(rows).write_csv(job.folder / "conflict.csv")
    return job.result()


def answered(tmp_path: Path, own: list[str]) -> dict[str, Any]:
    with own_hydra():
        given = [*SMALL, f"paths.output_dir={tmp_path}"]
        words = [*OWN, *own]
        return page.write(command.share(hydra.compose("share", words), given, at_once), [*words, *given])


def test_answers_page_and_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answered(tmp_path, ["gates=[softmax]"])
    folder = tmp_path / "share" / "synthetic_moe"
    assert list(found["answers"]) == TASKS
    assert read_json(folder / "share.json")["answers"] == found["answers"]
    assert sorted(task for group in found["groups"] for task in group) == TASKS
    settings = [each["setting"] for each in found["gains"]]
    assert settings.count("softmax") == 3  # each task has one setting of shared networks and one gate
    assert len(settings) == 6
    settings = [each["setting"] for each in found["validation_gains"]]
    assert {"together", "softmax"} <= set(settings)
    assert {gain["difference"]["runs"] for gain in found["gains"]} == {2}
    assert len(found["delta_m"]["together"]) == 2
    text = (folder / "report.html").read_text()
    assert all(word in text for word in ("Answers", "TAG", "Recommended", "95 % interval"))
    assert "Command: mtl share seeds=2" in text
    assert not found["own_splits"]
    assert "All seeds have the same split" in text
    printed = capsys.readouterr().out
    assert "Recommended: " in printed
    left = [int(runs) for runs in re.findall(r"left \((\d+) run", printed)]
    assert left[:6] == [*range(7, 1, -1)]  # also those in groups
    assert "All seeds have the same split" in printed
    again = answered(tmp_path, ["gates=[softmax]", "show=true"])
    assert again == found


BUDGETS = [  # seconds: settings, and seeds of each, if each run takes a second; groups may have a run of each seed too
    (36.5, {"alone": 9, "together": 9, "softmax": 9}, True),
    (14.5, {"alone": 3, "together": 3, "softmax": 3}, True),
    (10, {"alone": 3, "together": 3, "softmax": 3}, False),
    (8.5, {"alone": 4, "together": 4}, False),
    (0.1, {"alone": 1, "together": 1}, False),
]


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(("seconds", "seeds", "grouped"), BUDGETS)
def test_a_budget_leaves_out_groups_then_gates_then_seeds_and_answers(
    seconds: float,
    seeds: dict[str, int],
    grouped: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = Job.result
    monkeypatch.setattr(Job, "result", lambda job: (ended := result(job)) and replace(ended, seconds=1.0))
    found = answered(tmp_path, ["gates=[softmax]", f"budget={seconds / 60}", "seeds=9"])
    folder = tmp_path / "share" / "synthetic_moe"
    runs = {path.name: len(list(path.glob("*/results.json"))) for path in folder.iterdir() if path.is_dir()}
    assert {name: count for name, count in runs.items() if not name.startswith("groups")} == seeds
    assert (bool(found["groups"])) == grouped
    assert list(found["answers"]) == TASKS
    printed = " ".join(capsys.readouterr().out.split())
    assert ("all runs take about 36 seconds. With budget=1, the same command" in printed) == (seconds < 36)
    assert (" without softmax, groups;" in printed) == (seconds < 9)
    assert (" without groups;" in printed) == (seconds == 10)
    shown = answered(tmp_path, ["gates=[softmax]", "seeds=9", "show=true"])
    assert all(shown[name] == found[name] for name in ("answers", "gains", "recommended", "delta_m"))


def test_mistakes_are_one_message(tmp_path: Path) -> None:
    (tmp_path / "share" / "begun").mkdir(parents=True)
    for words, message in (
        (["data=synthetic_pairs", "seeds=1"], "seeds=1: must be"),
        (["data=synthetic_pairs", "pairs=true"], "(?<!synthetic_)pairs"),
        (["data=synthetic_pairs", "gates=[comett]"], "gate=comett|comett"),
        (["data=synthetic_pairs", "show=true"], "nothing has been run yet"),
        (["data=synthetic_pairs", "show=true", "name=begun"], "no run of alone or together has ended"),
        (["data=synthetic_moe", "data.num_groups=1", "data.tasks_per_group=1"], "data has one task, task_000"),
    ):
        with pytest.raises(SystemExit, match=message):
            share.main([*words, f"paths.output_dir={tmp_path}", f"paths.data_dir={tmp_path}"])


def test_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtl.jobs.job.do", in_process)
    x = pl.Series(range(200)) % 17
    frame = pl.DataFrame({"x": x, "é": (x > 8).cast(int), "a=b": x * 2.0, "c, d": x * 1.0})
    sizes = {"recipe.expert_units": [4], "recipe.embedding_dim": 2, "logger": "none", "blend": "none"}
    options: dict[str, Any] = {"seeds": 2, "gates": [], "every_n_steps": 1, "max_epochs": 1, "options": sizes}
    tasks = {"é": "binary", "a=b": "regression", "c, d": "regression"}
    found = mtl.share(frame, tasks, folder=tmp_path, **options)
    assert list(found["answers"]) == list(tasks)
    assert {each["task"] for each in found["validation_gains"]} == set(tasks)
    assert found["own_splits"]
    runs = read_runs([tmp_path / "share" / "table"])
    assert runs.table.select("seed", "data_seed").unique().sort("seed").rows() == [(0, 0), (1, 1)]
    assert runs.overlap == pytest.approx(1 / 8)
    assert runs.table["val/é/auroc"].is_between(0, 1).all()
    assert "Each seed splits the rows anew" in (tmp_path / "share" / "table" / "summary.md").read_text()
    assert (tmp_path / "share" / "table" / "report.html").is_file()
    with pytest.raises(InputError, match=r"table\.parquet holds other rows, .*: give another name="):
        mtl.share(frame.with_columns(x=-pl.col("x")), tasks, folder=tmp_path, **options)
    with pytest.raises(InputError, match=r"this name must be text .* without dots, slashes, \$\{"):
        mtl.share(frame, {"${x}": "binary", "a=b": "regression"}, folder=tmp_path, name="b")


@pytest.mark.slow
def test_killed_and_resumed_with_two_workers_gives_the_same_answer(tmp_path: Path) -> None:
    def start(folder: Path) -> subprocess.Popen[str]:
        words = [*SMALL, *OWN, f"paths.output_dir={folder}", "trainer.max_epochs=3"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        program = [sys.executable, "-m", "mtl", "share", *words]
        return subprocess.Popen(program, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)

    def answers(output: str) -> str:
        return output[output.index("task_000: ") : output.index("Recommended")]

    whole = start(tmp_path / "whole")
    expected = answers(whole.communicate()[0])
    killed = start(tmp_path / "shared")
    while not list((tmp_path / "shared").rglob("trial_00001")):
        time.sleep(0.2)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    workers = [start(tmp_path / "shared") for _ in range(2)]
    assert [answers(worker.communicate()[0]) for worker in workers] == [expected, expected]
    runs = list((tmp_path / "shared").rglob("results.json"))
    assert len(runs) == len(list((tmp_path / "whole").rglob("results.json")))
