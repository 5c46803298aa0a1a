"""The comparison of settings and its tables: values by hand, and what fits into 80 columns."""

from __future__ import annotations

import math
from pathlib import Path

import polars as pl
import pytest
from rich.console import Console
from scipy.stats import ttest_ind

from mtl.checks import InputError
from mtl.report.__main__ import main
from mtl.report.compare import Comparison, Contest, compare, contest
from mtl.report.grid import Published, grid, value_text
from mtl.report.runs import Runs, read_runs, with_means
from mtl.report.tables import console_tables, explanation, markdown
from tests.run_folders import write_run

MAIN = {"click": "auprc", "minutes": "rmse"}
SCORES: dict[str, dict[int, tuple[float, float | None]]] = {  # by network, then seed
    "mmoe": {1: (0.70, 1.5), 2: (0.72, 1.7)},
    "shared_bottom": {1: (0.68, 1.5), 2: (0.71, None)},
    "single_task": {1: (0.69, 1.4), 3: (0.90, 1.2)},
}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    number = 0
    for network, seeds in SCORES.items():
        for seed, (auprc, rmse) in seeds.items():
            words = [f"network={network}", "data=table", f"seed={seed}"]
            test = {"loss": 0.5, "click/auprc": auprc, "minutes/rmse": rmse, "experts_per_sample": 2.0}
            write_run(tmp_path / "sweep" / f"{number}_x", words, test, MAIN, seed)
            number += 1
    return tmp_path / "sweep"


def many(num_tasks: int, num_settings: int, num_seeds: int = 2) -> Runs:
    """Return runs with a difference of 1 between the means of settings, of which the last is the best."""
    main = {f"task_{n:03}": "mse" for n in range(num_tasks)}
    rows = []
    for setting in range(num_settings):
        for seed in range(num_seeds):
            row = {
                "run": f"{setting}_{seed}",
                "state": "finished",
                "reason": None,
                "setting": f"gate{setting}",
                "seed": seed,
            }
            values = {f"test {task}/mse": n + 0.5 * seed - setting for n, task in enumerate(main)}
            rows.append(row | {"test loss": 10.0 * seed} | values)
    return Runs(with_means(pl.DataFrame(rows)), "gate", main, {"mse": False, "loss": False})


def shown(comparison: Comparison, width: int, mark: str = "*") -> str:
    console = Console(width=width)
    with console.capture() as captured:
        for table in console_tables(comparison, width, mark):
            console.print(table)
    text = captured.get()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    return text


def test_cells_of_a_comparison(sweep: Path) -> None:
    comparison = compare(read_runs([sweep]))
    assert (comparison.heading, comparison.settings) == ("network", list(SCORES))
    assert [quantity.name for quantity in comparison.quantities] == ["loss", "click auprc", "minutes rmse"]
    auprc = [comparison.cells[setting, "click auprc"] for setting in SCORES]
    assert [cell.value.mean for cell in auprc] == pytest.approx([0.71, 0.695, 0.795])
    assert [cell.best for cell in auprc] == [False, False, True]  # higher is better
    assert auprc[0].difference is None
    assert auprc[1].difference is not None
    assert auprc[1].difference.mean == pytest.approx(-0.015)
    rmse = [comparison.cells[setting, "minutes rmse"] for setting in SCORES]
    assert [(cell.value.count, cell.value.undefined) for cell in rmse] == [(2, 0), (1, 1), (2, 0)]
    assert [cell.best for cell in rmse] == [False, False, True]
    assert rmse[2].difference is not None
    assert (rmse[2].difference.mean, rmse[2].difference.pairs) == (pytest.approx(-0.1), 1)
    assert not any(comparison.cells[setting, "loss"].best for setting in SCORES)  # all are equal
    assert comparison.notes == ["single_task has 1 seed in common with mmoe, whose differences are shown."]


def test_a_setting_with_an_undefined_value_is_not_the_best() -> None:
    runs = many(1, 2)
    table = runs.table.with_columns(
        pl.when(pl.col("run") == "1_0").then(None).otherwise(pl.col("test task_000/mse")).alias("test task_000/mse")
    )
    comparison = compare(Runs(table, "gate", runs.main, runs.higher))
    assert [comparison.cells[setting, "task_000 mse"].best for setting in ("gate0", "gate1")] == [True, False]
    assert "(1/2)" in shown(comparison, 80)
    assert any(line.startswith("(m/n)") for line in explanation(comparison, "in bold"))


