"""The page of a report: what a section holds, texts that are escaped, and nothing that is loaded from elsewhere."""

from __future__ import annotations

import base64
import html
import json
import re
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from markdown_it import MarkdownIt
from matplotlib.figure import Figure

from mtl.checks import InputError
from mtl.files.escaping import markdown, plain
from mtl.files.run_files import PREDICTIONS
from mtl.files.tables import Bold, Table
from mtl.report.page import Link, Page, Section, picture
from mtl.report.runs import read_named_runs
from mtl.report.section import DIFFERENT_ROWS, costs_of, section_of
from mtl.report.summary import describe_runs
from mtl.runs.predictions_file import METADATA
from tests.run_folders import write_run

MAIN = {"click": "auprc"}
NASTY = '<script>alert("x")</script> & <b>|'
Named = dict[Path, tuple[str, int | None]]


def html_of(section: Section, *lead: str, title: str = "") -> str:
    return Page(title, [section], pl.DataFrame(), ["of 6 runs"], [lead] if lead else []).html()


def rows_of(page: str) -> list[list[str]]:
    """Return the texts of the cells of all tables."""
    rows = re.findall(r"<tr.*?</tr>", page, flags=re.DOTALL)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, flags=re.DOTALL) for row in rows]
    return [[html.unescape(re.sub(r"<[^>]+>", "", cell)) for cell in row] for row in cells]


@pytest.fixture
def named(tmp_path: Path) -> Named:
    """Runs of a setting with an undefined value, of one with a single run, and of one that failed."""
    values = {"COMET": [(0.50, 0.71), (0.52, 0.72)], NASTY: [(0.60, 0.70), (0.61, None)], "alone": [(0.55, 0.5)]}
    named: Named = {}
    for setting, found in values.items():
        for seed, (loss, auprc) in enumerate(found):
            test = {"loss": loss, "click/auprc": auprc, "experts_per_sample": 2.0, "flops_selected": 1234.5}
            folder = write_run(tmp_path / str(len(named)), [], test, MAIN, seed)
            named[folder] = (setting, seed)
    failed = write_run(tmp_path / "failed", [], None, log=f"12:00:01 ERROR mtl: NaN loss {NASTY}\n")
    return named | {failed: ("broken", 0)}


def test_a_page_stands_alone_and_shows_what_went_wrong(named: Named) -> None:
    routing = next(iter(named)) / "routing"
    routing.mkdir()
    drawn = picture(Figure(figsize=(1, 1)), "a caption")
    (routing / "weights_over_training_layer_0.png").write_bytes(drawn.png)
    published = {"COMET": {"test/loss": (0.49, 0.01), "test/other": (1.0, None)}}
    section = replace(section_of(read_named_runs(named, NASTY), NASTY, published=published, curves={}), command=NASTY)
    page = html_of(section, NASTY, Bold(NASTY), title=NASTY)
    assert page.count("<script") == 1  # ours, which sorts tables
    assert "<b>" not in page
    assert not re.search(r"https?:|@import|url\(", page)
    [address, csv] = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert csv == "summary.csv"
    assert base64.b64decode(address.removeprefix("data:image/png;base64,")) == drawn.png
    table = {row[0]: row[1:] for row in rows_of(page)[:6]}
    assert list(table) == [NASTY, "COMET", "COMET, published", "alone", "broken"]  # the header has the same name
    assert table["COMET"] == ["2", "0.5100 ± 0.0100", "", "0.7150 ± 0.0050"]
    assert table["COMET, published"] == ["", "0.49 ± 0.01", "", "-"]
    assert table["alone"] == ["1", "0.5500", "+7.8", "0.5000"]
    assert table[NASTY] == ["2", "0.6050 ± 0.0050", "+19 [5, 32]", "0.7000 (1/2)"]
    assert table["broken"] == ["0 of 1", "- (0/1)", "-", "- (0/1)"]
    assert "<strong>+19 [5, 32]</strong>" in page
    assert "t test, bold if it excludes 0; 2 comparisons, not corrected" in page
    assert page.count("is worse by 19 % [5, 32]; 2 are undecided.") == 1
    assert page.index("is worse by 19 %") < page.index("<table")
    assert "1 of 6 runs have not finished:" in page
    assert "Published, but no run has it: test/other." in page


def test_runs_that_were_tested_on_different_rows_say_so(tmp_path: Path) -> None:
    """Unless another ``data.seed`` drew them; a run without predictions says nothing."""
    folders = {write_run(tmp_path / name, [], {"loss": 1.0}): (name, 0) for name in "abc"}
    for name, digest in (("a", "1"), ("b", "2")):
        metadata = {METADATA: json.dumps({"tasks": {}, "digests": {"test": digest}})}
        pl.DataFrame({"x": [1]}).write_parquet(tmp_path / name / PREDICTIONS, metadata=metadata)
    runs = read_named_runs(folders)
    assert section_of(runs, "", columns=["test/loss"]).notes == [DIFFERENT_ROWS]
    seeds = replace(runs, table=runs.table.with_columns(data_seed=pl.Series([1, 2, 2])))
    assert section_of(seeds, "", columns=["test/loss"]).notes == []


