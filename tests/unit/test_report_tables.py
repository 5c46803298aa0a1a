"""The comparison of settings and its tables: values by hand, what fits into 80 columns, and delta-m."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from rich.console import Console
from scipy.stats import ttest_ind, ttest_rel

from mtl.checks import InputError
from mtl.cli.report import main
from mtl.files.tables import Bold
from mtl.report.comparison import ComparisonTable, compare_settings
from mtl.report.runs import FINISHED, Runs, by_data, read_runs, with_means
from mtl.report.statistics import Difference, delta_m
from tests.run_folders import write_run

MAIN = {"click": "auprc", "minutes": "rmse"}
SCORES: dict[str, dict[int, tuple[float, float | None]]] = {  # by network, then seed
    "mmoe": {1: (0.70, 1.5), 2: (0.72, 1.7)},
    "shared_bottom": {1: (0.68, 1.5), 2: (0.71, None)},
    "single_task": {1: (0.69, 1.4), 3: (0.90, 1.2)},
}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    runs = [(network, seed, values) for network, seeds in SCORES.items() for seed, values in seeds.items()]
    for number, (network, seed, (auprc, rmse)) in enumerate(runs):
        words = [f"network={network}", "data=table", f"seed={seed}"]
        test = {"loss": 0.5, "click/auprc": auprc, "minutes/rmse": rmse, "experts_per_sample": 2.0}
        write_run(tmp_path / "sweep" / f"{number}_x", words, test, MAIN, seed)
    return tmp_path / "sweep"


def many(num_tasks: int, num_settings: int, lacking: pl.Expr | None = None) -> Runs:
    """Return runs with a difference of 1 between the means of settings, of which the last is the best.

    ``lacking``: replaces the values of a column.
    """
    main = {f"task_{n:03}": "mse" for n in range(num_tasks)}
    rows = [
        {"run": f"{setting}_{seed}", "state": "finished", "reason": None, "setting": f"gate{setting}", "seed": seed}
        | {f"test/{task}/mse": n + 0.5 * seed - setting for n, task in enumerate(main)}
        | {"test/loss": 10.0 * seed}
        for setting in range(num_settings)
        for seed in range(2)
    ]
    table = pl.DataFrame(rows).with_columns(*([] if lacking is None else [lacking]))
    return Runs(with_means(table), "gate", main)


def shown(comparison: ComparisonTable, width: int) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(comparison.table().fitting(width))
    text = captured.get()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    return text


def test_console_at_80_columns(sweep: Path) -> None:
    comparison = compare_settings(
        read_runs([sweep]), reference="shared_bottom", columns=["test/click/auprc", "test/minutes/rmse"]
    )
    assert [line.rstrip() for line in shown(comparison, 80).splitlines()] == [
        "                                        against",
        "                                 shared_bottom,",
        "network         click auprc ↑                 %   minutes rmse ↓",
        "─" * 64,
        "single_task     0.795 ± 0.105   +14 [-162, 191]      1.30 ± 0.10",
        "mmoe            0.710 ± 0.010      +2 [-11, 15]      1.60 ± 0.10",
        "shared_bottom   0.695 ± 0.015                         1.50 (1/2)",
    ]
    assert comparison.sentence() == (
        "click auprc against shared_bottom: nothing is decided; "
        "the best of the others, single_task, changes it by +14 % [-162, 191]."
    )
    assert comparison.table().fitting(40).notes[-1] == "Not shown here: against shared_bottom, %, minutes rmse ↓."
    assert comparison.notes == []
    assert any(line.startswith("(m/n)") for line in comparison.table().notes)


def test_markdown_with_published_rows(sweep: Path) -> None:
    published = {
        "shared_bottom": {"test/click/auprc": (0.65, 0.01), "test/loss": (0.4, None)},
        "gumbel": {"test/loss": (0.25, None)},
    }
    table = compare_settings(read_runs([sweep])).table(published)
    lines = table.markdown().splitlines()
    assert lines[0] == "| network | loss ↓ | against mmoe, % | click auprc ↑ | minutes rmse ↓ |"
    assert lines[1] == "| --- | --: | --: | --: | --: |"
    assert lines[2] == "| mmoe | 0.5000 |  | 0.710 ± 0.010 | 1.60 ± 0.10 |"
    assert lines[4] == "| shared_bottom, published | 0.4 |  | 0.65 ± 0.01 | - |"
    assert lines[5] == "| single_task | 0.5000 | +0 | 0.795 ± 0.105 | 1.30 ± 0.10 |"
    assert lines[6] == "| gumbel, published | 0.25 |  | - | - |"
    assert any("by Welch's t test, bold if it excludes 0; 2 comparisons, not corrected" in line for line in table.notes)


def losses(**settings: list[tuple[Any, Any, float]]) -> ComparisonTable:
    """Compare runs of some settings, each given as (seed, data.seed, loss)."""
    rows = [(name, FINISHED, *row) for name, own in settings.items() for row in own]
    columns = {
        "setting": pl.String,
        "state": pl.String,
        "seed": pl.Int64,
        "data_seed": pl.Int64,
        "test/loss": pl.Float64,
    }
    return compare_settings(Runs(pl.DataFrame(rows, columns, orient="row"), "gate", {}))


ONE, TWO = [1.0, 2.0, 3.0], [1.11, 2.10, 3.12]


@pytest.mark.parametrize(
    ("seeds", "others", "pairs"),
    [
        ([(1, 0), (1, 0), (1, 0)], [(2, 0), (2, 0), (2, 0)], 0),
        ([(1, 0), (1, 0), (1, 0)], [(1, 0), (1, 0), (1, 0)], 0),
        ([(None, 0)] * 3, [(None, 0)] * 3, 0),
        ([(1, 0), (2, 0), (3, 0)], [(1, 0), (2, 0), (4, 0)], 0),  # two pairs are too few
        ([(1, 0), (2, 0), (3, 0)], [(1, 7), (2, 7), (3, 7)], 0),  # on other rows
        ([(1, 0), (2, 0), (3, 0)], [(1, None), (2, None), (3, None)], 0),
        ([(1, 0), (2, 0), (3, 0)], [(1, 0), (2, 0), (3, 0)], 3),
        ([(1, 0), (1, 1), (1, 2)], [(1, 0), (1, 1), (1, 2)], 3),
        ([(1, None), (2, None), (3, None)], [(1, None), (2, None), (3, None)], 3),
    ],
)
def test_only_runs_of_equal_and_unique_seeds_are_pairs(seeds: Any, others: Any, pairs: int) -> None:
    test = ttest_rel(TWO, ONE) if pairs else ttest_ind(TWO, ONE, equal_var=False)
    for order in ([0, 1, 2], [2, 0, 1]):  # of the rows
        first = [(*seed, value) for seed, value in zip(seeds, ONE, strict=True)]
        second = [(*others[n], TWO[n]) for n in order]
        found = losses(A=first, B=second).gains["B"]
        assert (found.pairs, found.mean) == (pairs, pytest.approx(-100 * 0.11 / 2))  # a smaller loss is a gain
        assert found.p == pytest.approx(test.pvalue)


def test_one_common_seed_does_not_outweigh_the_others() -> None:
    x, y = [1.0, 1.1, 0.9, 1.05, 0.95], [3.0, 0.3, 0.4, 0.5, 1.1]
    comparison = losses(A=[(n, 0, v) for n, v in enumerate(x)], B=[(n and n + 9, 0, v) for n, v in enumerate(y)])
    assert comparison.gains["B"].mean == pytest.approx(-6)  # not -200, that of seed 0
    assert comparison.notes == []


def test_sentence_says_who_is_better_by_how_much_and_the_table_marks_it() -> None:
    runs = {"A": [1.0, 1.1, 0.9], "B": [0.5, 0.55, 0.46], "C": [2.0, 2.1, 1.92], "D": [1.02, 1.05, 0.97]}
    found = losses(**{name: [(seed, 0, value) for seed, value in enumerate(own)] for name, own in runs.items()})
    better, worse = (found.gains[name] for name in "BC")
    low, high = ttest_rel(runs["B"], runs["A"]).confidence_interval(0.95)
    assert (better.mean, better.interval) == (
        pytest.approx(49.667, abs=0.001),
        pytest.approx((-100 * high, -100 * low)),
    )
    assert found.sentence() == (
        f"loss against A: B is better by {better.text(' %', '')}; "
        f"C is worse by {worse.scaled(-1).text(' %', '')}; D is undecided."
    )
    rows = {row[0]: row[2] for row in found.table().rows}
    assert list(rows) == ["B", "A", "D", "C"]  # the smallest loss first
    assert [name for name, change in rows.items() if isinstance(change, Bold)] == ["B", "C"]
    assert rows["B"] == "-50 [-63, -36]"


def test_changes_have_as_many_decimals_as_their_interval() -> None:
    texts = {
        (2.5234, 0.2): "+2.52 [1.89, 3.16]",
        (-0.04, 0.02): "-0.040 [-0.104, 0.024]",
        (95.1927, 1e-9): "+95.19 [95.19, 95.19]",
    }
    for (mean, error), text in texts.items():
        assert Difference(mean, error, 4, 4, 3.0).text() == text
    assert Difference(-0.0, 0.0, 3, 3, 2.0).text(" %") == "+0 %"
    assert Difference(3.14159, None, 1, 0).text() == "+3.1"


@pytest.mark.parametrize("num_settings", [1, 3, 16])
@pytest.mark.parametrize("num_tasks", [1, 4, 16])
def test_every_size_fits(num_tasks: int, num_settings: int) -> None:
    text = shown(compare_settings(many(num_tasks, num_settings)), 80)
    assert text.count("\n") <= max(40, 12 * num_settings)
    assert "..." not in text
    assert "…" not in text
    for setting in range(num_settings):
        assert f"gate{setting}" in text


def test_many_tasks_are_a_mean() -> None:
    comparison = compare_settings(many(128, 2))
    assert [quantity.name for quantity in comparison.quantities] == ["loss", "mean mse"]
    mean = comparison.quantities[1]
    assert mean.means["gate1"].mean == 63.5 + 0.25 - 1
    assert comparison.notes == [
        "summary.csv has the values of each of the 128 tasks.",
        "gate1 is better than gate0 on 128 of 128 tasks.",
    ]


@pytest.mark.parametrize(("lacking", "text"), [(None, "-"), (math.nan, "- (0/2)")])
def test_a_mean_over_tasks_needs_all_of_them(lacking: float | None, text: str) -> None:
    runs = many(17, 1, pl.lit(lacking, pl.Float64).alias("test/task_003/mse"))
    assert compare_settings(runs).table().rows[0][2] == text


def test_a_mean_over_many_tasks_is_over_those_that_all_runs_have() -> None:
    runs = many(128, 1, pl.lit(math.nan).alias("test/task_003/mse"))
    comparison = compare_settings(runs)
    assert comparison.quantities[1].means["gate0"].mean == pytest.approx((127 * 64 - 3) / 127 + 0.25)
    assert comparison.notes[1] == "Means over tasks are over the 127 where all runs have a defined value."


def test_values_that_no_run_has() -> None:
    """Undefined ones are counted; a quantity that a setting does not have is no fault of its runs."""
    own = pl.when(pl.col("setting") == "gate0").then(pl.lit(None, pl.Float64)).otherwise(pl.col("test/task_004/mse"))
    table = many(17, 2).table.with_columns(pl.lit(math.nan).alias("test/loss"), own.alias("test/task_004/mse"))
    comparison = compare_settings(
        replace(many(17, 2), table=table), columns=["test/loss", "test/none", "test/task_004/mse"]
    )
    assert comparison.table().rows == [["gate0", "- (0/2)", "-"], ["gate1", "- (0/2)", "3.25 ± 0.25"]]
    assert comparison.notes[0] == "No run has test/none."


def test_command(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["network=mmoe", "data=table", "seed=9"]
    write_run(sweep / "9_killed", words, None, log="12:00:01 INFO mtl: epoch 4 of [x]\n")
    main([str(sweep), "--also", "experts_per_sample", "--latex"])
    printed = capsys.readouterr().out
    assert "1 of 7 runs have not finished:\n9_killed unfinished: epoch 4 of [x]" in printed
    assert "experts_per_sample" in printed
    assert "2 of 3" in printed
    rows = pl.read_csv(sweep / "summary.csv")
    assert rows["test/minutes/rmse"].to_list() == [1.5, 1.7, 1.5, pytest.approx(math.nan, nan_ok=True), 1.4, 1.2, None]
    assert rows["option network"].to_list() == [name for name in SCORES for _ in range(2)] + ["mmoe"]
    assert "9_killed unfinished" in (sweep / "summary.md").read_text()
    assert r"\toprule" in (sweep / "summary.tex").read_text()


def test_several_folders_give_a_page_in_the_current_one_with_a_section_for_each_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, data in enumerate(["books", "jester", "books"]):
        words = [f"data={data}", f"gate=g{number}", *(["data.k=1"] if data == "books" else [])]
        write_run(tmp_path / f"sweep{number}" / "0_x", words, {"loss": float(number)}, choices={"data": data})
    monkeypatch.chdir(tmp_path)
    main(["sweep0", "sweep1", "sweep2"])
    text = Path("summary.md").read_text()
    headings = [line for line in text.splitlines() if line.startswith("#")]
    where = "## Where the numbers come from"
    assert headings == ["# 3 runs", "## books", "## jester", "## Costs", "### books", "### jester", where]
    assert text.count("\n| gate | loss ↓ |") == 1  # by which the runs on books differ
    assert pl.read_csv("summary.csv")["run"].to_list() == ["sweep0/0_x", "sweep1/0_x", "sweep2/0_x"]
    assert Path("report.html").read_text().count("<table") == 4


def test_bad_input_is_one_line(sweep: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"error: .*nowhere: no such folder"):
        main([str(tmp_path / "nowhere")])
    message = r"--also nothing: no run has this column; among those of summary.csv are seed"
    with pytest.raises(InputError, match=message):
        compare_settings(read_runs([sweep]), ["nothing"])
    assert list(tmp_path.rglob("summary.*")) == []


BOTH = {"click": "auprc", "minutes": "mse"}


def test_sign_by_direction_and_undefined() -> None:
    assert delta_m([0.6, 3.0], [0.5, 4.0], [True, False]) == pytest.approx((20 + 25) / 2)
    assert delta_m([-1.0], [-2.0], [True]) == pytest.approx(50)  # a negative value, such as R2
    for values, singles in (([0.6, 3.0], [0.5, 0.0]), ([0.6, 3.0], [0.5, None]), ([0.6, math.nan], [0.5, 4.0])):
        assert math.isnan(delta_m(values, singles, [True, False]))


def test_delta_m_is_by_pairs_if_all_runs_have_one_and_else_by_means(tmp_path: Path) -> None:
    def run(network: str, seed: int, click: float, data: str = "a") -> None:
        words, test = [f"network={network}"], {"loss": 1.0, "click/auprc": click, "minutes/mse": 2.0}
        choices = {"network": network, "data": data}
        write_run(tmp_path / f"{network}{seed}{data}", words, test, BOTH, seed=seed, choices=choices)

    for seed, click in ((0, 0.5), (1, 0.4)):
        run("single_task", seed, click)
    for seed in (0, 1):
        run("mmoe", seed, 0.6)
    runs = read_runs([tmp_path])
    assert dict(zip(runs.table["run"], runs.table["test/delta_m"], strict=True)) == {
        str(tmp_path / name): pytest.approx(value)
        for name, value in {"single_task0a": 0, "single_task1a": 0, "mmoe0a": 10, "mmoe1a": 25}.items()
    }
    run("mmoe", 2, 0.45)  # the mean of single_task
    run("mmoe", 3, 0.9, data="b")
    runs = read_runs([tmp_path])
    assert dict(zip(runs.table["seed"], runs.table["test/delta_m"], strict=True))[3] is None  # other data
    [delta] = [each for each in compare_settings(runs).quantities if each.column == "test/delta_m"]
    assert list(delta.values["single_task"].values()) == pytest.approx([100 / 18, -100 / 18])
    assert [value for value in delta.values["mmoe"].values() if value is not None] == pytest.approx(
        [100 / 6, 100 / 6, 0]
    )
    assert any("Maninis" in note for note in compare_settings(runs).notes)


def test_tables_of_different_files_are_different_data(tmp_path: Path) -> None:
    for name, words in {
        "a": ["data.path=one.csv"],
        "b": ["data.path=two.csv"],
        "c": ["data.path=one.csv"],
        "d": [],
    }.items():
        write_run(tmp_path / name, words, {"loss": 1.0}, choices={"data": "table" if words else "cglue"})
    found = {name: [path.name for path in paths] for name, paths in by_data(sorted(tmp_path.iterdir())).items()}
    assert found == {"table (one.csv)": ["a", "c"], "table (two.csv)": ["b"], "cglue": ["d"]}
    assert list(by_data([tmp_path / "a", tmp_path / "d"])) == ["table", "cglue"]


def test_no_single_task_run_no_column(tmp_path: Path) -> None:
    write_run(tmp_path / "0", ["gate=topk"], {"loss": 1.0, "click/auprc": 0.5}, BOTH, choices={"network": "mmoe"})
    assert "test/delta_m" not in read_runs([tmp_path]).table.columns