def test_console_at_80_columns(sweep: Path) -> None:
    text = shown(compare(read_runs([sweep])), 80)
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines == [
        "network         seeds              loss↓     click auprc↑   minutes rmse↓",
        "─" * 73,
        "mmoe                2    0.5000 ± 0.0000    0.710 ± 0.010     1.60 ± 0.10",
        "shared_bottom       2    0.5000 ± 0.0000    0.695 ± 0.015      1.50 (1/2)",
        "                                 +0.0000    -0.015 p=0.50           +0.00",
        "single_task         2    0.5000 ± 0.0000   0.795 ± 0.105*    1.30 ± 0.10*",
        "                                 +0.0000    -0.010 p=0.57    -0.10 p=0.17",
    ]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("num_settings", [1, 2, 3, 16])
@pytest.mark.parametrize("num_tasks", [1, 4, 16, 128])
def test_every_size_fits(num_tasks: int, num_settings: int, width: int) -> None:
    text = shown(compare(many(num_tasks, num_settings)), width)
    assert text.count("\n") <= max(40, 12 * num_settings)
    assert "..." not in text
    assert "…" not in text
    for setting in range(num_settings):
        assert f"gate{setting}" in text


def test_tasks_beside_or_below_each_other() -> None:
    few, more = compare(many(4, 2)), compare(many(16, 2))
    assert shown(few, 120).startswith("gate ")  # settings as rows
    assert shown(more, 120).startswith("gate →")  # settings as columns
    assert "task_015 mse" in shown(more, 80)


def test_many_tasks_are_a_mean_and_extremes() -> None:
    comparison = compare(many(128, 2))
    names = ["task_000", "task_001", "task_002", "task_125", "task_126", "task_127"]
    expected = ["loss", "mean over tasks of mse", *(f"{name} mse" for name in names)]
    assert [quantity.name for quantity in comparison.quantities] == expected
    cell = comparison.cells["gate1", "mean over tasks of mse"]
    assert (cell.value.mean, cell.best) == (63.5 + 0.25 - 1, True)
    assert comparison.notes == [
        "Of 128 tasks, those with the best and the worst means are shown; summary.csv has all.",
        "gate1 is better than gate0 on 128 of 128 tasks.",
    ]


def test_a_mean_over_tasks_needs_all_of_them() -> None:
    runs = many(17, 1)
    for lacking in (None, math.nan):
        table = with_means(runs.table.with_columns(pl.lit(lacking, pl.Float64).alias("test task_003/mse")))
        comparison = compare(Runs(table, "gate", runs.main, runs.higher))
        value = comparison.cells["gate0", "mean over tasks of mse"].value
        assert (value.mean, value.undefined) == (None, 0 if lacking is None else 2)


def test_markdown(sweep: Path) -> None:
    lines = markdown(compare(read_runs([sweep]))).splitlines()
    assert lines[0] == "| network | seeds | loss↓ | click auprc↑ | minutes rmse↓ |"
    assert lines[2] == (
        "| mmoe | 2 | 0.5000 ± 0.0000<br>[0.5000, 0.5000] | 0.710 ± 0.010<br>[0.700, 0.720] | "
        "1.60 ± 0.10<br>[1.50, 1.70] |"
    )
    assert "| **0.795 ± 0.105**<br>-0.010 p=0.57<br>[0.690, 0.900] |" in lines[4]
    against = "single_task against mmoe"  # shared_bottom has an undefined value
    assert lines[5] == f"| best against the next |  | - | p=0.28<br>{against} | p=0.084<br>{against} |"
    assert any("Welch's t test, two-sided" in line for line in lines)
    assert any("one-sided and unpaired; an asterisk marks p < 0.05" in line for line in lines)


def test_the_best_setting_is_tested_against_the_next_best() -> None:
    values = {
        f"s{n}": dict(enumerate(row)) for n, row in enumerate([(1.0, 1.2, 1.1), (2.0, 2.3, 1.9), (2.4, 2.2, 3.0)])
    }
    found = contest(values, higher=True)
    p = ttest_ind([2.4, 2.2, 3.0], [2.0, 2.3, 1.9], equal_var=False, alternative="greater").pvalue
    assert found == Contest("s2", "s1", pytest.approx(p))
    found = contest(values, higher=False)
    p = ttest_ind([1.0, 1.2, 1.1], [2.0, 2.3, 1.9], equal_var=False, alternative="less").pvalue
    assert found == Contest("s0", "s1", pytest.approx(p))
    assert contest(values, higher=None) is None  # no direction is the better one
    assert contest({"s0": {0: 1.0}, "s1": {0: 2.0}}, higher=True) is None  # single runs
    assert contest({"s0": values["s0"]}, higher=True) is None
    missing = values | {"s3": {0: 9.0, 1: 9.1, 2: math.nan}}  # a run that diverged
    assert contest(missing, higher=True) == contest(values, higher=True)


