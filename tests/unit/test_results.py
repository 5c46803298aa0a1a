"""What the program prints at the end of a run, and around the jobs of a sweep."""

from __future__ import annotations

import csv
import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from mtl.checkpoints.files import read
from mtl.cli.sweep import SweepTable
from mtl.config.compose import CONF
from mtl.files.run_files import flatten, read_json
from mtl.files.tables import Table
from mtl.pipeline.run import SOFTWARE
from mtl.pipeline.run import run as train
from mtl.runs.console import ConsoleHandler
from mtl.runs.results import commit, print_results
from mtl.runs.test_rows import count_labels, labels_by_task, measured_by_task
from mtl.training.labeled_predictions import LabeledPredictions
from mtl.training.thresholds import measure_decisions
from mtl.types import TaskSpec
from mtl.types.metrics import OF_FEW_POSITIVES
from tests.integration.helpers import compose_small, composed
from tests.run_folders import write_run

RECORD: dict[str, Any] = {
    "run_name": "comet",
    "checkpoint": "x/best.ckpt",
    "seed": 3,
    "parameters": 840574,
    "epochs": 1,
    "main_metrics": {"click": "auroc"},
    "seconds_per_epoch": 1.26,
}
TEST = {
    "loss": 0.5,
    "flops_selected": 958976.0,
    "click/auroc": None,
    "click/experts_per_sample": 2.0,
    "experts_per_sample": 2.0,
}


def with_numbers(test: dict[str, float | None], **others: dict[str, float | None]) -> dict[str, Any]:
    """Return ``RECORD`` with the numbers of a test, of the network and of ``others``."""
    training = {"network": {"flops_selected": 2876928.0}}
    return RECORD | {"numbers": {"test": {"network": test, **others}, "training": training}}


def printed(record: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    print_results(record, folder)
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines() if str(folder) not in line) <= 80
    return text


def test_results_come_first_and_routing_statistics_only_if_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(with_numbers(TEST), tmp_path, capsys).splitlines()
    assert lines[1] == "comet: test loss 0.5000 (best.ckpt)"
    assert [lines[2].split(), lines[4].split()] == [["task", "metric", "network"], ["click", "auroc", "-"]]
    assert "1 epoch of 1.3 s, each task uses 2 experts, 840,574 parameters, seed 3" in lines
    of_evaluate = with_numbers(TEST) | {"epochs": 0, "seconds_per_epoch": None}
    assert "\neach task uses 2 experts, 840,574 parameters, seed 3\n" in printed(of_evaluate, tmp_path, capsys)
    assert f"{tmp_path}/" in lines
    blended = printed(with_numbers(TEST, blend=TEST | {"loss": 0.25}), tmp_path, capsys)
    assert blended.startswith("\ncomet: test loss of the blend 0.2500 (best.ckpt)\n")
    assert not any("flops" in line for line in lines)
    shares = {f"click/expert_share_{number:02d}": 0.125 for number in range(8)} | {"experts_per_sample": 1.76}
    text = printed(with_numbers(TEST | shares), tmp_path, capsys)
    assert "each task uses 1.76 of 8 experts on average" in text.replace("\n", " ")
    mains, test = {"[/b]": "auroc"}, {"loss": 0.5, "[/b]/auroc": 0.6}
    assert "[/b]   auroc     0.6000" in printed(
        with_numbers(test) | {"run_name": "[x]", "main_metrics": mains}, tmp_path, capsys
    )
    mains |= {f"[/{number}]": "auroc" for number in range(9)}
    assert "best 0.6000 ([/b])" in printed(with_numbers(test) | {"main_metrics": mains}, tmp_path, capsys)


def test_other_models_stand_beside_the_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    test = {"loss": 1.0, "a/loss": 1.0, "a/auroc": 0.9, "a/accuracy": 0.9568, "a/ndcg@10": None}
    models = {"constant": {"a/auroc": 0.5, "a/accuracy": 0.9558}, "lightgbm": {"a/auroc": 0.91, "a/accuracy": 0.96}}
    record = with_numbers(test, **models) | {"main_metrics": {"a": "auroc"}}
    rows = [line.split() for line in printed(record, tmp_path, capsys).splitlines()]
    assert ["task", "metric", "network", "constant", "lightgbm"] in rows
    assert ["a", "auroc", "0.9000", "0.5000", "0.9100"] in rows
    assert ["accuracy", "0.9568", "0.9558", "0.9600"] in rows
    assert ["ndcg@10", "-", "-", "-"] in rows
    several = {f"{task}/{name}": 0.5 for task in "abcdefgh" for name in ("auroc", "accuracy", "f1")}
    record = with_numbers({"loss": 1.0, **several}) | {"main_metrics": dict.fromkeys("abcdefgh", "auroc")}
    assert "accuracy" not in printed(record, tmp_path, capsys)  # main metrics alone fit on a screen


