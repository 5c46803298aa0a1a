"""Which tasks should share: groups from gains of pairs, verdicts, answers, measured conflict."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from mtl.checks import InputError
from mtl.experts.dense import StackedDense
from mtl.networks.baselines import Grouped, SharedBottom
from mtl.networks.bottom import TabularBottom
from mtl.networks.heads import Heads
from mtl.pipeline.run import run
from mtl.report.runs import Runs
from mtl.report.statistics import Difference, difference, required_runs, with_delta
from mtl.sharing import grouping
from mtl.sharing.answer import (
    SharingGain,
    choose_settings,
    confirm,
    correct_p_values,
    describe_task,
    measure_gains,
    recommend,
)
from mtl.sharing.grouping import partition, predicted
from mtl.sharing.many import gains_of_many, recommend_joint, tables_of_many
from mtl.sharing.settings import Comparison
from mtl.training.conflict import measure
from mtl.training.weighting import shared_parameters
from tests.integration.helpers import compose_small
from tests.weightings import SPEC, TASKS, batch, module, task_losses


def partitions(items: list[int]) -> Any:
    """Yield all partitions, the plain way."""
    if not items:
        yield []
        return
    for size in range(len(items)):
        for partners in combinations(items[1:], size):
            for rest in partitions([item for item in items[1:] if item not in partners]):
                yield [(items[0], *partners), *rest]


def value(groups: Any, matrix: np.ndarray) -> float:
    return sum(sum(predicted(group, matrix)) for group in groups)


@pytest.mark.parametrize("max_groups", [None, 1, 2, 3])
def test_partitions_are_the_best_ones(max_groups: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = 1e-5 * np.random.default_rng(0).normal(size=(6, 6))  # as small as affinities
    allowed = [groups for groups in partitions(list(range(6))) if max_groups is None or len(groups) <= max_groups]
    best = partition(matrix, max_groups)
    assert sorted(task for group in best for task in group) == list(range(6))
    assert len(best) <= (max_groups or 6)
    assert value(best, matrix) == pytest.approx(max(value(groups, matrix) for groups in allowed), rel=1e-9)
    monkeypatch.setattr(grouping, "MAX_CANDIDATE_GROUPS", 30)  # too few for groups of three
    if max_groups != 2:
        small = [groups for groups in allowed if all(len(group) in (1, 2, 6) for group in groups)]
        best_value = max(value(groups, matrix) for groups in small)
        assert value(partition(matrix, max_groups), matrix) == pytest.approx(best_value)


def gain(mean: float, error: float, p: float | None, partners: tuple[str, ...] = ("b",), count: int = 5) -> SharingGain:
    return SharingGain(
        "together", "a", partners, Difference(mean, error, count, count, count - 1, error * count**0.5), p
    )


def test_verdicts() -> None:
    assert gain(1.2, 0.1, 0.001).verdict == "better"
    assert gain(-0.8, 0.1, 0.001).verdict == "worse"
    assert gain(0.1, 0.1, 0.4).verdict == "as good"  # the interval is within 1 %
    assert gain(1.2, 0.5, 0.06).verdict == "undecided"
    assert gain(1.2, 0.5, None).verdict == "undecided"
    assert "seeds=9 " in gain(1.2, 0.5, 0.06).advice  # ((1.96 + 0.84) 0.5 sqrt(5) / 1.2)^2 = 6.8, and 2
    many = replace(gain(1.2, 0.5, 0.06), comparisons=16)
    assert "seeds=17 " in many.advice  # ((2.96 + 0.84) 0.5 sqrt(5) / 1.2)^2 = 12.5, and 2.96^2 / 2 = 4.4
    assert gain(0.01, 0.5, 0.9).advice == "Over 100 seeds would be needed."
    assert str(gain(-152.3, 59.4, 0.2)) == "-152 % ± 59"


@pytest.mark.parametrize("mean", [0.0, 0.5, 3.0])
def test_gains_without_spread_or_of_two_seeds_are_undecided(mean: float) -> None:
    equal, few = gain(mean, 1e-15, 1e-15), gain(mean, 1e-6, 1e-6, count=2)
    assert [equal.verdict, few.verdict] == ["undecided"] * 2
    assert equal.advice.startswith("All seeds give the same")
    assert few.advice == "At least 3 seeds are needed."


def test_holm_corrects_for_all_gains_of_a_kind() -> None:
    found = correct_p_values([gain(1, 1, p) for p in (0.01, 0.04, 0.03, None)])
    assert [each.p for each in found] == [pytest.approx(0.03), pytest.approx(0.06), pytest.approx(0.06), None]


def test_gains_are_paired_by_seed_and_signed_by_direction() -> None:
    values = {
        "alone": [(0, 0.5, 2.0), (1, 0.4, None), (2, 0.6, 2.5)],
        "pair": [(2, 0.7, 0.6), (0, 0.6, 1.0), (1, 0.6, 1.0)],
    }
    rows = [(setting, *row) for setting, own in values.items() for row in own]
    table = pl.DataFrame(rows, ["setting", "seed", "test/a/auroc", "test/b/mse"], orient="row")
    runs = Runs(table.with_columns(state=pl.lit("finished")), "", {"a": "auroc", "b": "mse"})
    first, second = measure_gains(runs, {"pair": {"a": ["b"], "b": ["a"]}}, "test")
    assert (first.mean, first.interval) == (pytest.approx(100 * 0.4 / 1.5), pytest.approx((-2.02, 55.35), abs=0.01))
    assert second.difference is not None
    assert (second.difference.mean, second.difference.undefined) == (pytest.approx(100 * (2.25 - 2.6 / 3) / 2.25), 1)
    assert second.verdict == "undecided"
    assert second.advice == "Runs without a value: 1."
    assert measure_gains(runs, {"pair": {"a": []}}, "test") == []


def by_seed(**rows: list[float]) -> dict[str, dict[int, float]]:
    return {name: dict(enumerate(row)) for name, row in {"alone": [0.0] * 4, **rows}.items()}


def test_validation_rows_choose_and_test_rows_answer() -> None:
    """A setting that is better on test rows alone is neither shown nor recommended."""
    val, test = (
        {"together": 0.70, "groups": 0.72, "groups 2": 0.65},
        {"together": 0.9, "groups": 0.705, "groups 2": 0.8},
    )
    rows = [("alone", seed, 0.70, 0.70 + seed / 100) for seed in range(4)]
    rows += [(name, seed, val[name], test[name] + seed / 90) for name in val for seed in range(4)]
    table = pl.DataFrame(rows, ["setting", "seed", "val/a/auroc", "test/a/auroc"], orient="row")
    runs = Runs(table.with_columns(state=pl.lit("finished")), "", {"a": "auroc"})
    best = choose_settings(measure_gains(runs, {name: {"a": ["b"]} for name in val}, "val"))
    assert best == {"groups": {"a": ("b",)}}
    [confirmed] = confirm(runs, measure_gains(runs, {name: {"a": ["b"]} for name in val}, "val"))
    [found] = measure_gains(runs, best, "test")
    assert (confirmed.p, confirmed.comparisons) == (pytest.approx(min(1.0, 3 * found.p)), 3)  # chosen from three
    assert found.mean == pytest.approx(100 * (0.705 + 1.5 / 90 - 0.715) / 0.715)
    assert found.comparisons == 1
    undefined = replace(found, difference=replace(found.difference, undefined=1))
    assert choose_settings([undefined, replace(found, setting="b")]) == {"b": {"a": ("b",)}}
    assert choose_settings([undefined]) == {}
    good, better = [1.0, 1.1, 0.9, 1.0], [2.0, 2.1, 1.9, 2.0]
    test_rows = by_seed(together=better, groups=good)
    assert recommend(by_seed(together=good, groups=better), test_rows, 0.0)[0] == "groups"
    chosen_badly = recommend(
        by_seed(together=good, groups=better), by_seed(together=better, groups=[1, -1, 0, 0.1]), 0.0
    )
    assert chosen_badly[0] == "alone"
    why = (
        "Best on validation rows: the tasks in groups; but on test rows, the mean over the tasks is not decided: 0.025"
    )
    assert chosen_badly[1].startswith(why)
    assert recommend(by_seed(together=[-1.0] * 4), test_rows, 0.0)[0] == "alone"


def test_splits_that_overlap_widen_the_interval() -> None:
    """Nadeau and Bengio (2003): the variance of the mean is (1/n + n_test/n_train) s^2."""
    values, others = {0: 1.0, 1: 1.4, 2: 0.9, 3: 1.2}, {0: 0.8, 1: 0.9, 2: 0.8, 3: 0.95}
    for pairs in (True, False):
        theirs = others if pairs else {seed + 10: value for seed, value in others.items()}
        plain, found = difference(values, theirs), difference(values, theirs, overlap=0.125)
        assert plain is not None
        assert found is not None
        assert found.sem == pytest.approx((plain.sem or 0) * math.sqrt((1 / 4 + 0.125) / (1 / 4)))
        assert found.std == pytest.approx(plain.std)
        assert (found.mean, found.df) == (plain.mean, plain.df)
    assert required_runs(1.0, 1.0) == 10
    assert required_runs(1.0, 1.0, overlap=0.05) > 15
    assert required_runs(1.0, 1.0, overlap=0.25) == math.inf
    few = replace(gain(1.2, 0.5, 0.06), difference=Difference(1.0, 0.6, 5, 5, 4, 1.0, overlap=0.25))
    assert few.advice == "More rows would tell, not more seeds."


def test_only_a_setting_that_is_better_than_alone_is_recommended() -> None:
    def of(**rows: list[float]) -> tuple[str, str]:
        return recommend(by_seed(**rows), by_seed(**rows), 0.0)

    assert (
        of(together=[1.0, 1.1, 0.9, 1.0], groups=[2.0, 2.1, 1.9, 2.0], topk=[3.0, -3.0, 4.0, math.nan])[0] == "groups"
    )
    assert of(together=[-1.0, -1.1, -0.9]) == ("alone", "No other setting is better on validation rows.")
    assert of(together=[math.nan, -1.1, -0.9]) == ("alone", "No other setting has a mean over the tasks.")
    chosen, why = of(together=[-1.0, -1.1, -0.9], topk=[0.3, -0.1, 0.1])
    assert chosen == "alone"
    mean = "Best on validation rows: with the gate topk; but on test rows, the mean over the tasks is "
    assert why == f"{mean}as good as alone (95 % interval -0.4 to +0.6 %)."
    interval = "(95 % interval -2 to +3.5 %). With seeds=43 the answer would probably be clear."
    assert (
        of(topk=[3.0, -1.0, 1.0, 0.0])[1]
        == f"{mean}not decided: 0.75 % better than alone, which may be chance {interval}"
    )


def test_groups_of_tasks_share_nothing_with_each_other() -> None:
    parts = {"bottom": partial(TabularBottom, embedding_dim=3), "experts": partial(StackedDense, units=[6])}
    net = Grouped(SPEC, [["click", "time"], ["stars"], ["kind"]], **parts, heads=Heads).double()
    rows = batch(rows=5)
    predictions = net(rows.inputs).predictions
    assert list(predictions) == ["click", "stars", "kind", "time"]
    assert list(net(rows.inputs, ["time", "stars"]).predictions) == ["stars", "time"]
    touched = {n.split(".")[1] for n, p in net.named_parameters() if touches(predictions["time"], p)}
    assert touched == {"0"}
    shared = {id(p) for p in shared_parameters(net)[0]}
    assert {n.split(".")[1] for n, p in net.named_parameters() if id(p) in shared} == {"0"}
    torch.manual_seed(1)
    whole = Grouped(SPEC, None, **parts, heads=Heads)
    torch.manual_seed(1)
    assert torch.equal(
        whole.networks[0].trunk.layers[0].weight, SharedBottom(SPEC, **parts, heads=Heads).trunk.layers[0].weight
    )
    with pytest.raises(
        InputError, match=r"groups=\[\['click'\]\]: must contain each task once: click, stars, kind, time"
    ):
        Grouped(SPEC, [["click"]], **parts, heads=Heads)


def touches(value: torch.Tensor, parameter: torch.nn.Parameter) -> bool:
    found = torch.autograd.grad(value.sum(), parameter, retain_graph=True, allow_unused=True)[0]
    return found is not None


def test_affinity_equals_a_step_made_by_hand() -> None:
    """TAG: 1 - L_j(after a step of plain gradient descent on L_i at shared parameters) / L_j(before)."""
    trained, first, second, rate = module(), batch(rows=6), batch(rows=8, seed=1), 0.3
    found = {tuple(row[:4]): row[4] for row in measure(trained, [first], [second], rate)}
    before = task_losses(trained, second).detach()
    gradients = []
    for i, task in enumerate(TASKS):
        stepped = copy.deepcopy(trained)
        shared = shared_parameters(stepped.network)[0]
        task_losses(stepped, first)[i].backward()
        gradients.append(torch.cat([p.grad.flatten() for p in shared if p.grad is not None]))
        torch.optim.SGD(shared, lr=rate).step()
        for j, after in enumerate(task_losses(stepped, second)):
            affinity = found["affinity", "all", task.name, TASKS[j].name]
            assert affinity == pytest.approx(float(1 - after.detach() / before[j]), abs=1e-10)
        assert found["norm", "all", task.name, task.name] == pytest.approx(float(gradients[i].norm()))
    cosine = torch.nn.functional.cosine_similarity(gradients[0], gradients[1], 0)
    assert found["cosine", "all", TASKS[0].name, TASKS[1].name] == pytest.approx(float(cosine))


def test_a_task_without_labels_has_undefined_values() -> None:
    rows = batch(rows=6, without="click")
    undefined = [row[:4] for row in measure(module(), [rows], [rows], 0.1) if math.isnan(row[4])]
    assert ("norm", "all", "click", "click") in undefined
    assert all("click" in row for row in undefined)


def test_measuring_does_not_change_the_training(tmp_path: Path) -> None:
    words = ("data=synthetic_pairs", "gate=topk", "recipe.dropout=0.2", "~logger")
    losses = []
    for every in ("null", "2"):
        run(compose_small(tmp_path / every, *words, f"callbacks.conflict.every_n_steps={every}"))
        losses.append(json.loads((tmp_path / every / "results.json").read_text())["numbers"]["test"]["network"]["loss"])
    assert losses[0] == losses[1]
    assert not (tmp_path / "null" / "conflict.csv").exists()
    table = pl.read_csv(tmp_path / "2" / "conflict.csv")
    assert set(table["quantity"]) == {"norm", "cosine", "affinity"}
    assert table["step"].unique().sort().to_list()[:3] == [2, 4, 6]
    assert table.filter(quantity="cosine")["value"].is_between(-1.0001, 1.0001).all()
    assert (tmp_path / "2" / "conflict.png").is_file()


def test_batches_of_one_row_cannot_be_halved(tmp_path: Path) -> None:
    words = (
        "data=synthetic_pairs",
        "gate=topk",
        "~logger",
        "data.eval_batch_size=1",
        "callbacks.conflict.every_n_steps=2",
    )
    run(compose_small(tmp_path, *words))
    assert not (tmp_path / "conflict.csv").exists()


def test_a_line_for_each_task() -> None:
    good, bad, open_ = gain(1.2, 0.1, 0.001), gain(-0.8, 0.2, 0.01, ("b", "c")), gain(1.2, 0.5, 0.06, ("c",))
    first = "a: better together with b than alone, by 1.2 % (95 % interval +0.92 to +1.5 %)."
    gated = "Also worse with the gate topk than alone, by 0.8 % (95 % interval -1.4 to -0.24 %)."
    others = "(95 % interval -0.19 to +2.6 %). With seeds=9 the answer would probably be clear."
    texts = {
        describe_task("a", [good], [replace(bad, setting="topk")], 3): f"{first} {gated}",
        describe_task(
            "a", [bad], [open_], 3
        ): "a: worse together with all others than alone, by 0.8 % (95 % interval -1.4 to -0.24 %).",
        describe_task("b", [bad], [], 3): "b: alone; it has no gain in another setting.",
        describe_task(
            "a", [open_], [], 4
        ): "a: not decided: together with c 1.2 % better than alone, which may be chance " + others,
        describe_task("a", [gain(0.1, 0.1, 0.4)], [], 3): "a: as good together with b as alone (95 % interval -0.18 to "
        "+0.38 %).",
    }
    assert [*texts] == [*texts.values()]


@pytest.mark.parametrize("seeds", [3, 5, 10])
@pytest.mark.parametrize("settings", [2, 8])
def test_luck_of_runs_that_shows_in_both_rows_recommends_nothing(seeds: int, settings: int) -> None:
    random, advised, tables = np.random.default_rng(seeds + settings), 0, 400
    for _ in range(tables):
        luck = random.normal(size=(settings + 1, seeds))
        val, test = (
            {name: dict(enumerate(row)) for name, row in zip(["alone", *"abcdefgh"], values, strict=False)}
            for values in (luck + 0.6 * random.normal(size=luck.shape) for _ in range(2))
        )
        advised += recommend(val, test, 0.0)[0] != "alone"
    assert advised <= (0.025 + 2 * (0.025 * 0.975 / tables) ** 0.5) * tables


def simulated_runs(problem: int, gain: bool, seeds: int = 8) -> Runs:
    """Return the errors of four tasks on one table of 500 rows, which each seed splits anew into 80, 10 and 10 %.

    Each setting fits ridge regressions of 60 inputs on bootstrap samples of its own. With a true ``gain``, tasks that
    share have the rows of their mate too, which has the same weights; else all settings are alike.
    """
    random, rows, runs = np.random.default_rng(problem), 500, list[dict[str, Any]]()
    weights = np.repeat(random.normal(size=(2, 60)) / 60**0.5, 2, axis=0)  # of two pairs of equal tasks
    x = random.normal(size=(4, rows, 60))
    y = np.einsum("tni,ti->tn", x, weights) + 2 * random.normal(size=(4, rows))
    for seed in range(seeds):
        train, val, test = np.split(random.permutation(rows), [400, 450])
        for setting in ("alone", "together", "groups", "groups 2", "softmax"):
            run = {"setting": setting, "seed": seed, "data_seed": seed, "overlap": 50 / 400, "state": "finished"}
            for task in range(4):
                own = [task, task ^ 1] if gain and setting == "groups" else [task]
                picked = [random.choice(train, 400) for _ in own]
                a = np.concatenate([x[t, index] for t, index in zip(own, picked, strict=True)])
                b = np.concatenate([y[t, index] for t, index in zip(own, picked, strict=True)])
                w = np.linalg.solve(a.T @ a + np.eye(60), a.T @ b)
                for split, held in (("val", val), ("test", test)):
                    run[f"{split}/{task}/mse"] = float(np.mean((y[task, held] - x[task, held] @ w) ** 2))
            runs.append(run)
    mains = {str(task): "mse" for task in range(4)}
    table = pl.DataFrame(runs).with_columns(run=pl.int_range(len(runs)).cast(pl.String))
    single = (table["setting"] == "alone").to_list()
    for split in ("test", "val"):
        table = with_delta(table, ["x"] * len(runs), single, mains, split)
    return Runs(table, "", mains)


@pytest.mark.parametrize("problems", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_simulated_gains_are_found_and_none_is_invented(problems: int) -> None:
    partners = {name: {str(task): ["x"] for task in range(4)} for name in ("together", "groups", "groups 2")}
    right, wrong, told = 0, 0, 0
    for gain in (True, False):
        for problem in range(problems):
            runs = simulated_runs(problem, gain)
            values, by = ({n: runs.values(n, c) for n in ("alone", *partners)} for c in ("test/delta_m", "val/delta_m"))
            advised = recommend(by, values, runs.overlap)[0]
            right, wrong = right + (gain and advised == "groups"), wrong + (not gain and advised != "alone")
            answers = confirm(runs, measure_gains(runs, partners, "val"))
            told += not gain and any(each.verdict == "better" for each in answers)
    print(f"right {right} of {problems}, invented {wrong}, tasks told to share without a gain in {told}")
    assert right >= 0.8 * problems
    assert max(wrong, told) <= 0.05 * problems


def test_of_many_tasks_joint_runs_are_compared_with_the_best_model_of_each_alone() -> None:
    """Each run chooses the model alone on validation rows; tasks are the units, by labels, and one is undefined."""
    names = [f"t{index}" for index in range(80)]
    columns: dict[str, list[Any]] = {"setting": ["together", "together", "comet"], "state": ["finished"] * 3}
    columns["seed"] = [0, 1, 1]
    for index, name in enumerate(names):
        rise = 0.1 if index < 40 else 0.2
        for split in ("val", "test"):
            better = 0.7 if split == "val" else 0.5  # linear is chosen by validation rows, though worse on test rows
            columns |= {f"{split}/{name}/auroc": [0.3, 0.5 + rise + index / 1e4, 0.4]}
            columns |= {f"linear:{split}/{name}/auroc": [None, better, better]}  # a run without it counts nothing
            columns |= {f"constant:{split}/{name}/auroc": [0.9] * 3, f"blend:{split}/{name}/auroc": [0.9] * 3}
    columns["linear:test/t79/auroc"] = [math.nan] * 3
    runs = Runs(pl.DataFrame(columns), "", dict.fromkeys(names, "auroc"))
    gains = gains_of_many(runs, "test")
    assert gains["together"]["t0"] == pytest.approx(20)  # percent of .5
    assert gains["together"]["t79"] is None
    labels = {name: 10 if index < 40 else 300 for index, name in enumerate(names)}
    together, comet, gate = tables_of_many(runs, labels)
    assert [row[:2] for row in together.rows] == [
        ["all", "79 of 80"],
        ["below 50", "40 of 40"],
        ["200 or more", "39 of 40"],
    ]
    assert together.rows[1][2].startswith("+20.39 [")
    assert (comet.title, gate.title) == ("comet against single tasks, %", "comet against together, %")
    assert gains_of_many(runs, "test", "together")["comet"]["t0"] == pytest.approx(-100 / 3)  # of seed 1 alone: .4, .6
    best, sentence = recommend_joint(runs)
    assert (best, sentence.rpartition(": ")[2]) == ("together", "better")
    worse = runs.table.with_columns(pl.col(f"linear:test/{name}/auroc") * 2 for name in names)
    assert recommend_joint(Runs(worse, "", runs.main))[1].endswith(": worse")


def test_many_tasks_have_neither_networks_of_their_own_nor_affinities(tmp_path: Path) -> None:
    options: Any = SimpleNamespace(every_n_steps=5, gates=["topk"])
    many = Comparison(options, tmp_path, [f"t{index}" for index in range(65)], [], False, False)
    assert list(many.settings) == ["together", "topk"]
    text = " ".join(override for setting in many.settings.values() for override in setting.overrides)
    assert "conflict" not in text
    assert "num_experts" not in text
