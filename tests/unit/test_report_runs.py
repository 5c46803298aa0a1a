"""Run folders as one table: which folders are runs, what became of them, what tells them apart."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from mtl.checks import InputError
from mtl.cli.report import main
from mtl.report.comparison import compare_settings
from mtl.report.runs import find_runs, labels, overridden_options, read_named_runs, read_runs
from mtl.report.statistics import difference
from tests.run_folders import write_run

MAIN = {"click": "auprc"}


def test_runs_are_read_in_the_order_of_jobs(tmp_path: Path) -> None:
    for number in (10, 9, 2):
        write_run(tmp_path / "sweep" / f"{number}_x", ["gate=topk"], {"loss": float(number)}, seed=number)
    (tmp_path / "sweep" / "9_x" / "checkpoints").mkdir()
    (tmp_path / "sweep" / "9_x" / "checkpoints" / "config.yaml").touch()  # a run contains no other run
    runs = read_runs([tmp_path])
    assert runs.table["seed"].to_list() == [2, 9, 10]
    assert runs.table["test/loss"].to_list() == [2.0, 9.0, 10.0]
    assert find_runs([tmp_path / "sweep" / "2_x", tmp_path]) == find_runs([tmp_path])  # each run once
    with pytest.raises(InputError, match=r"none: no such folder"):
        find_runs([tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty contains no run; a run is a folder with a config.yaml"):
        read_runs([tmp_path / "empty"])


def test_runs_with_names_of_the_caller(tmp_path: Path) -> None:
    for number in range(3):
        write_run(tmp_path / str(number), [f"gate=g{number}", "x=1"], {"loss": float(number)}, MAIN, seed=number)
    named = {tmp_path / "2": ("COMET", 7), tmp_path / "0": ("top-k", None), tmp_path / "9": ("top-k", 3)}
    runs = read_named_runs(named, "gate of the paper")
    assert runs.heading == "gate of the paper"
    assert runs.table.select("setting", "seed", "state", "test/loss").rows() == [
        ("COMET", 7, "finished", 2.0),
        ("top-k", 0, "finished", 0.0),
        ("top-k", 3, "unfinished", None),  # not begun
    ]
    assert not [name for name in runs.table.columns if name.startswith("option")]
    with pytest.raises(InputError, match="no run to compare"):
        read_named_runs({})


LOG = "12:00:01 INFO mtl: comet: 900 parameters\n12:00:02 INFO mtl.callbacks.epoch_report: epoch 0: train/loss 0.5\n"


@pytest.mark.parametrize(
    ("log", "state", "reason"),
    [
        ("", "unfinished", None),
        (LOG, "unfinished", "epoch 0: train/loss 0.5"),
        (LOG + "12:00:03 ERROR mtl: NaN loss\n12:00:04 INFO hydra._internal: #2: seed=3\n", "failed", "NaN loss"),
        (LOG + "12:00:03 ERROR mtl: NaN loss\n" + LOG, "unfinished", "epoch 0: train/loss 0.5"),  # resumed
        ("x" * 20000 + "\n" + LOG, "unfinished", "epoch 0: train/loss 0.5"),
    ],
)
def test_runs_without_results(tmp_path: Path, log: str, state: str, reason: str | None) -> None:
    write_run(tmp_path / "0", ["gate=topk"], {"loss": 1.0})
    write_run(tmp_path / "1", ["gate=comet"], None, log=log, seed=4)
    row = read_runs([tmp_path]).table.row(1, named=True)
    assert (row["state"], row["reason"], row["setting"], row["seed"]) == (state, reason, "comet", 4)
    assert row["test/loss"] is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"numbers": 3}, "results.json: numbers: input should be a valid dictionary"),
        ({"numbers": {"test": 3}}, "results.json: numbers.test: input should be a valid dictionary"),
        (
            {"numbers": {"test": {"network": {"loss": "low"}}}},
            "results.json: numbers.test.network.loss.float: input should be a valid number",
        ),
        ({"test": {"loss": 1.0}}, "results.json is of an earlier mtl; train the run again, or leave the folder out"),
    ],
)
def test_wrong_results_are_a_failed_run_in_the_report(content: Any, reason: str, tmp_path: Path) -> None:
    state, found = damaged("results.json", json.dumps({"seed": 0} | content), tmp_path)
    assert state == "failed"
    assert found.startswith(reason)


@pytest.mark.parametrize(
    ("name", "content", "state"),
    [
        ("results.json", '{"numbers": {"test": {"network": {"lo', "unfinished"),
        ("results.json", '{"numbers": {"test": {"network": {"loss": NaN}}}}', "finished"),
        ("command.json", '{"overrides": [1], "choices": "a", "seed": []}', "finished"),
        ("config.yaml", "a: [", "finished"),
        ("config.yaml", "paths: 3\nseed: {}", "finished"),
        ("config.yaml", "monitor: [1]\nwords: [1]", "finished"),
        ("config.yaml", "[" * 3000, "finished"),
        ("results.json", "[" * 100_000, "unfinished"),
    ],
)
def test_damaged_files_do_not_end_a_report(name: str, content: str, state: str, tmp_path: Path) -> None:
    assert damaged(name, content, tmp_path) == (state, "")


def damaged(name: str, content: str, folder: Path) -> tuple[str, str]:
    """Return state and reason in the report of a run one of whose files has another ``content``."""
    for number, gate in enumerate(("topk", "comet")):
        write_run(folder / str(number), [f"gate={gate}"], {"loss": 1.0}, seed=2)
    (folder / "0" / name).write_text(content)
    main([str(folder)])
    row = pl.read_csv(folder / "summary.csv").row(0, named=True)
    return row["state"], row["reason"] or ""


@pytest.mark.parametrize("name", ["results.json", "command.json", "config.yaml", "train.log", "csv/metrics.csv"])
def test_links_out_of_a_run_are_not_followed(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "runs" / "0", ["gate=comet"], None if name == "train.log" else {"loss": 1.0})
    (run / "csv").mkdir()
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(tmp_path / "secret")
    secret = {
        "numbers": {"test": {"network": {"secret": 1.0}}},
        "overrides": ["secret=1"],
        "monitor": "secret/loss",
        "choices": {"data": "secret"},
    }
    (tmp_path / "secret").write_text(json.dumps(secret) if "metrics" not in name else "step,secret/loss\n1,2\n3,4\n")
    try:
        main([str(tmp_path / "runs")])
    except SystemExit as error:
        assert "must be a regular file" in str(error)  # noqa: PT017  (most of these files count as missing)
    written = [file.read_text() for file in (tmp_path / "runs").glob("*.*")]
    assert "secret" not in capsys.readouterr().out + "".join(written)
    (run / "routing").mkdir()
    (run / "routing" / "expert_share.png").symlink_to(tmp_path / "secret")
    with pytest.raises(SystemExit, match=r"share.png: must be a regular file of at most 16 MiB inside .*, and no link"):
        main([str(tmp_path / "runs")])


@pytest.mark.parametrize(("folder", "title"), [("2026-11-28/21-27-17", "2026-11-28 21-27-17"), ("a/sweep", "sweep")])
def test_the_page_of_a_sweep_is_named_by_its_folder(folder: str, title: str, tmp_path: Path) -> None:
    for number in range(2):
        write_run(tmp_path / folder / str(number), [f"gate={number}"], {"loss": 1.0})
    main([str(tmp_path / folder)])
    assert f"<title>{title}: 2 runs</title>" in (tmp_path / folder / "report.html").read_text()


def test_names_that_a_stranger_chose_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of folders, options, tasks and data, and messages, in the page, in Markdown and on the console."""
    bad = "<script>alert(1)</script>\x1b[2J\x07\u202e![p](http:"
    for number, name in enumerate((bad, f"b\n# {bad}\n")):
        test = {f"t{name}/auprc": 1.0, "loss": 1.0} if number else None
        log = f"12:00:00 ERROR mtl: {bad}\n"
        write_run(tmp_path / name.replace("/", "|"), [f"gate={name}"], test, {f"t{name}": "auprc"}, log=log)
    record = json.loads((tmp_path / name.replace("/", "|") / "results.json").read_text())
    record |= {"command": f"mtl\n\n# {bad}", "data": {"files": [bad]}, "versions": {"mtl": bad}}
    (tmp_path / name.replace("/", "|") / "results.json").write_text(json.dumps(record))
    main([str(tmp_path)])
    page, text = ((tmp_path / file).read_text() for file in ("report.html", "summary.md"))
    assert "alert(1)" in text
    for written in (page, text, capsys.readouterr().out):
        assert not re.search("[\x1b\x07\u202e]", written)
    assert (page + text).count("<script") == 1  # ours, which sorts tables
    assert "![p](" not in text
    assert [line for line in text.splitlines() if line.startswith("# ")] == [text.splitlines()[0]]