def test_few_positives_show_first_what_is_not_the_constant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    test = {f"a/{name}": 0.5 for name in OF_FEW_POSITIVES} | {"loss": 1.0, "a/accuracy": 0.97}
    record = with_numbers(test, constant={"a/auroc": 0.5, "a/accuracy": 0.97}) | {"main_metrics": {"a": "auroc"}}
    text = printed(record, tmp_path, capsys)
    rows = [line.split()[-3] for line in text.splitlines() if line.endswith(("0.5000", "0.9700", "-"))]
    assert rows == ["auprc", "recall@10%", "lift@10%", "auroc", "logloss"]
    assert "Not shown: the accuracy of a, which is that of a constant prediction." in text
    test["a/accuracy"] = 0.98
    assert "accuracy" in printed(
        with_numbers(test, constant={"a/accuracy": 0.97}) | {"main_metrics": {"a": "auroc"}}, tmp_path, capsys
    )
    four = {key.replace("a/", f"{task}/"): value for task in "abcd" for key, value in test.items()}
    text = printed(with_numbers(four) | {"main_metrics": dict.fromkeys("abcd", "auroc")}, tmp_path, capsys)
    assert "auprc" not in text  # the main metrics alone fit on a screen
    assert "d      auroc" in text
    main = with_numbers({"a/accuracy": 0.97}, constant={"a/accuracy": 0.97}) | {"main_metrics": {"a": "accuracy"}}
    assert "0.9700     0.9700" in printed(main, tmp_path, capsys)


def test_simulated_groups_stand_beside_the_experts_that_tasks_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = {"task_0/expert_share_00": 1.0, "task_1/expert_share_00": 0.4, "task_1/expert_share_01": 0.6}
    shares |= {"task_2/expert_share_01": 0.995, "task_2/expert_share_00": 0.005}  # 0.5 % is not counted as used
    groups = {"task_groups": {"task_0": 0, "task_1": 0, "task_2": 1}}
    record = with_numbers({"loss": 1.0, **shares}) | groups
    text = printed(record, tmp_path, capsys)
    assert "share an expert: 1 of 1 pairs of one group, 1 of 2 pairs of different groups" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "0", "1", "-"] in rows
    assert ["1", "1", "2"] in rows
    assert "share an expert" not in printed(with_numbers({"loss": 1.0}) | groups, tmp_path, capsys)  # no single mixture