def test_a_picture_has_a_caption_only_if_it_says_more_than_the_picture() -> None:
    silent, spoken = (replace(picture(Figure(figsize=(1, 1)), text, "click by epoch"), width=640) for text in ("", "b"))
    page = html_of(Section("", figures=[silent, spoken]))
    assert page.count('alt="click by epoch"') == 2
    assert re.findall("<figcaption>(.*?)</figcaption>", page) == ["b"]
    assert page.count("--width: 640px") == 2  # no wider than the screen: see the style sheet


def test_a_folded_table_shows_its_title_alone() -> None:
    table = Table(["x"], [["1"]], "2 <others>", folded=True)
    assert "<details><summary>2 &lt;others&gt;</summary>" in html_of(Section("", tables=[table]))
    written = table.markdown()
    assert written.startswith("<details><summary>2 &lt;others&gt;</summary>\n\n| x |")
    assert written.endswith("\n\n</details>")


def test_verdicts_have_colours_and_no_other_text_has() -> None:
    table = Table(["claim", "verdict"], [["holds water", Bold("contradicted")], ["b", "holds"]])
    assert re.findall(r'<td class="(\w+)">(.*?)</td>', html_of(Section("", tables=[table]))) == [
        ("contradicted", "<strong>contradicted</strong>"),
        ("holds", "holds"),
    ]


MARKUP = [
    "*a*",
    "**b**",
    "_c_",
    "`d`",
    "[e](f)",
    "![g](h)",
    "<i>j</i>",
    "&lt;k",
    "l\\*",
    "m|n",
    "<https://o>",
    "p_q_r",
    "\\",
]


@pytest.mark.parametrize("name", MARKUP)
def test_names_are_text_whatever_they_look_like(name: str) -> None:
    def page(cell: str) -> Page:
        section = Section(name, [name], name, tables=[Table(["x", name], [["a", cell]], name, [name])], notes=[name])
        return Page(name, [section], pl.DataFrame(), [name], [[cell, Link("a", "b")]])

    read = MarkdownIt("commonmark", {"html": False}).enable("table").render(page(name).markdown())
    for written in (page(name).html(), page(Bold(name)).html(), read):
        body = written.rpartition("</head>")[2]
        assert html.unescape(re.sub(r"<[^>]+>", "", body)).count(name) == 11
    assert plain(markdown(name)) == name


def test_the_page_says_where_the_numbers_come_from(tmp_path: Path) -> None:
    assert describe_runs([tmp_path]) == []
    folders = [write_run(tmp_path / str(n), [], {"loss": 1.0}, {}, n) for n in range(3)]
    for number, folder in enumerate(folders[:2]):
        record = json.loads((folder / "results.json").read_text())
        record |= {
            "epochs": 10 * (number + 1),
            "seconds_per_epoch": 60.0,
            "finished": f"2026-01-0{number + 1}T10:20:30",
        }
        record |= {"data": {"rows": {"train": 1000, "val": {"a": 20, "b": 30}}, "files": ["visits.csv"]}}
        record |= {"versions": {"mtl": "0.1", "commit": "0123456789abcdef-dirty"}, "command": "mtl train"}
        (folder / "results.json").write_text(json.dumps(record))
    (folders[2] / "results.json").unlink()
    assert describe_runs(folders) == [
        "Runs: 2 of 3 finished, 2026-01-01 10:20 to 2026-01-02 10:20.",
        "Budget: 10 to 20 epochs a run, 30 minutes of training in all.",
        "Data: unnamed (visits.csv), rows: 1,000 train, 50 val",
        "Code: mtl 0.1, commit 0123456789ab with local changes",
        "Command: mtl train",
    ]


def test_costs_are_means_of_what_runs_say(named: Named) -> None:
    costs = costs_of(read_named_runs(named), "alone")
    assert costs is not None
    assert costs.header[1:4] == ["experts per sample", "FLOPs per sample", "parameters"]
    assert costs.header[-2:] == ["FLOPs per sample / alone", "FLOPs of training / alone"]
    rows = costs.rows
    assert rows[0] == ["COMET", "2", "1,234", "1,234", "1.5", "1", "1"]
    assert rows[-1] == ["broken", *"------"]
    for baseline, message in (("none", "must be one of the settings COMET"), ("broken", "no run of it has FLOPs")):
        with pytest.raises(InputError, match=f"baseline={baseline}: {message}"):
            costs_of(read_named_runs(named), baseline)
    failed = {folder: name for folder, name in named.items() if name[0] == "broken"}
    assert section_of(read_named_runs(failed), "t").costs is None


@pytest.mark.parametrize("training", [None, [9000.0, 9000.0, 6000.0]])  # what training batches used, if runs say it
def test_flops_relative_to_a_baseline(training: list[float] | None, tmp_path: Path) -> None:
    named: Named = {}
    flops = [4000.0, 6000.0, 1000.0]
    for number, setting in enumerate(["dense", "dense", "sparse"]):
        folder = write_run(tmp_path / str(number), [], {"loss": 1.0, "flops_selected": flops[number]}, {}, number)
        record = json.loads((folder / "results.json").read_text()) | {"epochs": 10 * (number + 1)}
        if training:
            record["numbers"]["training"] = {"network": {"flops_selected": training[number]}}
        (folder / "results.json").write_text(json.dumps(record))
        named[folder] = (setting, number)
    first, second, sparse = training or flops
    costs = costs_of(read_named_runs(named), "dense")
    assert costs is not None
    assert costs.rows[1][-2:] == ["0.2", f"{sparse * 30 / ((first * 10 + second * 20) / 2):.3g}"]
