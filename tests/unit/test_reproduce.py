"""mtl reproduce from its file to its report, with a program that stands for train.py and knows the answer at once.

Then rows of a table that continue other rows' runs, and tables of columns of several groups.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
from omegaconf import OmegaConf

from mtl.checks import InputError
from mtl.jobs.job import do
from mtl.paper import command
from tests.conftest import ROOT
from tests.programs import run_file

# The loss is the distance of x from 2 (3 for the gate b), and a little that depends on the seed
PROGRAM = """
import json, pathlib, sys
words = dict(word.split("=", 1) for word in sys.argv[2:])
folder = pathlib.Path(words["hydra.run.dir"].strip("'"))
with open(pathlib.Path(sys.argv[0]).with_name("words.txt"), "a") as file:
    print(json.dumps(words), file=file)
loss = abs(float(words.get("x", 2)) - (3 if words["gate"] == "b" else 2)) + 0.001 * (int(words["seed"]) % 3) + 0.1
test = {"loss": loss, "one/mse": loss, "two/mse": 3 * loss}
record = {"best": loss, "numbers": {"test": {"network": test}}, "seed": int(words["seed"])}
test["flops_selected"] = 10 if words["gate"] == "b" else 40
test["jaccard"], test["distance"] = loss, abs(float(words.get("x", 2)) - 7)  # best loss: 2, smallest distance: 5
(folder / "config.yaml").write_text("recipe: {num_experts: 8, k: 4}")
(folder / "routing").mkdir()
(folder / "routing" / "weights_over_training.png").write_bytes(bytes(24))
record["epochs"] = 2
(folder / "results.json").write_text(json.dumps(record))
"""
FILE = {
    "title": "A <title>",
    "source": "Somebody",
    "fixed": ["data=y"],
    "groups": {"first": {"name": "first group", "fixed": ["data.rows=1"]}, "second": {}},
    "methods": {
        "a": {"name": "gate <a>", "space": {"x": [1, 2, 5]}},
        "b": {"space": {"x": [3, 4, 9]}},
        "c": {"fixed": ["gate=a", "x=4"]},
    },
    "sampler": {"_target_": "mtl.tune.grid.GridSampler", "_partial_": True},
    "pruner": {"_target_": "optuna.pruners.NopPruner"},
    "scales": {"laptop": {"seeds": 3, "n_trials": 3, "search": ["data.rows=0"], "note": "less of everything"}},
    "baseline": "c",
    "columns": ["test/loss", "test/mean_mse", "test/flops_selected"],
    "published": {"values": {"first": {"a": {"test/loss": [10.0, 0.5]}}}, "units": {"test/loss": 100}},
    "claims": [
        {"text": "a beats c.", "group": "first", "column": "test/loss", "method": "a", "than": ["c"], "by": 0.9},
        {"text": "c beats a.", "group": "first", "column": "test/mean_mse", "method": "c", "than": ["a"]},
    ],
    "remarks": ["More runs of c would settle it.", "Its start is unknown."],
}


def reproduce(tmp_path: Path, words: Sequence[str] = (), own: Sequence[str] = (), **changes: Any) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    options = {
        key: value for key, value in OmegaConf.load(ROOT / "conf" / "reproduce.yaml").items() if key != "defaults"
    }
    cfg = OmegaConf.create(options | FILE | changes)
    first: Any = SimpleNamespace(paths=SimpleNamespace(output_dir=str(tmp_path)), monitor="val/loss")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtl.jobs.work.checked_run", lambda words: first)
        patch.setattr("mtl.jobs.job.do", partial(do, program=partial(run_file, tmp_path / "program.py")))
        command.reproduce(cfg, "mine", words, own)


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
    html, markdown = (folder / "report.html").read_text(), (folder / "summary.md").read_text()
    for text in ("A &lt;title&gt;", "gate &lt;a&gt;", "less of everything"):
        assert text in html
    for text in (
        "| a beats c. | holds | +95.19 [95.19, 95.19] against c |",
        "| c beats a. | **contradicted** | -1,980 [-1,980, -1,980] against gate &lt;a> |",
        "**Claims that were run: 1 contradicted, 1 holds.** Not run: 0 of 2 claims.",
        "* **first group**, loss against c: 2 are better (most gate &lt;a>, by 95.19 % [95.19, 95.19]).",
        "\n\n* More runs of c would settle it.\n* Its start is unknown.\n\n",
        "x=2 (trial ",
        "first group: search",
        "FLOPs per sample / c",
        "| gate &lt;a>, published | 0.1 ± 0.005 |  | - | - |",
    ):
        assert text in markdown
    assert str(tmp_path) not in (tmp_path / "page" / "mine.csv").read_text()
    page = (tmp_path / "page" / "mine.md").read_text()
    pictures = sorted(path.name for path in (tmp_path / "page").glob("*.png"))
    assert re.findall(r"!\[.+\]\((.+)\)", page) == pictures == ["mine_1.png", "mine_2.png"]  # of the tuning budget
    assert re.sub(r"!\[.+\n\n?", "", page).strip().replace("mine.csv", "summary.csv") == markdown.strip()
    table = pl.read_csv(tmp_path / "page" / "mine.csv")
    assert table.filter(setting="gate <a>")["test/mean_mse"].to_list() == pytest.approx([0.2, 0.202, 0.204])
    said = capsys.readouterr().out
    assert "a beats c." in said
    assert re.findall(r"left \((\d+) run", said) == [
        str(left) for left in range(14, 0, -1)
    ]  # also those of later waves

    again = [*FILE["claims"], FILE["claims"][0] | {"text": "Fewer trials.", "times": 2.0}]
    reproduce(tmp_path, judge=str(tmp_path / "page" / "mine.md"), claims=again[:2])
    assert (tmp_path / "page" / "mine.md").read_text() == page  # by the CSV alone
    line = "| Fewer trials. | holds | 3 times |\n"
    edited = (
        page.replace("| c beats a. |", f"{line}| c beats a. |").replace("holds | +95", "x").replace("| 40 | 2 |", "")
    )
    (tmp_path / "page" / "mine.md").write_text(edited)
    reproduce(tmp_path, judge=str(tmp_path / "page" / "mine.md"), claims=again)
    redrawn = (tmp_path / "page" / "mine.md").read_text()
    assert redrawn.replace(line, "").replace("2 hold.** Not run: 0 of 3", "1 holds.** Not run: 0 of 2") == page
    with pytest.raises(InputError, match="give the page of a report, with its CSV"):
        reproduce(tmp_path, judge=str(tmp_path / "nothing.md"))

    for seeds, more in ((3, 0), (4, 3)):  # nothing is run again, but more can be added
        reproduce(tmp_path, only="first", scales={"laptop": FILE["scales"]["laptop"] | {"seeds": seeds}})
        assert len((tmp_path / "words.txt").read_text().splitlines()) == len(told) + more


def test_rows_that_are_the_best_trials(tmp_path: Path) -> None:
    """Losses |x - 2| and |x - 3| plus at most 0.002: the best two are x = 1, 2 and x = 3, 4; nothing is run again."""
    scales = {"laptop": {"best": 2, "n_trials": 3, "note": "the best 2 of 3 trials"}}
    methods = {key: FILE["methods"][key] for key in "ab"}
    shortened: dict[str, Any] = {"scales": scales, "methods": methods, "baseline": "a", "claims": []}
    reproduce(tmp_path, only="first", **shortened)
    assert len((tmp_path / "words.txt").read_text().splitlines()) == 6
    folder = tmp_path / "paper" / "mine" / "laptop"
    losses = pl.read_csv(folder / "summary.csv").group_by("setting").agg(pl.col("test/loss").sort()).sort("setting")
    assert losses["test/loss"].list.get(0).to_list() == pytest.approx([0.1, 0.1], abs=0.003)
    assert losses["test/loss"].list.get(1).to_list() == pytest.approx([1.1, 1.1], abs=0.003)
    markdown = (folder / "summary.md").read_text()
    assert "| gate &lt;a>, published | 0.1 ± 0.005 |" in markdown
    assert "b: the best 2 of 3 trials (3 finished)." in markdown
    assert markdown.count("Tuning budget: validation loss") == 1
    assert "## Remarks\n\n* More runs of c would settle it.\n" in markdown


def test_figures_and_pictures_beside_the_page(tmp_path: Path) -> None:
    figures = [
        {"title": "F", "label": "tasks", "at": {"first": 16, "second": 32}, "columns": ["test/jaccard"]},
        {"title": "G", "label": "budget", "at": {"a": 0.5, "c": 1}, "columns": ["test/loss", "test/absent"]},
        {"title": "H", "label": "budget", "at": {"a": 0.5, "c": 1}, "columns": ["test/absent"]},
    ]
    figures[0]["random"] = ["test/jaccard"]
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
        methods = {"a": {"space": {"x": [2, 5, 9]}, "limit": {"test/distance": limit}}}
        (tmp_path / name).mkdir()
        reproduce(tmp_path / name, only="first", methods=methods, claims=[], published={}, baseline=None)
        told = [json.loads(line) for line in (tmp_path / name / "words.txt").read_text().splitlines()]
        assert {words["x"] for words in told if words["data.rows"] == "1"} == {chosen}


def test_report_of_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="mine/laptop: nothing has been run yet"):
        reproduce(tmp_path, show=True)
    alone = {"scales": {"laptop": {"seeds": 1, "note": "x"}}}
    with pytest.raises(InputError, match="storage=x: nothing is searched, so there is nothing to store"):
        reproduce(tmp_path, storage="x", **alone)
    file = tmp_path / "paper" / "mine" / "laptop" / "summary.md"
    own = ["scales.laptop.seeds=1", "only=second,c"]
    reproduce(tmp_path, ["data.epochs=2"], own, only="second,c", scales={"laptop": {"seeds": 1, "note": "x"}})
    said = "These are not the runs of the file: the command line has scales.laptop.seeds=1 data.epochs=2."
    assert file.read_text().index(said) < file.read_text().index("Scale laptop")
    few, page = {"laptop": {"seeds": 1, "note": "x"}}, tmp_path / "few.md"
    reproduce(tmp_path, ["data.epochs=2"], own, only="second,c", scales=few, show=True, page=str(page))
    text = page.read_text()
    reproduce(tmp_path, only="second,c", scales=few, judge=str(page))  # the words are in the CSV
    assert said in text
    assert page.read_text() == text
    reproduce(tmp_path, ["paths.output_dir=/x"], show=True, scales={"laptop": {"seeds": 2, "note": "x"}})
    markdown = file.read_text()
    assert "not the runs" not in markdown
    assert "1 of 6 runs have been done so far." in markdown
    assert "first group" not in markdown
    assert "Not run: 2 of 2 claims." in markdown


START = "start='{one}/last'"
JOINT: dict[str, Any] = {
    "groups": {
        "two": {"fixed": [START, "x=2"], "space": {"y": [1, 2]}},
        "three": {"fixed": [START, "x=3"], "methods": ["a", "c"]},
        "one": {"fixed": ["x=1"], "methods": ["a", "b"], "space": {"y": [1, 2]}},
    },
    "methods": {"a": {}, "b": {}, "c": {"fixed": ["gate=a", "start='{one/b}/last'"]}},
    "tables": {
        "both": {
            "name": "Both",
            "columns": {"II": ["two", "test/loss"], "III": ["three", "test/loss"]},
            "means": {"mean": ["II", "III"]},
            "methods": ["a", "c"],
            "best": True,
        }
    },
    "scales": {"laptop": {"seeds": 3, "note": "x"}},
    "published": {"values": {"both": {"a": {"II": 10, "mean": 60}}}, "units": {"II": 100, "mean": 100}},
    "claims": [{"text": "a equals c.", "group": "both", "column": "mean", "method": "a", "than": ["c"]}],
    "baseline": None,
    "remarks": [],
}


def words_told(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "words.txt").read_text().splitlines()]


def test_rows_continue_the_runs_of_other_rows(tmp_path: Path) -> None:
    """Whether requested or not, those run first; nothing is run again if there are more seeds or rows."""
    root = tmp_path / "paper" / "mine" / "laptop"
    for seeds in (1, 3):
        reproduce(tmp_path, only="two,a", **JOINT | {"scales": {"laptop": {"seeds": seeds, "note": "x"}}})
    runs = words_told(tmp_path)
    assert [run["x"] + run["seed"] for run in runs] == ["10", "20", "11", "12", "21", "22"]
    starts = [run["start"].strip("'") for run in runs if run["x"] == "2"]
    assert starts == [f"{root}/one/a/trial_0000{seed}/last" for seed in range(3)]
    reproduce(tmp_path, only="three", **JOINT)
    more = words_told(tmp_path)[6:]
    assert [(run["x"], run["gate"], run["seed"]) for run in more] == [
        *(("1", "b", seed) for seed in "012"),
        *(("3", "a", seed) for seed in "001122"),
    ]
    assert {run["start"].split("/")[-3] for run in more[3:]} == {"a", "b"}


def test_trials_of_a_search_continue_the_first_run_of_the_chosen_options(tmp_path: Path) -> None:
    scales = {"laptop": {"seeds": 2, "n_trials": 2, "note": "x"}}
    reproduce(tmp_path, only="two,a", **JOINT | {"scales": scales, "methods": {"a": {}, "b": {}, "c": {}}})
    stages = [run["start"].split("/one/a/")[1].strip("'") for run in words_told(tmp_path) if run["x"] == "2"]
    assert [run["x"] for run in words_told(tmp_path)] == list("11112222")
    assert {stage.split("/")[0] for stage in stages} <= {"trial_0", "trial_1"}  # of the search of the first stage
    assert [stage.split("/")[1] for stage in stages] == ["trial_00000", "trial_00000", "trial_00000", "trial_00001"]


def test_a_joint_table_has_means_best_runs_and_claims(tmp_path: Path) -> None:
    """The losses are |x - 2| + 0.1 + 0.001 * seed."""
    reproduce(tmp_path, **JOINT)
    markdown = (tmp_path / "paper" / "mine" / "laptop" / "summary.md").read_text()
    assert "| a equals c. | undecided |" in markdown
    assert "## Both" in markdown
    row = next(line for line in markdown.splitlines() if line.startswith("| a | 0.10100"))
    assert re.findall(r"\d\.\d+ ± ", row) == ["0.10100 ± ", "1.10100 ± ", "0.60100 ± "]
    assert "| a | 0.1 | 1.1 | 0.6 |" in markdown
    assert "| a, published | 0.1 | - | 0.6 |" in markdown
    reproduce(tmp_path, only="one,a", show=True, **JOINT)
    assert "## Both" not in (tmp_path / "paper" / "mine" / "laptop" / "summary.md").read_text()


SEARCH = {"text": "Fewer *trials*.", "group": "first", "column": "test/loss", "method": "a", "than": ["b"], "times": 2}
BEST: dict[str, Any] = {
    "scales": {"laptop": {"best": 2, "n_trials": 3, "note": "x"}},
    "claims": [SEARCH],
    "only": "first",
}


@pytest.mark.parametrize(
    "changes", [JOINT, BEST | {"methods": {key: FILE["methods"][key] for key in "ab"}, "baseline": "a"}]
)
def test_a_page_is_drawn_again_from_its_csv_with_what_it_says_of_searches(changes: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    reproduce(tmp_path, page=str(page), **changes)
    text = page.read_text()
    reproduce(tmp_path, judge=str(page), **changes)
    assert "undecided |" in text
    assert page.read_text() == text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": {"a": {}, "b": {}, "c": {"fixed": ["start='{none}/x'"]}}}, "mine has no method c in a group none"),
        (
            {"methods": JOINT["methods"] | {"a": {"fixed": ["start='{two}/x'"]}}},
            "two/a -> two/a: these rows refer to each other in a circle",
        ),
        ({"tables": {"t": JOINT["tables"]["both"] | {"methods": ["d"]}}}, "tables: d is none of a, b, c"),
        ({"tables": {"t": JOINT["tables"]["both"] | {"means": {"m": ["IV"]}}}}, "tables: IV is none of II, III"),
        ({"scales": {"laptop": {"best": 1, "n_trials": 2, "note": "x"}}}, "rows that refer to others need seeds"),
    ],
)
def test_wrong_references(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    free = {"claims": [], "published": {}, "space": {"y": [1]}}
    with pytest.raises(InputError, match=message):
        reproduce(tmp_path, **JOINT | free | changes)
