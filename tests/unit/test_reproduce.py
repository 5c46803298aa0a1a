"""reproduce.py from its file to its report, with a program that stands for train.py and knows the answer at once."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
from omegaconf import OmegaConf

from mtl.checks import InputError
from mtl.paper import command
from tests.conftest import ROOT

# The loss is the distance of x from 2 (3 for the gate b), and a little that depends on the seed
PROGRAM = """
import json, pathlib, sys
words = dict(word.split("=", 1) for word in sys.argv[1:])
folder = pathlib.Path(words["hydra.run.dir"].strip("'"))
with open(pathlib.Path(sys.argv[0]).with_name("words.txt"), "a") as file:
    print(json.dumps(words), file=file)
loss = abs(float(words.get("x", 2)) - (3 if words["gate"] == "b" else 2)) + 0.001 * (int(words["seed"]) % 3) + 0.1
test = {"loss": loss, "one/mse": loss, "two/mse": 3 * loss}
record = {"best_val_loss": loss, "test": test, "seed": int(words["seed"])}
test["flops_selected"] = 10 if words["gate"] == "b" else 40
test["jaccard"], test["distance"] = loss, abs(float(words.get("x", 2)) - 7)  # best loss: 2, smallest distance: 5
(folder / "config.yaml").write_text("recipe: {num_experts: 8, k: 4}")
(folder / "routing").mkdir()
(folder / "routing" / "weights_over_training.png").write_bytes(bytes(24))
record["epochs"] = 2
record["higher_is_better"] = {"loss": False, "mse": False}
(folder / "results.json").write_text(json.dumps(record))
"""
FILE = {
    "title": "A <title>",
    "source": "Somebody",
    "fixed": ["data=y"],
    "groups": {"first": {"name": "first group", "fixed": ["data.rows=1"]}, "second": {}},
    "gates": {
        "a": {"name": "gate <a>", "space": {"x": [1, 2, 5]}},
        "b": {"space": {"x": [3, 4, 9]}},
        "c": {"fixed": ["gate=a", "x=4"]},
    },
    "sampler": {"_target_": "mtl.tune.grid.GridSampler", "_partial_": True},
    "pruner": {"_target_": "optuna.pruners.NopPruner"},
    "scales": {"laptop": {"seeds": 3, "n_trials": 3, "search": ["data.rows=0"], "note": "less of everything"}},
    "baseline": "c",
    "columns": ["test loss", "mean mse", "test flops_selected"],
    "published": {"values": {"first": {"a": {"test loss": [10.0, 0.5]}}}, "units": {"test loss": 100}},
    "claims": [
        {"text": "a beats c.", "group": "first", "column": "test loss", "gate": "a", "than": ["c"], "by": 0.9},
        {"text": "c beats a.", "group": "first", "column": "mean mse", "gate": "c", "than": ["a"]},
    ],
    "remarks": ["More runs of c would settle it.", "Its start is unknown."],
}


def reproduce(tmp_path: Path, words: Sequence[str] = (), own: Sequence[str] = (), **changes: Any) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    options = {
        key: value for key, value in OmegaConf.load(ROOT / "conf" / "reproduce.yaml").items() if key != "defaults"
    }
    cfg = OmegaConf.create(options | FILE | {"storage": f"journal:{tmp_path}/log", "heartbeat": 0.3} | changes)
    first: Any = SimpleNamespace(paths=SimpleNamespace(output_dir=str(tmp_path)), monitor="val/loss")
    command.reproduce(cfg, "mine", words, lambda words: first, [sys.executable, str(tmp_path / "program.py")], own)


def test_searches_then_runs_then_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reproduce(tmp_path, page=str(tmp_path / "page"), only="first")
    told = [json.loads(line) for line in (tmp_path / "words.txt").read_text().splitlines()]
    searches = [words for words in told if words["data.rows"] == "0"]
    runs = [words for words in told if words["data.rows"] == "1"]
    assert sorted(words["gate"] + words["x"] for words in searches) == ["a1", "a2", "a5", "b3", "b4", "b9"]
    found = sorted(words["gate"] + words["x"] + words["seed"] for words in runs)
    assert found == [f"{key}{seed}" for key in ("a2", "a4", "b3") for seed in "012"]
    assert [words["seed"] for words in runs] == sorted(words["seed"] for words in runs)  # whole seeds first
    folder = tmp_path / "paper" / "mine" / "laptop"
    html, markdown = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    for text in ("A &lt;title&gt;", "gate &lt;a&gt;", "less of everything"):
        assert text in html
    for text in (
        "| a beats c. | holds | 0.101 ± 0.00058 against 2.101 ± 0.00058 of c, 95.2% better",
        "| c beats a. | contradicted |",
        "\n\n* More runs of c would settle it.\n* Its start is unknown.\n\n",
        "x=2 (trial ",
        "first group: search",
        "FLOPs per sample / c",
        "| gate <a>, published |  | 0.1 ± 0.005 | - | - |",
    ):
        assert text in markdown
    assert str(tmp_path) not in (tmp_path / "page" / "mine.csv").read_text()
    page = (tmp_path / "page" / "mine.md").read_text()
    pictures = sorted(path.name for path in (tmp_path / "page").glob("*.png"))
    assert re.findall(r"!\[.+\]\((.+)\)", page) == pictures == ["mine_1.png"]  # the curve of the tuning budget
    assert re.sub(r"!\[.+\n\n?", "", page).strip() == markdown.strip()
    table = pl.read_csv(tmp_path / "page" / "mine.csv")
    assert table.filter(setting="gate <a>")["mean mse"].to_list() == pytest.approx([0.2, 0.202, 0.204])
    assert "a beats c." in capsys.readouterr().out

    for seeds, more in ((3, 0), (4, 3)):  # nothing is run again, but more can be added
        reproduce(tmp_path, only="first", scales={"laptop": FILE["scales"]["laptop"] | {"seeds": seeds}})
        assert len((tmp_path / "words.txt").read_text().splitlines()) == len(told) + more


def test_rows_that_are_the_best_trials(tmp_path: Path) -> None:
    """Losses |x - 2| and |x - 3| plus at most 0.002: the best two are x = 1, 2 and x = 3, 4; nothing is run again."""
    scales = {"laptop": {"best": 2, "n_trials": 3, "note": "the best 2 of 3 trials"}}
    gates = {key: FILE["gates"][key] for key in "ab"}
    shortened: dict[str, Any] = {"scales": scales, "gates": gates, "baseline": "a", "claims": []}
    reproduce(tmp_path, only="first", **shortened)
    assert len((tmp_path / "words.txt").read_text().splitlines()) == 6
    folder = tmp_path / "paper" / "mine" / "laptop"
    losses = pl.read_csv(folder / "runs.csv").group_by("setting").agg(pl.col("test loss").sort()).sort("setting")
    assert losses["test loss"].list.get(0).to_list() == pytest.approx([0.1, 0.1], abs=0.003)
    assert losses["test loss"].list.get(1).to_list() == pytest.approx([1.1, 1.1], abs=0.003)
    markdown = (folder / "report.md").read_text()
    assert "| gate <a>, published |  | 0.1 ± 0.005" in markdown
    assert "b: the best 2 of 3 trials (3 finished)." in markdown
    assert markdown.count("Tuning budget: validation loss") == 1


def test_figures_and_pictures_beside_the_page(tmp_path: Path) -> None:
    figures = [
        {"title": "F", "label": "tasks", "at": {"first": 16, "second": 32}, "columns": ["test jaccard"]},
        {"title": "G", "label": "budget", "at": {"a": 0.5, "c": 1}, "columns": ["test loss", "test absent"]},
        {"title": "H", "label": "budget", "at": {"a": 0.5, "c": 1}, "columns": ["test absent"]},
    ]
    figures[0]["random"] = ["test jaccard"]
    pictures = {"weights_over_training": ["c"]}
    few = {"laptop": {"seeds": 2, "note": "x"}}
    file = tmp_path / "page" / "other.md"
    reproduce(tmp_path, page=str(file), only="a,c", figures=figures, pictures=pictures, scales=few)
    page = file.read_text()
    assert re.findall(r"!\[(.+)\]\((.+)\)", page) == [
        ("c (trial_00000): weights over training", "other_1.png"),
        ("c (trial_00000): weights over training", "other_2.png"),
        ("F: means over runs, with standard errors", "other_3.png"),
        ("G: means over runs, with standard errors", "other_4.png"),
    ]
    with pytest.raises(InputError, match="figures: no is none of first, second, a, b, c"):
        reproduce(tmp_path, figures=[figures[0] | {"at": {"no": 1, "first": 2}}])


def test_search_prefers_trials_within_the_limit(tmp_path: Path) -> None:
    for name, limit, chosen in (("low", 2.3, "5"), ("none", 0, "2")):
        gates = {"a": {"space": {"x": [2, 5, 9]}, "limit": {"test distance": limit}}}
        (tmp_path / name).mkdir()
        reproduce(tmp_path / name, only="first", gates=gates, claims=[], published={}, baseline=None)
        told = [json.loads(line) for line in (tmp_path / name / "words.txt").read_text().splitlines()]
        assert {words["x"] for words in told if words["data.rows"] == "1"} == {chosen}


def test_report_of_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="mine/laptop: nothing has been run yet"):
        reproduce(tmp_path, show=True, storage=None)
    file = tmp_path / "paper" / "mine" / "laptop" / "report.md"
    own = ["scales.laptop.seeds=1", "only=second,c"]
    reproduce(tmp_path, ["data.epochs=2"], own, only="second,c", scales={"laptop": {"seeds": 1, "note": "x"}})
    said = "These are not the runs of the file: the command line has scales.laptop.seeds=1 data.epochs=2.\n"
    assert file.read_text().index(said) < file.read_text().index("Scale laptop")
    reproduce(tmp_path, ["paths.output_dir=/x"], show=True, scales={"laptop": {"seeds": 2, "note": "x"}})
    markdown = file.read_text()
    assert "not the runs" not in markdown
    assert "1 of 6 runs have been done so far." in markdown
    assert "first group" not in markdown
    assert "| a beats c. | not run | 0 runs against 0 runs of c |" in markdown