def test_results_name_the_commit_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run([*command, *words], check=True, capture_output=True, text=True).stdout

    assert commit(tmp_path) is None  # where a wheel is installed
    git("init")
    assert commit(tmp_path) is None  # nothing is committed yet
    (tmp_path / "a.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    now = git("rev-parse", "HEAD").strip()
    assert commit(tmp_path) == now
    (tmp_path / "a.py").write_text("2")
    assert commit(tmp_path) == f"{now}-dirty"
    monkeypatch.setenv("PATH", os.devnull)
    assert commit(tmp_path) is None  # without Git


def multirun(folder: Path) -> Any:
    overrides = {"task": ["gate=a,b"], "hydra": ["hydra.mode=MULTIRUN"]}
    sources = [{"provider": "main", "schema": "file", "path": "/conf"}]
    sources += [{"provider": "command-line", "schema": "pkg", "path": "mine"}]
    hydra = {"mode": "MULTIRUN", "sweep": {"dir": str(folder)}, "overrides": overrides}
    return OmegaConf.create({"hydra": hydra | {"runtime": {"config_sources": sources}}})


def test_each_job_is_announced_with_what_varies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atexit.register", lambda *given: None)
    caplog.set_level("INFO", "mtl")
    config, table = multirun(tmp_path), SweepTable()
    config.hydra.overrides.task = ["gate=comet,topk", "seed=range(1,4)", "data=x", "trainer=glob(fsdp*)"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        table.on_multirun_start(config)
    table.began -= 10  # seconds for two jobs
    config.hydra.job, config.hydra.overrides.task = {"num": 2}, ["gate=topk", "seed=1", "data=x", "trainer=fsdp"]
    table.on_job_start(config)
    SweepTable().on_job_start(config)  # in the process of a launcher, which has its own words only
    every = "gate=topk seed=1 data=x trainer=fsdp"
    left = "job 3 of 12, about 50 seconds left: gate=topk seed=1 trainer=fsdp"
    assert caplog.messages == [left, f"job 3: {every}"]


def test_what_an_earlier_job_has_said_is_not_printed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, table = multirun(tmp_path), SweepTable()
    config.hydra.job = {"num": 0}
    for number in range(2):
        console = ConsoleHandler()
        monkeypatch.setattr(logging.getLogger(), "handlers", [console])
        table.on_job_start(config)
        for text, level in (("columns", logging.INFO), (f"epoch {number}", logging.INFO), ("bad", logging.ERROR)):
            console.handle(logging.makeLogRecord({"msg": text, "levelno": level}))
    assert capsys.readouterr().out.splitlines() == ["columns", "epoch 0", "bad", "epoch 1", "bad"]


def test_table_grows_with_each_job_and_is_printed_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, table = multirun(tmp_path), SweepTable()
    table.on_multirun_start(config)
    for number in range(2):
        write_run(tmp_path / str(number), [f"gate={'ab'[number]}"], {"loss": 1.0 + number})
        SweepTable().on_job_end(config, Any)  # perhaps in another process: it has nothing but the folder
        rows = list(csv.DictReader((tmp_path / "summary.csv").read_text().splitlines()))
        assert [row["test/loss"] for row in rows] == ["1.0", "2.0"][: number + 1]
    assert capsys.readouterr().out == ""
    table.on_multirun_end(config)
    assert capsys.readouterr().out.startswith(
        "\nloss against a: nothing is decided; the best of the others, b, changes it by"
    )


def test_table_is_printed_after_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra then calls nothing at the end."""
    at_exit: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
    monkeypatch.setattr("atexit.register", lambda function, *given: at_exit.append((function, given)))
    SweepTable().on_multirun_start(multirun(tmp_path))
    [(function, given)] = at_exit
    function(*given)
    assert capsys.readouterr().out == ""  # no job has begun
    write_run(tmp_path / "0", ["gate=a"], None, log="12:00:00 ERROR mtl: NaN loss\n")
    function(*given)
    printed = capsys.readouterr().out
    assert "0 failed: NaN loss" in printed
    command = f"python -m mtl train -m --config-dir pkg://mine gate=a,b hydra.sweep.dir={tmp_path}"
    assert f"finish the sweep with: {command}\n" in printed


def test_baselines_differ_in_the_network_alone() -> None:
    configs = [
        flatten(OmegaConf.to_container(composed(["data=table", f"network={name}"])))
        for name in ("mmoe", "shared_bottom", "single_task")
    ]
    for other in configs[1:]:
        changed = {key for key in configs[0].keys() | other.keys() if configs[0].get(key) != other.get(key)}
        assert {key.partition(".")[0] for key in changed} == {"network", "run_name", "choices", "overrides"}
        assert {key for key in changed if key.startswith("choices")} == {"choices.network"}
        kept = {
            key: value for key, value in other.items() if key.startswith("network.") and not key.endswith("_target_")
        }
        assert kept.items() <= configs[0].items()  # bottom, experts and heads


def test_many_tasks_are_summarised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"t{index}" for index in range(12)]
    test = {"loss": 1.0, **{f"{name}/mse": index / 10 for index, name in enumerate(names)}, "t3/mse": None}
    mains = {"main_metrics": dict.fromkeys(names, "mse")}
    text = printed(with_numbers(test) | mains, tmp_path, capsys)
    assert "mse: mean 0.5727 of 11 of 12 tasks; best 0.0000 (t0), worst 1.1000 (t11)" in text
    models = {"constant": {f"{name}/mse": 2.0 for name in names}, "linear": dict.fromkeys(test, None)}
    text = printed(with_numbers(test, **models) | mains, tmp_path, capsys)
    assert "mean of other models: constant 2.0000\n" in text


def test_of_hundreds_of_tasks_there_are_distribution_best_and_worst(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"t{index}" for index in range(100)]
    test = {"loss": 1.0, **{f"{name}/auroc": index / 100 for index, name in enumerate(names)}, "t50/auroc": None}
    labels = dict.fromkeys(names, 30) | {"t99": 29, "t0": 29}  # of which the others are no better by chance
    record = with_numbers(test, linear={f"{name}/auroc": 0.5 for name in names[:80]})
    record |= {"main_metrics": dict.fromkeys(names, "auroc"), "data": {"test_labels": labels}}
    lines = printed(record, tmp_path, capsys).splitlines()
    assert "auroc over 100 tasks" in [line.strip() for line in lines]
    rows = [line.split() for line in lines]
    assert ["network", "99", "0.0000", "0.2450", "0.4900", "0.7450", "0.9900"] in rows
    assert ["linear", "80", *["0.5000"] * 5] in rows
    ranked = [row for row in rows if len(row) == 6 and row[2] == row[5] == "30"]
    assert (ranked[0], ranked[-1]) == (
        ["t98", "0.9800", "30", "t1", "0.0100", "30"],
        [*["t89", "0.8900", "30", "t10", "0.1000", "30"]],
    )
    assert len(ranked) == 10


def test_a_run_records_the_code_that_was_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files may have changed since."""
    monkeypatch.setattr("mtl.runs.results.commit", lambda _: "later")
    train(compose_small(tmp_path, "data=synthetic_pairs", "gate=topk", "trainer.max_epochs=1", "~logger", "threads=1"))
    assert read_json(tmp_path / "results.json")["versions"]["commit"] == SOFTWARE["commit"] != "later"


def test_labels_by_task_and_the_tested_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {
        "a": LabeledPredictions(torch.tensor([0.2, 0.9, 0.9]), torch.tensor([0, 1, 1])),
        "b": LabeledPredictions(torch.tensor([1.0]), torch.tensor([2.0])),
    }
    counts = count_labels([TaskSpec("a", "binary"), TaskSpec("b", "regression"), TaskSpec("c", "binary")], rows)
    assert counts == {"test_labels": {"a": 3, "b": 1, "c": 0}, "test_positives": {"a": 2, "c": 0}}
    record = with_numbers({"loss": 1.0, "a/auroc": 0.5, "b/mse": 1.0}) | {"main_metrics": {"a": "auroc", "b": "mse"}}
    record |= {"data": {"rows": {"test": 5}, **counts}, "tested_epoch": 2, "epochs": 4, "best": 0.3, "monitor": "val/x"}
    record |= {"best_epochs": {"a": {"epoch": 1, "val_loss": 0.1}, "b": {"epoch": 2, "val_loss": 0.2}}}
    text = printed(record, tmp_path, capsys)
    assert ["a", "3", "2", "2", "(66.7%)"] in [line.split() for line in text.splitlines()]
    assert ["b", "1", "4"] in [line.split() for line in text.splitlines()]
    assert ["c", "0", "5", "0"] in [line.split() for line in text.splitlines()]
    assert "Tested: epoch 2 of 0 to 3, the best by val/x on the validation rows, 0.3000." in text
    assert "by its own loss on the validation rows, from 0: a 1, b 2." in " ".join(text.split())
    last = record | {"checkpoint": "x/last.ckpt", "tested_epoch": 3}
    assert "Tested: epoch 3 of 0 to 3, the last weights." in printed(last, tmp_path, capsys)
    by_task = {"rows": {"test": {"a": 3, "b": 9, "c": 1}}, **counts}  # tasks with rows of their own
    table = labels_by_task(by_task)
    assert isinstance(table, Table)
    assert [row[2] for row in table.rows] == ["0", "8", "1"]


def test_labels_of_many_tasks_are_a_sentence() -> None:
    labels = {f"t{index}": index for index in range(65)}
    data = {"rows": {"test": 70}, "test_labels": labels, "test_positives": {"t1": 0, "t64": 64}}
    text = labels_by_task(data)
    assert text == (
        "In the test rows, by task: labels: median 32, from 0 to 64; positives: median 32, from 0 to 64; "
        "1 of 2 binary tasks have no positive."
    )


def test_a_run_records_its_tested_epoch_and_positives(tmp_path: Path) -> None:
    options = "data=synthetic_pairs", "gate=topk", "trainer.max_epochs=2", "~logger", "threads=1"
    train(compose_small(tmp_path, *options))
    record = read_json(tmp_path / "results.json")
    epoch = read(tmp_path / "checkpoints" / "best.ckpt")["epoch"]
    assert (record["tested_epoch"], record["data"]["test_positives"]) == (epoch, {})


def test_decisions_by_a_threshold_fit_on_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = LabeledPredictions(torch.tensor([0.2, 0.9, 0.9]), torch.tensor([0, 1, 0]))
    measured = measure_decisions(rows, 0.5, {"fp": 2.0})
    text = printed(with_numbers({"loss": 1.0}) | {"thresholds": {"a_long_task_name": measured}}, tmp_path, capsys)
    row = ["a_long_task_name", "0.5", "0.6667", "0.5", "1", "0.6667", "0.6667"]
    assert row in [line.split() for line in text.splitlines()]
    assert "Not shown here: accuracy." in text
    [table] = measured_by_task({"intervals": {"a": {"coverage": None, "width": 3e-5}}})
    assert table.rows == [["a", "-", "3e-05"]]
