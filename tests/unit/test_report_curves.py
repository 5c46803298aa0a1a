"""Curves over runs, and the means, errors, differences and p-values of reports."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
from scipy.stats import sem, ttest_ind, ttest_rel
from torch.utils.tensorboard import SummaryWriter

from mtl.analysis.conflicts import read_table
from mtl.checks import InputError
from mtl.cli import report
from mtl.report import curves
from mtl.report.runs import read_runs
from mtl.report.statistics import Difference, Summary, difference, summarise
from tests.run_folders import write_run


def write_curve(folder: Path, rho: float, seed: int, values: dict[int, float], metric: str = "val/loss") -> None:
    write_run(folder, [f"data.rho={rho}", f"data.shuffle_seed={seed}"], None, seed=seed)
    writer = SummaryWriter(str(folder))
    for step, value in values.items():
        writer.add_scalar(metric, value, step)
    writer.close()


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    for number, (seed, rho, first) in enumerate([(0, 0.0, 4.0), (1, 0.0, 8.0), (0, 1.0, 1.0), (1, 1.0, 1.0)]):
        length = 3 if number else 2  # the first run stopped early
        values = {10 * step: first / (step + 1) for step in range(length)}
        write_curve(tmp_path / "sweep" / f"{number}_x", rho, seed, values)
    return tmp_path / "sweep"


def test_means_and_intervals_by_hand(sweep: Path) -> None:
    runs = read_runs([sweep]).table.select("run", "setting").rows()
    table, missing = curves.curves_of(runs, "val/loss")
    assert table.select("setting", "runs", "step").rows() == [
        *(("0.0", 2, step) for step in (0, 10)),  # the steps that both runs have
        *(("1.0", 2, step) for step in (0, 10, 20)),
    ]
    assert missing == []
    assert table["mean"].to_list() == pytest.approx([6, 3, 1, 1 / 2, 1 / 3])
    assert table["low"].to_list() == table["mean"].to_list() == table["high"].to_list()  # two runs give no interval
    write_curve(sweep / "4_x", 0.0, 2, {0: 6.0, 10: 3.0})
    table, _ = curves.curves_of([(str(sweep / f"{number}_x"), "one") for number in (0, 1, 4)], "val/loss")
    error = 2 / math.sqrt(3)  # of 4, 8 and 6
    quantile = 0.95 / math.sqrt(2 * 0.975 * 0.025)  # of Student's t with two degrees of freedom
    assert (table["low"][0], table["high"][0]) == pytest.approx((6 - quantile * error, 6 + quantile * error))
    alone, _ = curves.curves_of([(str(sweep / "0_x"), "one")], "val/loss")
    assert alone.rows()[0] == ("one", 1, 0, 4.0, 4.0, 4.0)


def test_a_run_without_the_metric_is_left_out(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_curve(sweep / "4_x", 1.0, 2, {0: 1.0}, "train/loss")
    (sweep / "5_x").mkdir()
    (sweep / "5_x" / "config.yaml").write_text("data: {rho: 1.0}")  # of a run that failed at once
    table, missing = curves.curves_of([(str(sweep / f"{n}_x"), "one") for n in range(2, 6)], "val/loss")
    assert set(table["runs"]) == {2}
    assert [str(error).split(";")[0].split("/")[-2:] for error in missing] == [
        ["4_x: no metric val", "loss"],
        ["5_x: no metric val", "loss"],
    ]
    report.main([str(sweep), "--curve", "train/loss", "val/auc"])
    page = (sweep / "report.html").read_text()
    assert page.count("<img") == 2
    assert "no metric val/auc; it has val/loss." in page
    capsys.readouterr()


def test_a_curve_of_a_csv_log(tmp_path: Path) -> None:
    (tmp_path / curves.CSV_LOG).parent.mkdir(parents=True)
    (tmp_path / curves.CSV_LOG).write_text("step,val/a/auroc,val/loss\n7,0.25,\n3,0.5,\n3,,2.0\n7,0.75,\n")
    assert curves.read_history(tmp_path, "val/a/auroc").rows() == [(3, 0.5), (7, 0.75)]


def test_curves_are_smoothed_over_steps(tmp_path: Path) -> None:
    write_curve(tmp_path / "a", 0.0, 0, {0: 1.0, 1: 3.0, 2: 5.0, 5: 7.0, 6: 1.0}, "train/step_loss")
    found, _ = curves.curves_of([(str(tmp_path / "a"), "a")], "train/step_loss", window=3)
    assert found.select("step", "mean").rows() == [(2, 3.0), (5, 7.0), (6, 4.0)]


SAMPLES = [([0.2, 0.5, 0.9], [1.0, 0.7, 1.4]), ([3.0, 3.5], [3.1, 9.0, 2.0, 2.5]), ([1.0, 1.0], [2.0, 3.0])]


@pytest.mark.parametrize(("values", "others"), SAMPLES)
def test_agreement_with_scipy(values: list[float], others: list[float]) -> None:
    found = summarise(others)
    assert found.mean == pytest.approx(sum(others) / len(others))
    assert found.sem == pytest.approx(sem(others))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a sample that does not vary
        expected = ttest_ind(values, others, equal_var=False).pvalue
    apart = difference(dict(enumerate(values)), dict(enumerate(others, 10)))
    assert apart is not None
    assert apart.p == pytest.approx(expected)


@pytest.mark.parametrize(
    ("values", "summary"),
    [
        ([], Summary(None, None, 0)),
        ([2.0], Summary(2.0, None, 1)),
        ([2.0, 2.0], Summary(2.0, 0.0, 2)),
        ([1.0, None, 3.0], Summary(2.0, pytest.approx(1.0), 2, undefined=1)),
        ([math.nan, math.inf, 5.0], Summary(5.0, None, 1, undefined=2)),
        ([None], Summary(None, None, 0, undefined=1)),
    ],
)
def test_summary_counts_what_is_undefined(values: list[float | None], summary: Summary) -> None:
    assert summarise(values) == summary


@pytest.mark.parametrize("others", [[], [1.0], [2.0, 2.0], [None, 1.0]])
def test_no_test_without_spread(others: list[float | None]) -> None:
    found = difference({1: 3.0, 2: 3.0}, dict(enumerate(others, 10)))
    assert found is None or found.p is None


def test_differences_are_between_runs_of_one_seed() -> None:
    mine, theirs = {1: 3.0, 2: 5.0, 3: None, 4: 9.0, 6: 2.0}, {1: 1.0, 2: 4.0, 3: 7.0, 5: 0.0, 6: 2.0}
    found = difference(mine, theirs)  # of 2, 1 and 0
    assert found == Difference(1.0, pytest.approx(3**-0.5), 3, 3, 2, pytest.approx(1.0), undefined=1)
    assert found.p == pytest.approx(ttest_rel([3.0, 5.0, 2.0], [1.0, 4.0, 2.0]).pvalue)
    assert found.interval == pytest.approx(ttest_rel([3.0, 5.0, 2.0], [1.0, 4.0, 2.0]).confidence_interval())
    equal = difference({1: 3.0, 2: 5.0, 3: 0.0}, {1: 2.0, 2: 4.0, 3: -1.0})
    assert equal == Difference(1.0, 0.0, 3, 3, 2)  # equal differences
    assert equal.p is None


@pytest.mark.parametrize("seed", [3, 1])
def test_difference_with_fewer_than_three_pairs_is_that_of_the_means(seed: int) -> None:
    mine, theirs = {1: 3.0, 2: 5.0, 5: 4.5}, {seed: 1.0, 4: 4.0}
    found, scipys = difference(mine, theirs), ttest_ind([*mine.values()], [*theirs.values()], equal_var=False)
    assert found is not None
    assert (found.mean, found.runs, found.pairs) == (pytest.approx(25 / 6 - 2.5), 2, 0)
    assert (found.p, found.df) == (pytest.approx(scipys.pvalue), pytest.approx(scipys.df))
    assert found.interval == pytest.approx(scipys.confidence_interval())
    assert difference({1: 3.0}, {3: 1.0}) == Difference(2.0, None, 1, 0)
    assert difference({1: None}, {1: 1.0}) is None
    assert difference({1: 1.0}, {}) is None


@pytest.mark.parametrize("content", ["step,val/loss\nfirst,1\n", "step,val/loss\n1,2\n1,2,3,4\n", "val/loss\n1\n"])
def test_damaged_logs_are_one_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "metrics.csv").write_text(content)
    found, [problem] = curves.curves_of([(str(tmp_path), "a")], "val/loss")
    assert found.is_empty()
    assert str(problem).startswith(f"{tmp_path}/csv/metrics.csv is damaged: ")
    (tmp_path / "conflict.csv").write_bytes(bytes(range(256)))
    with pytest.raises(InputError, match=r"conflict.csv is damaged: "):
        read_table(tmp_path / "conflict.csv")


def test_dollar_signs_are_no_formulas(tmp_path: Path) -> None:
    """The name of an option of a run that a stranger sent must not end a report."""
    for number, name in enumerate((r"$\foo$", "$x_{$")):
        run = write_run(tmp_path / str(number), [f"gate={name}"], {"loss": 1.0})
        (run / "csv").mkdir()
        (run / "csv" / "metrics.csv").write_text("step,val/loss\n1,2\n2,3\n")
    report.main([str(tmp_path)])
    assert (tmp_path / "report.html").exists()


def test_a_setting_far_away_does_not_squash_the_others(tmp_path: Path) -> None:
    """The axis is that of the others, and the legend says so; with fewer settings nothing is left out."""
    runs = []
    for number, last in enumerate([0.51, 0.5, 0.52, 0.515, 2.5]):
        write_curve(tmp_path / str(number), number, 0, {0: last + 0.1, 10: last})
        runs.append((str(tmp_path / str(number)), f"s{number}"))
    table, _ = curves.curves_of(runs, "val/loss")
    [axes] = curves.draw(table, "rho", "val/loss").axes
    assert axes.get_ylim() == pytest.approx((0.5 - 0.012, 0.62 + 0.012))
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["s0", "s1", "s2", "s3", "s4, beyond the picture"]
    [axes] = curves.draw(curves.curves_of(runs[2:], "val/loss")[0], "rho", "val/loss").axes
    assert axes.get_ylim()[1] > 2.5