def test_columns_of_ones_own(sweep: Path) -> None:
    comparison = compare(read_runs([sweep]), columns=["test experts_per_sample", "test click/auprc", "test none"])
    assert [quantity.name for quantity in comparison.quantities] == ["experts_per_sample", "click auprc"]
    assert comparison.notes[0] == "No run has test none."


def test_published_rows_follow_ours(sweep: Path) -> None:
    published = [
        Published("shared_bottom", {"test click/auprc": (0.65, 0.01), "test loss": 0.4}, "100 runs"),
        Published("gumbel", {"test loss": 0.25}),
    ]
    comparison = compare(read_runs([sweep]))
    found = grid(comparison, True, published)
    assert found.rows[:5] == ["mmoe", "shared_bottom", "shared_bottom, published", "single_task", "gumbel, published"]
    assert [entry.value for entry in found.cells[2]] == ["", "0.4", "0.65 ± 0.01", "-"]
    assert all(entry.published for entry in found.cells[2])
    assert not any(entry.best for entry in found.cells[4])
    assert "shared_bottom, published: 100 runs" in markdown(comparison, published)


def test_command(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(
        sweep / "9_killed", ["network=mmoe", "data=table", "seed=9"], None, log="12:00:01 INFO mtl: epoch 4 of [x]\n"
    )
    main([str(sweep), "--also", "experts_per_sample"])
    printed = capsys.readouterr().out
    assert "1 of 7 runs have not finished:\n9_killed unfinished: epoch 4 of [x]" in printed
    assert "experts_per_sample" in printed
    assert "2 of 3" in printed
    rows = pl.read_csv(sweep / "summary.csv")
    assert rows["test minutes/rmse"].to_list() == [1.5, 1.7, 1.5, pytest.approx(math.nan, nan_ok=True), 1.4, 1.2, None]
    assert rows["option network"].to_list() == [name for name in SCORES for _ in range(2)] + ["mmoe"]
    assert "9_killed unfinished" in (sweep / "summary.md").read_text()


def test_several_folders_give_one_table_in_the_current_one(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(
        sweep.parent / "other" / "0_x", ["network=mmoe", "data=table"], {"loss": 0.3, "click/auprc": None}, MAIN, 7
    )
    monkeypatch.chdir(sweep.parent)
    main(["sweep", "other"])
    rows = pl.read_csv("summary.csv")
    assert rows["run"][0] == "sweep/0_x"
    assert rows["run"][-1] == "other/0_x"
    assert "\n| mmoe | 3 |" in (sweep.parent / "summary.md").read_text()
    assert (sweep.parent / "report.html").read_text().count("<table") == 2
    assert not (sweep / "summary.csv").exists()


def test_runs_on_other_data_have_a_section_of_their_own(tmp_path: Path) -> None:
    for number, data in enumerate(["books", "jester", "books"]):
        words = [f"data={data}", f"gate=g{number}", *(["data.k=1"] if data == "books" else [])]
        write_run(tmp_path / str(number), words, {"loss": float(number)}, choices={"data": data})
    main([str(tmp_path)])
    text = (tmp_path / "summary.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        f"# {tmp_path.name}: 3 runs",
        "## books",
        "### Costs",
        "## jester",
        "### Costs",
    ]
    assert text.count("\n| gate | seeds | loss↓ |") == 1  # by which the runs on books differ
    assert len((tmp_path / "summary.csv").read_text().splitlines()) == 4


def test_values_that_no_run_has() -> None:
    """Undefined ones are counted; a quantity that a setting does not have is no fault of its runs."""
    runs = many(17, 2)
    own = pl.when(pl.col("setting") == "gate0").then(pl.lit(None, pl.Float64)).otherwise(pl.col("test task_004/mse"))
    table = runs.table.with_columns(pl.lit(math.nan).alias("test loss"), own.alias("test task_004/mse"))
    comparison = compare(Runs(table, "gate", runs.main, runs.higher), columns=["test loss", "test task_004/mse"])
    cells = {name: value_text(cell.value, 2) for name, cell in comparison.cells.items()}
    assert cells["gate0", "loss"] == cells["gate1", "loss"] == "- (0/2)"
    assert cells["gate0", "task_004 mse"] == "-"
    assert cells["gate1", "task_004 mse"].startswith("3.25 ± ")


def test_bad_input_is_one_line(sweep: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"error: .*nowhere: no such folder"):
        main([str(tmp_path / "nowhere")])
    with pytest.raises(
        InputError, match=r"--also nothing: no run has this column; among those of summary.csv are seed"
    ):
        compare(read_runs([sweep]), ["nothing"])
    assert list(tmp_path.rglob("summary.*")) == []
