"""Rows of a paper's table that continue other rows' runs, and tables of columns of several groups."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mtl.checks import InputError
from mtl.tune import launch
from tests.unit.test_reproduce import reproduce

START = "start='{one}/last'"
FILE: dict[str, Any] = {
    "groups": {
        "two": {"fixed": [START, "x=2"], "space": {"y": [1, 2]}},
        "three": {"fixed": [START, "x=3"], "gates": ["a", "c"]},
        "one": {"fixed": ["x=1"], "gates": ["a", "b"], "space": {"y": [1, 2]}},
    },
    "gates": {"a": {}, "b": {}, "c": {"fixed": ["gate=a", "start='{one/b}/last'"]}},
    "tables": {
        "both": {
            "name": "Both",
            "columns": {"II": ["two", "test loss"], "III": ["three", "test loss"]},
            "means": {"mean": ["II", "III"]},
            "gates": ["a", "c"],
            "best": True,
        }
    },
    "scales": {"laptop": {"seeds": 3, "note": "x"}},
    "published": {"values": {"both": {"a": {"II": 10, "mean": 60}}}, "units": {"II": 100, "mean": 100}},
    "claims": [{"text": "a equals c.", "group": "both", "column": "mean", "gate": "a", "than": ["c"]}],
    "baseline": None,
    "remarks": [],
}


def told(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "words.txt").read_text().splitlines()]


def test_rows_continue_the_runs_of_other_rows(tmp_path: Path) -> None:
    """Whether requested or not, those run first; nothing is run again if there are more seeds or rows."""
    root = tmp_path / "paper" / "mine" / "laptop"
    for seeds in (1, 3):
        reproduce(tmp_path, only="two,a", **FILE | {"scales": {"laptop": {"seeds": seeds, "note": "x"}}})
    runs = told(tmp_path)
    assert [run["x"] + run["seed"] for run in runs] == ["10", "20", "11", "12", "21", "22"]
    starts = [run["start"].strip("'") for run in runs if run["x"] == "2"]
    assert starts == [f"{root}/one/a/trial_0000{seed}/last" for seed in range(3)]
    reproduce(tmp_path, only="three", **FILE)
    more = told(tmp_path)[6:]
    assert [(run["x"], run["gate"], run["seed"]) for run in more] == [
        *(("1", "b", seed) for seed in "012"),
        *(("3", "a", seed) for seed in "001122"),
    ]
    assert {run["start"].split("/")[-3] for run in more[3:]} == {"a", "b"}


def test_trials_of_a_search_continue_the_first_run_of_the_chosen_options(tmp_path: Path) -> None:
    scales = {"laptop": {"seeds": 2, "n_trials": 2, "note": "x"}}
    reproduce(tmp_path, only="two,a", **FILE | {"scales": scales, "gates": {"a": {}, "b": {}, "c": {}}})
    stages = [run["start"].split("/one/a/")[1].strip("'") for run in told(tmp_path) if run["x"] == "2"]
    assert [run["x"] for run in told(tmp_path)] == list("11112222")
    assert {stage.split("/")[0] for stage in stages} <= {"trial_0", "trial_1"}  # of the search of the first stage
    assert [stage.split("/")[1] for stage in stages] == ["trial_00000", "trial_00000", "trial_00000", "trial_00001"]


def test_a_joint_table_has_means_best_runs_and_claims(tmp_path: Path) -> None:
    """The losses are |x - 2| + 0.1 + 0.001 * seed."""
    reproduce(tmp_path, **FILE)
    markdown = (tmp_path / "paper" / "mine" / "laptop" / "report.md").read_text()
    assert "| a equals c. | undecided |" in markdown
    assert "## Both" in markdown
    row = next(line for line in markdown.splitlines() if line.startswith("| a | 3 |"))
    assert re.findall(r"\d\.\d+ ± ", row) == ["0.10100 ± ", "1.10100 ± ", "0.60100 ± "]
    assert "| a | 0.1 | 1.1 | 0.6 |" in markdown
    assert "| a, published | 0.1 | - | 0.6 |" in markdown
    reproduce(tmp_path, only="one,a", show=True, **FILE)
    assert "## Both" not in (tmp_path / "paper" / "mine" / "laptop" / "report.md").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gates": {"a": {}, "b": {}, "c": {"fixed": ["start='{none}/x'"]}}}, "mine has no gate c in a group none"),
        ({"gates": {"a": {"fixed": ["start='{two}/x'"]}, "b": {}, "c": {}}}, "two/a refers to itself"),
        ({"tables": {"t": FILE["tables"]["both"] | {"gates": ["d"]}}}, "tables: d is none of a, b, c"),
        ({"tables": {"t": FILE["tables"]["both"] | {"means": {"m": ["IV"]}}}}, "tables: IV is none of II, III"),
        ({"scales": {"laptop": {"best": 1, "n_trials": 2, "note": "x"}}}, "rows that refer to others need seeds"),
    ],
)
def test_wrong_references(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    free = {"claims": [], "published": {}, "space": {"y": [1]}}
    with pytest.raises(InputError, match=message):
        reproduce(tmp_path, **FILE | free | changes)


def test_folders_with_quotes(tmp_path: Path) -> None:
    """A path is written as Hydra reads it."""
    from mtl.tune.definition import Definition

    found = Definition("n", "two/a", [START], {}, {}, {}, 0, {"{one}": "one/a"})
    [word] = launch.Launcher([], Path("/a'b")).words(found, 2)
    assert word == r"start='/a\'b/one/a/trial_00002/last'"