def test_undefined_values_are_nan_and_values_that_a_run_lacks_are_null(tmp_path: Path) -> None:
    write_run(tmp_path / "0", [], {"loss": 1.0, "click/auprc": None, "click/expert_share_00": 0.5}, MAIN)
    write_run(tmp_path / "1", [], {"loss": 2.0}, MAIN)
    runs = read_runs([tmp_path])
    undefined, lacking = runs.table["test/click/auprc"].to_list()
    assert math.isnan(undefined)
    assert lacking is None
    assert not [name for name in runs.table.columns if "expert_share" in name]
    assert runs.main == MAIN
    columns = ("test/click/auprc", "test/loss", "test/idle_tasks")
    assert [runs.is_higher_better(column) for column in columns] == [True, False, None]


def test_overrides_that_say_what_was_trained(tmp_path: Path) -> None:
    words = ["gate=topk", "+data.new=1", "seed=3", "data.shuffle_seed=1", "paths.run_dir=x", "~logger", "report=true"]
    assert overridden_options([*words, "gate=comet"]) == {"gate": "comet", "data.new": "1", "~logger": ""}
    write_run(tmp_path / "0", ["gate=topk"], {"loss": 1.0})
    for number, word in enumerate(("ckpt=x/last.ckpt", "evaluate=x/best.ckpt"), 1):
        write_run(tmp_path / str(number), [word], {"loss": 2.0}, config={"overrides": ["gate=comet", word]})
    assert read_runs([tmp_path]).table["setting"].to_list() == ["topk", "comet", "comet"]


