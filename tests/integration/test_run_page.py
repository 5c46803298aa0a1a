"""The page of one run: its sections, odd labels and names, and a run whose rows are gone."""

from __future__ import annotations

import json
import re
import shutil
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
from omegaconf import DictConfig

import mtl
from mtl.checkpoints.files import read
from mtl.checks import InputError
from mtl.cli.report import main
from mtl.config.portable import places_of
from mtl.use import run_page

SMALL = {"embedding_dim": 4, "num_experts": 2, "expert_units": [8], "head_units": [8], "max_epochs": 2}
NASTY = "<script>alert(1)<b>|"
OPTIONS = {"logger": "csv", "trainer.accelerator": "cpu", "callbacks.routing.figures": True}
ERRORS = ("kind: recall by class", "Prediction minus label: quantiles")
SECTIONS = ["How good it is", "Losses by epoch", "Where it is wrong", "Experts by task", "On what it relies"]


def rows(count: int, seed: int) -> pl.DataFrame:
    """Return rows with a task of each kind; ``size`` lacks every third label."""
    draw = np.random.default_rng(seed)
    x, word = draw.normal(size=count), draw.choice(["a", "b", NASTY], count)
    size = np.where(np.arange(count) % 3 == 0, np.nan, 2 * x)
    kind = np.where(x < -0.5, "low", np.where(x < 0.5, "mid", NASTY))
    return pl.DataFrame({"x": x, f"_{NASTY}": word, "click": (x > 0).astype(int), "size": size, "kind": kind})


def page_of(folder: Path) -> tuple[str, list[str]]:
    """Return the page of a run and its headings."""
    page = (folder / "report.html").read_text()
    return page, [unescape(each) for each in re.findall(r"<h[23]>(.*?)</h[23]>", page)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on rows in memory, of whose test rows none is a purchase."""
    folder = tmp_path_factory.mktemp("page") / "run"
    tasks = {f"{NASTY}$_": {"kind": "binary", "column": "click"}, "bought": "binary", "size": "regression"}
    train = rows(200, 0).with_columns(bought=pl.col("click"))
    test = rows(60, 1).with_columns(bought=0)
    mtl.fit(
        train,
        tasks | {"kind": "multiclass"},
        test=test,
        folder=folder,
        options=OPTIONS,
        report=True,
        progress=False,
        **SMALL,
    )
    return folder


def test_the_page_of_a_run_has_all_sections(run: Path) -> None:
    page, headings = page_of(run)
    tasks = [f"{NASTY}$_", "bought", "size", "kind"]
    assert [each for each in headings if each not in (*ERRORS, *tasks)] == [
        *SECTIONS,
        "Largest errors",
        "Costs",
    ]
    assert headings[-5:-1] == tasks  # with a table of rows each
    assert page.count("<figure") == 4 + 3 + 2 + 1  # losses; of binary tasks; of a number and of classes; experts
    assert "<details><summary>Where the numbers come from" in page
    assert "the test rows have one class: bought" in unescape(page)
    assert page.count("<script") == 1  # ours, which sorts tables
    text = (run / "summary.md").read_text()
    assert f"{tasks[0].replace('<', '&lt;')}: auroc" in text.replace("\\", "")
    assert "better than a constant" in text
    assert "bought: auroc is undefined on these test rows. Next: " in text
    assert "| bought | 60 | 0 | 0 (0.0%) |" in text  # labels, missing, positives
    assert "| size | 40 | 20 |" in text
    epoch = int(read(run)["epoch"])
    assert f"Tested: epoch {epoch} of 0 to 1, the best by val/loss on the validation rows" in text.replace("\\", "")
    assert "nan" not in text.partition("## On what it relies")[2].partition("##")[0]  # bought has no auroc


def test_rows_with_the_largest_errors_are_those_of_the_table(run: Path) -> None:
    text = (run / "summary.md").read_text().partition("### size\n")[2]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines()[3:8]]
    test, found = rows(60, 1), [(int(row), float(label), float(said)) for row, label, said, *_ in lines]
    for row, label, _ in found:
        assert test["size"][row - 1] == pytest.approx(label, rel=1e-5)
    predicted = mtl.load(run).predict(test)["size_prediction"]
    errors = (predicted - test["size"]).abs().fill_nan(None).drop_nulls().sort(descending=True)
    assert [abs(label - said) for _, label, said in found] == pytest.approx(errors[:5].to_list(), rel=0.01)


def test_columns_are_sorted_by_their_importance_among_those_of_each_task() -> None:
    """A column that one task needs comes before one that helps all a little; undefined ones are last."""
    values = {"weak": (0.01, 0.02), "strong": (0.4, -0.1), "undefined": (None, None), "useless": (-0.1, 0.0)}
    rows = [(task, name, "auroc", pair[index]) for name, pair in values.items() for index, task in enumerate("ab")]
    table = pl.DataFrame(rows, ["task", "column", "metric", "importance"], orient="row")
    model: Any = SimpleNamespace(columns=[*values], importance=lambda *args, **options: table)
    order = [row[0] for row in run_page._importance(model, table, ["a", "b"]).rows]
    assert order == ["weak", "strong", "useless", "undefined"]  # means of 0.01 / 0.4 and 1; of 1 and 0


@pytest.mark.usefixtures("no_pictures")
def test_a_run_whose_rows_are_gone_has_a_page_with_what_is_left(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(run, tmp_path / "run")
    record = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps(record | {"advice": ["Train longer."]}))
    main([str(run), "--curve", "val/nothing", "--latex"])
    _, headings = page_of(run)
    assert [each for each in headings if each not in ERRORS] == [*SECTIONS[:4], "Costs"]
    printed = capsys.readouterr().out
    assert "Train longer." in printed
    gone = "The test rows cannot be read again, so what needs them is left out"
    assert f"{gone}: they were in memory" in printed
    assert "the run has not logged val/nothing" in printed
    assert r"\begin{tabular}" in (run / "summary.tex").read_text()
    (run / "command.json").unlink()  # as if they had been in a file
    main([str(run)])
    assert f"{gone}: data.test_path=test: no such file" in capsys.readouterr().out
    (run / "results.json").write_text("{")  # damaged
    main([str(run)])
    assert "1 of 1 runs have not finished" in capsys.readouterr().out


@pytest.mark.usefixtures("no_pictures")
def test_the_page_reads_the_data_where_the_run_did_and_never_where_a_checkpoint_says(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = shutil.copytree(run, tmp_path / "run")
    data = {"_target_": "x", "data_dir": "/theirs", "base_url": "http://theirs", "size": 3}
    config: dict[str, Any] = {"data": data, "network": {}}
    stranger = SimpleNamespace(path=run, config=lambda trust: config, get={"epoch": 0}.get)
    monkeypatch.setattr(run_page, "read", lambda *given: stranger)
    read: list[dict[str, Any]] = []

    def build_data(cfg: DictConfig) -> None:
        read.append(dict(cfg.data))
        raise InputError("offline")

    monkeypatch.setattr(run_page.build, "build_data", build_data)
    monkeypatch.delenv("MTL_DATA_DIR", raising=False)
    main([str(run)])
    main([str(run), "--data-dir", "/sets"])
    ours = {"data_dir": "/ours", "base_url": "http://ours", "size": 4}  # as ``run`` does, with its configuration
    run_page.write_run_page(run, places=places_of(ours))
    rest = {"_target_": "x", "size": 3}
    assert read == [
        {**rest, "data_dir": "data"},
        {**rest, "data_dir": "/sets"},
        {**rest, "data_dir": "/ours", "base_url": "http://ours"},
    ]
