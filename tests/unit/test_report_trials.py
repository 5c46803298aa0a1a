"""The trials of studies: which are averaged, what a search finds with how many of them, and what became of each."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState, create_trial

from mtl.checks import InputError
from mtl.cli.report import main
from mtl.report.trials import (
    SIZES,
    Budget,
    best_trials,
    budget,
    chances,
    draw,
    gains_over_defaults,
    importance_of,
    ratios,
    required_trials,
)
from mtl.tune.storage import check_study, open_storage
from mtl.tune.trials import read_study, read_trials
from tests.run_folders import write_run

PAIRS = [(3.0, 30.0), (1.0, 12.0), (2.0, 11.0), (5.0, 50.0)]  # validation and test


def expected_by_brute_force(drawn: int, higher: bool) -> tuple[float, float]:
    """Return the means over all draws with replacement of the best validation value and of that trial's test value."""
    best = [(max if higher else min)(each) for each in itertools.product(PAIRS, repeat=drawn)]
    return sum(a for a, _ in best) / len(best), sum(b for _, b in best) / len(best)


@pytest.mark.parametrize("higher", [False, True])
def test_budget_against_all_draws(higher: bool) -> None:
    undefined = [(None, 1.0), (math.nan, 1.0), (0.0, None)]
    found = budget("g", [*PAIRS, *undefined], higher)
    assert found is not None
    assert found.whole == 4
    for drawn in range(1, 5):
        at_drawn = found.validation[drawn - 1], found.test[drawn - 1]
        assert at_drawn == pytest.approx(expected_by_brute_force(drawn, higher))
    assert budget("g", undefined, higher) is None


def test_budgets_of_many_trials() -> None:
    for trials in (1, 9, 500):
        assert chances(trials).sum(1) == pytest.approx(np.ones(min(trials, 250)))
        assert chances(trials).min() >= 0
    assert chances(500)[249, 0] == pytest.approx(1 - (499 / 500) ** 250)
    long = budget("g", [(float(n), 0.0) for n in range(400)], False)
    assert long is not None
    assert long.whole == 250 == SIZES[-1]


def test_how_many_trials_another_gate_needs() -> None:
    good, bad = Budget("good", [3.0, 1.0, 0.5, 0.4], [4.0] * 4), Budget("bad", [5.0, 2.0, 1.0], [3.0] * 3)
    assert required_trials(good.validation, 1.0, higher=False) == 2
    assert required_trials(bad.validation, 0.4, higher=False) is None
    assert required_trials([0.5, 0.7], 0.6, higher=True) == 2
    table = ratios([good, bad], "validation", "validation loss", higher=False)
    assert table.header == ["trials of", "for good with 4", "for bad with 3"]
    assert table.rows == [["good", "-", "2 (1.5x fewer)"], ["bad", "not with 3", "-"]]
    [axes] = draw([good, bad], "validation", "validation loss").axes
    assert len(axes.lines) == 2
    assert list(axes.lines[0].get_ydata()) == [3.0, 1.0]  # at 1 and 2 trials; 5 are more than there are