@pytest.mark.parametrize(
    ("options", "heading", "names"),
    [
        ([{"gate": "topk", "x": "1"}, {"gate": "comet", "x": "1"}], "gate", ["topk", "comet"]),
        ([{"gate": "a", "k": "1"}, {"k": "2", "gate": "b"}], "gate, k", ["a, 1", "b, 2"]),
        ([{"x": "1"}, {"gate": "b", "x": "1"}], "setting", ["defaults", "gate=b"]),
        ([{"x": "1"}, {"x": "1"}], "setting", ["all runs", "all runs"]),
    ],
)
def test_labels_leave_out_what_runs_share(options: list[dict[str, str]], heading: str, names: list[str]) -> None:
    assert labels(options) == (heading, names)


def test_a_failed_run_has_no_value_unless_it_was_repeated(tmp_path: Path) -> None:
    failed = {"test": None, "log": "12:00:01 ERROR mtl: step 3: the loss is nan\n"}
    for number, (seed, own) in enumerate([(0, {}), (1, {}), (2, failed), (1, failed), (3, {"test": None})]):
        write_run(tmp_path / str(number), [], **{"test": {"loss": 1.0}, "seed": seed, **own})
    runs = read_runs([tmp_path])
    assert runs.values("all runs", "test/loss") == {(2, None): None, (0, None): 1.0, (1, None): 1.0}
    assert compare_settings(runs).table().rows == [["all runs", "2 of 5", "1.000 (2/3)"]]
    found = difference(runs.values("all runs", "test/loss"), {(9, None): 1.0})
    assert found is not None
    assert found.undefined == 1


def test_the_seed_of_the_data_is_read_from_the_configuration(tmp_path: Path) -> None:
    for number, config in enumerate([{"data": {"seed": 7}}, {"data": None}, {}]):
        write_run(tmp_path / str(number), [], {"loss": 1.0}, seed=3, config=config)
    runs = read_runs([tmp_path])
    assert runs.table.select("seed", "data_seed").rows() == [(3, 7), (3, None), (3, None)]
    assert list(runs.values("all runs", "test/loss")) == [(3, 7), ("all runs", 1), ("all runs", 2)]