def completed(value: float, seed: int) -> optuna.trial.FrozenTrial:
    return create_trial(state=TrialState.COMPLETE, value=value, user_attrs={"seed": seed})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two gates: 40 trials of one, and of the other a failed, a pruned, a running and a waiting one."""
    folder = tmp_path_factory.mktemp("work") / "outputs" / "studies" / "s"
    storage = open_storage(None, folder)
    comet, topk = (optuna.create_study(storage=storage, study_name=f"s/{gate}") for gate in ("comet", "topk"))
    for study in (comet, topk, optuna.create_study(storage=storage, study_name="s2/comet")):
        study.set_user_attr("definition", {"monitor": "val/loss"})
    for number in range(40):
        value = float((7 * number) % 40)
        comet.add_trial(completed(value, seed=100 + number))
        write_run(folder / "comet" / f"trial_{number:05d}", ["x"], {"loss": 100 + value, "experts_per_sample": 2.0})
    error = "NaN loss <in expert 3>"
    topk.add_trial(create_trial(state=TrialState.FAIL, user_attrs={"error": error}))
    topk.add_trial(create_trial(state=TrialState.PRUNED, intermediate_values={0: 3.0, 1: 2.0}))
    write_run(folder / "topk" / "trial_00001", ["x"], {"loss": 0.0})  # a pruned run has results
    topk.add_trial(create_trial(state=TrialState.RUNNING))
    topk.add_trial(create_trial(state=TrialState.WAITING))
    topk.add_trial(completed(0.0, seed=1))  # whose folder was lost
    return folder


def test_what_became_of_trials_is_in_the_storage(folder: Path) -> None:
    trials = read_study("s", None, folder)
    assert (trials.validation, trials.test, trials.higher) == ("val/loss", "test/loss", False)
    table = trials.runs.table
    assert table["setting"].to_list() == ["comet"] * 40 + ["topk"] * 5
    assert table["seed"].to_list()[:2] == [100, 101]
    states = table.filter(setting="topk").select("state", "reason", "val/loss").rows()
    assert states[:4] == [
        ("failed", "NaN loss <in expert 3>", None),
        ("pruned", "after epoch 1", None),
        ("unfinished", None, None),
        ("unfinished", "waiting", None),
    ]
    assert states[4][0] == "unfinished"
    assert str(states[4][1]).startswith("its run is not in ")
    with pytest.raises(InputError, match=r"study=none: there is no .*study.db"):
        check_study("none", None, folder.with_name("none"))
    with pytest.raises(InputError, match="study=other: its storage has no such study"):
        read_study("other", None, folder)


@pytest.mark.parametrize("definition", [None, {"monitor": 1}])
def test_a_study_of_another_program_is_one_message(definition: object, folder: Path) -> None:
    study = optuna.create_study(study_name="foreign")
    study.set_user_attr("definition", definition)
    study.add_trial(create_trial(state=TrialState.FAIL, user_attrs={"folder": 3, "seed": "x", "error": [1]}))
    with pytest.raises(InputError, match="study foreign: its definition is missing"):
        read_trials({"g": (study, folder)})


def test_a_storage_that_fails_while_trials_are_read_is_one_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(study: optuna.Study) -> None:
        raise StorageInternalError("the connection was lost")

    monkeypatch.setattr("mtl.tune.trials.get_param_importances", fail)
    with pytest.raises(InputError, match=r"storage=.*the connection was lost; start the same command again"):
        read_study("s", None, folder)


def test_runs_that_were_moved_are_found_where_they_are_now(folder: Path) -> None:
    study = optuna.load_study(study_name="s/comet", storage=open_storage(None, folder))
    for where, state in ((folder.with_name("elsewhere"), "unfinished"), (folder / "comet", "finished")):
        assert set(read_trials({"COMET": (study, where)}).runs.table["state"]) == {state}


@pytest.mark.parametrize(("share", "count"), [(0.07, 2), (0.075, 3), (0.001, 1), (100, 40)])
def test_the_best_share_of_trials(folder: Path, share: float, count: int) -> None:
    trials = read_study("s", None, folder)
    best, notes = best_trials(trials, share)
    assert best.table.filter(setting="comet")["test/loss"].to_list() == [100.0 + n for n in range(count)]
    assert len(best.table.filter(setting="topk")) == 5  # none has a value: all are shown
    assert notes == [
        f"comet: the best {count} of 40 trials (40 finished).",
        "topk: the best 0 of 5 trials (1 failed, 1 pruned, 3 unfinished).",
    ]
    reverse, _ = best_trials(replace(trials, higher=True), share)
    assert reverse.table.filter(setting="comet")["test/loss"].to_list() == [139.0 - n for n in range(count)]


def test_what_a_search_gained_over_the_defaults(folder: Path, tmp_path: Path) -> None:
    """The best trial by validation is compared, also on rows that chose nothing; what is unknown is said."""
    trials = read_study("s", None, folder)
    assert trials.defaults == {}
    default = write_run(tmp_path / "a", ["x"], {"loss": 80.0}, best=10.0)
    unfinished = write_run(tmp_path / "b", ["x"], None)
    [comet, topk] = gains_over_defaults(replace(trials, defaults={"comet": default, "topk": default}))
    assert (
        "comet: trial 0 is the best of 40. Against the defaults: validation loss 0.0000 against 10.0000, 100 % better"
        in comet
    )
    assert "optimistic, since these rows chose it among 40; test loss 100.0000 against 80.0000, 25 % worse" in comet
    assert topk == "topk: no trial has finished, so it is unknown what the search gained."
    [text] = gains_over_defaults(replace(trials, defaults={"comet": unfinished}))
    assert text == "comet: the run with the defaults has not finished, so it is unknown what the search gained."
    write_run(tmp_path / "a", ["x"], {"loss": None}, best=10.0)
    assert (
        "test loss 100.0000 against -, undefined"
        in gains_over_defaults(replace(trials, defaults={"comet": default}))[0]
    )
    assert gains_over_defaults(replace(trials, higher=True, defaults={"comet": default}))[0].startswith(
        "comet: trial 17 is the best of 40. Against the defaults: validation loss 39.0000 against 10.0000, 290 % better"
    )


@pytest.mark.parametrize("count", [19, 20])
def test_the_importance_of_options_needs_enough_trials(count: int, tmp_path: Path) -> None:
    storage = open_storage(None, tmp_path)
    study = optuna.create_study(storage=storage, study_name="s")
    study.set_user_attr("definition", {"monitor": "val/loss"})
    draw = np.random.default_rng(0)
    for _ in range(count):
        params = {"lr": draw.random(), "dropout": draw.random()}
        space = dict.fromkeys(params, FloatDistribution(0, 1))
        study.add_trial(create_trial(value=params["lr"] ** 2, params=params, distributions=space))
    table = importance_of(read_study("s", None, tmp_path))
    if count < 20:
        assert table is None
        return
    assert table is not None
    shares = {name: int(share.removesuffix("%")) for name, share in table.rows}
    assert list(shares) == ["lr", "dropout"]
    assert shares["lr"] > 60
    assert sum(shares.values()) == 100


def test_report_of_a_study(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder.parents[2])
    main(["study=s", "--also", "experts_per_sample"])
    assert "comet: the best 2 of 40 trials (40 finished)." in capsys.readouterr().out
    page, text = (folder / "report.html").read_text(), (folder / "summary.md").read_text()
    assert "NaN loss &lt;in expert 3&gt;" in page
    assert page.count("<img") == 2  # the budget; the runs have logged nothing
    assert "| comet | 2 | " in text
    assert "| topk | 0 of 5 | - (0/1) | - (0/1) | - (0/1) |" in text
    assert len((folder / "summary.csv").read_text().splitlines()) == 46
    with pytest.raises(SystemExit, match="error: outputs: give folders of runs or studies, not both"):
        main(["study=s", "outputs"])
    with pytest.raises(SystemExit, match="error: give folders of runs, or study=NAME"):
        main(["storage=journal:x"])
