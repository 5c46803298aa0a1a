"""``mtl.fit`` trains what the command line trains, and leaves the caller's program as it was."""

from __future__ import annotations

import math
import os
import random
import re
import signal
from collections.abc import Iterator
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.version import VersionBase
from mtl.callbacks.epoch_bar import EpochBar

import mtl
from mtl.checks import InputError
from mtl.cli.report import main as report
from mtl.cli.train import read_start
from mtl.cli.use import explain as explain_command
from mtl.cli.use import importance as importance_command
from mtl.files.run_files import read_json
from mtl.overrides import quote_path
from mtl.pipeline import memory
from mtl.pipeline.run import run
from mtl.runs.signals import Stopped
from mtl.training.module import MultiTaskModule
from mtl.use.frames import to_polars
from tests.integration.helpers import compose_small, resume_small
from tests.visit_files import visits as visits_of_all_kinds

TASKS = {"clicked": "binary", "minutes": "regression", "plan": {"kind": "multiclass", "metrics": ["macro_f1"]}}
ZONE = timezone(timedelta(hours=2))
SMALL = {"recipe.embedding_dim": 4, "recipe.expert_units": [8], "recipe.head_units": [8], "recipe.num_experts": 3}
QUICK: dict[str, Any] = {"max_epochs": 2, "accelerator": "cpu", "progress": False, "report": False, "blend": "none"}
QUICK |= {"options": {**SMALL, "callbacks.routing.figures": False}, "logger": "none"}


def visits(rows: int = 200, seed: int = 0) -> pl.DataFrame:
    """Return rows with inputs of several types and labels of three kinds; 5 % of the cells and labels are missing."""
    draw = np.random.default_rng(seed)
    age, city = draw.normal(40, 12, rows), draw.choice(["Lyon", "Oslo", "Rome"], rows)
    table = {
        "age": age,
        "city": city,
        "visits": draw.integers(0, 400, rows),
        "clicked": (age + draw.normal(0, 9, rows) > 40).astype(int),
        "minutes": 0.3 * age + draw.normal(0, 1, rows),
        "plan": np.where(city == "Oslo", "gold", np.where(age > 45, "silver", "none")),
    }
    frame = pl.DataFrame(table)
    return frame.with_columns(
        pl.when(pl.Series(draw.random(rows) < 0.95)).then(pl.col(name)).alias(name) for name in table
    )


def as_pandas(frame: pl.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(frame.to_dict(as_series=False))


def same(one: Any, other: Any) -> bool:
    """Return whether two trained models have equal weights, to the last bit."""
    a, b = one.network.state_dict(), other.network.state_dict()
    return a.keys() == b.keys() and all(not torch.is_tensor(v) or torch.equal(v, b[name]) for name, v in a.items())


@pytest.fixture(scope="module")
def model() -> Any:
    return mtl.fit(visits(), TASKS, **QUICK)


def test_endings_of_new_words_are_learnt() -> None:
    """No word occurs twice; only their last letters tell the label."""
    draw, rows = np.random.default_rng(0), 1_000
    labels, stems = draw.integers(0, 2, rows), draw.integers(10**4, 10**5, (rows, 4))
    texts = [f"{a} {b} {c}{'ing' if y else 'ed'} {d}" for (a, b, c, d), y in zip(stems, labels, strict=True)]
    frame = pl.DataFrame({"comment": texts, "noise": draw.normal(size=rows), "y": labels})
    options = QUICK | {"max_epochs": 20, "lr": 0.03}
    without, read = (mtl.fit(frame, {"y": "binary"}, columns=c, **options) for c in ({}, {"comment": "text"}))
    assert without.metrics["y/auroc"] < 0.7
    assert read.metrics["y/auroc"] > 0.95
    assert read.importance(frame)["column"][0] == "comment"


def test_a_run_says_once_how_long_it_will_take(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "mtl"):
        mtl.fit(visits(), TASKS, **QUICK | {"max_epochs": 3})
    [line] = [message for message in caplog.messages if message.startswith("time left: at most ")]
    assert "(2 epochs of " in line
    assert caplog.messages.index(line) < caplog.messages.index(next(m for m in caplog.messages if "epoch 1:" in m))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_fit_equals_the_command_line(model: Any, suffix: str, tmp_path: Path) -> None:
    """The same rows in memory, in a file, and in the run of ``mtl train data=table`` give the same weights."""
    path = tmp_path / f"rows.{suffix}"
    getattr(visits(), f"write_{suffix}")(path)
    words = [f"{name}={value}".replace(" ", "") for name, value in SMALL.items()]
    tasks = [
        "data.tasks.clicked={kind: binary}",
        "data.tasks.minutes={kind: regression}",
        "data.tasks.plan={kind: multiclass, metrics: [macro_f1]}",
    ]
    run(compose_small(tmp_path / "run", "data=table", f"data.path={path}", *words, *tasks, "~logger", "blend=none"))
    trained = mtl.load(tmp_path / "run")
    assert same(model, trained)
    assert model.metrics == trained.metrics
    assert {"loss", "clicked/auroc", "minutes/mse", "plan/macro_f1"} <= model.metrics.keys()
    assert same(model, mtl.fit(path, TASKS, **QUICK))
    trained.save(tmp_path / "model.ckpt")  # which mtl evaluate reads too
    run(resume_small(tmp_path / "model.ckpt", tmp_path / "again", evaluate=True))
    test = read_json(tmp_path / "again" / "results.json")["numbers"]["test"]["network"]
    assert test.items() >= trained.metrics.items()


def test_model_predicts_explains_and_is_saved(model: Any, tmp_path: Path) -> None:
    rows = visits(30, seed=1)
    model.save(tmp_path / "model.ckpt")
    again = mtl.load(tmp_path / "model.ckpt")
    assert same(model, again)
    assert again.metrics == model.metrics
    assert again.predict(rows).equals(model.predict(rows))
    assert set(model.routing(rows)["task"]) == set(TASKS)


def test_names_and_classes_are_never_interpolations(tmp_path: Path) -> None:
    names = {"age": "${oc.env:HOME}", "visits": "???", "clicked": r"\${x}", "minutes": "${new_folder:made}"}
    rows = visits().rename(names).with_columns(plan=pl.col("plan").replace("gold", "???"))
    tasks = {"clicked": {"kind": "binary", "column": r"\${x}"}, "plan": {"kind": "multiclass", "metrics": ["accuracy"]}}
    tasks["plan"] |= {"class_weights": {"???": 2.0}}
    model = mtl.fit(rows, tasks, columns={"???": "number"}, ignore=["${new_folder:made}"], **QUICK)
    assert set(model.columns) == {"${oc.env:HOME}", "city", "???"}
    assert model.spec.tasks[1].class_weights == (2.0, 1.0, 1.0)
    for wrong, message in (
        (lambda: model.save(None), "path=null: must be a path"),
        (lambda: mtl.load(5), "checkpoint 5: no such file"),
        (lambda: mtl.share(rows, tasks, folder=5), "folder=5: must be a path"),
    ):
        with pytest.raises(InputError, match=message):
            wrong()
    model.save(tmp_path / "${oc.env:HOME}.ckpt")
    content = torch.load(tmp_path / "${oc.env:HOME}.ckpt", weights_only=True)
    content["data"]["encoder"]["columns_by_name"]["city"]["vocabularies"]["city"]["values"] += ["one", "more"]
    torch.save(content, tmp_path / "forged.ckpt")
    with pytest.raises(InputError, match=r"forged.ckpt: .* damaged \(ValueError: its encoder makes other inputs\)"):
        mtl.load(tmp_path / "forged.ckpt")
    with pytest.raises(InputError, match="device=quantum: Expected one of cpu, cuda"):
        mtl.load(tmp_path / "${oc.env:HOME}.ckpt", device="quantum")
    again = mtl.load(tmp_path / "${oc.env:HOME}.ckpt")
    assert again.predict(rows).equals(model.predict(rows))
    assert quote_path(tmp_path / "${x}") == f"'{tmp_path}/$\\{{x}}'"


def test_rows_mean_the_same_in_every_container(model: Any) -> None:
    rows = visits(60, seed=1).with_columns(age=pl.when(pl.int_range(60) % 3 == 0).then(None).otherwise("age"))
    arrays = {name: rows[name].to_numpy() for name in rows.columns}  # the empty ages are NaN
    assert model.predict(arrays).equals(model.predict(rows))
    assert model.predict(as_pandas(rows)).equals(as_pandas(model.predict(rows)))
    assert model.routing(as_pandas(rows)).equals(as_pandas(model.routing(rows)))
    assert model.importance(as_pandas(rows), repeats=1).equals(as_pandas(model.importance(rows, repeats=1)))
    assert model.evaluate(arrays) == model.evaluate(rows)
    for series in (rows["age"], as_pandas(rows)["age"]):
        assert to_polars(series).equals(rows.select("age"))


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ([np.int64(3), "5+", None], ["3", "5+", None]),
        ([np.int64(1), 2.5, math.nan], [1.0, 2.5, None]),
        ([True, 2], ["True", "2"]),
        ([date(2020, 1, 1), 3], ["2020-01-01", "3"]),
        ([date(2020, 1, 1), datetime(2020, 1, 2, 3)], [datetime(2020, 1, 1), datetime(2020, 1, 2, 3)]),
        ([10**40, 1], [str(10**40), "1"]),
        ([2**60 + 1, 0.5], [str(2**60 + 1), "0.5"]),
        ([Decimal("1.50"), 2], ["1.50", "2"]),
        ([[np.int64(1)], ["a"]], [["1"], ["a"]]),
        (
            [datetime(2026, 3, 1, 14, 30, tzinfo=ZONE), None],
            [datetime(2026, 3, 1, 14, 30), None],
        ),
    ],
)
def test_cells_of_mixed_columns_keep_their_values(cells: list[Any], expected: list[Any]) -> None:
    """A column that mixes numbers, texts, booleans and dates is one of texts; no cell changes or vanishes."""
    objects = np.empty(len(cells), dtype=object)
    objects[:] = cells
    for column in (cells, objects, pd.Series(objects, dtype=object), tuple(cells)):
        assert to_polars({"a": column})["a"].to_list() == expected
    zoned = pd.Series(pd.to_datetime(["2026-03-01T14:30:00+02:00", None]))
    assert to_polars({"a": zoned})["a"].to_list() == [datetime(2026, 3, 1, 14, 30), None]


def test_patterns_stand_for_columns(tmp_path: Path) -> None:
    """Each column that fits becomes a task with the options of the pattern; a task of its own name keeps its own."""
    draw = np.random.default_rng(0)
    names = ["genre_a", "genre_b", "genre_c", "x"]
    frame = pl.DataFrame({name: draw.integers(0, 2, 200) for name in names}).with_columns(x=draw.normal(size=200))
    tasks = {"genre_*": {"kind": "binary", "metrics": ["auprc"]}, "genre_b": {"kind": "binary", "weight": 3.0}}
    model = mtl.fit(frame, tasks, folder=tmp_path / "run", **QUICK)
    assert {task.name: (task.metrics, task.weight) for task in model.spec.tasks} == {
        "genre_a": (("auprc",), 1.0),
        "genre_c": (("auprc",), 1.0),
        "genre_b": ((), 3.0),
    }
    assert model.columns == ["x"]
    again = mtl.fit(frame, tasks, resume=tmp_path / "run", progress=False, max_epochs=3)
    assert [task.name for task in again.spec.tasks] == ["genre_a", "genre_c", "genre_b"]
    with pytest.raises(InputError, match=r"data.tasks.gnre_\*: no column with such a name is left; frame has genre_a"):
        mtl.fit(frame, {"gnre_*": "binary"}, **QUICK)


def test_a_run_in_a_folder_has_its_page_and_options_of_sections(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {**SMALL, "data": {"on_invalid": "missing"}, "optimizer": {"lr": 0.02}}
    mtl.fit(visits(), TASKS, folder=tmp_path / "run", **QUICK | {"report": True, "options": options})
    words = read_json(tmp_path / "run" / "command.json")["overrides"]
    assert {"data.on_invalid", "optimizer.lr", "report"} <= {word.partition("=")[0] for word in words}
    assert "Where it is wrong" in (tmp_path / "run" / "report.html").read_text()
    report([str(tmp_path / "run")])
    assert "cannot be read again, so what needs them is left out: they were in memory" in capsys.readouterr().out


def test_importance_finds_what_the_labels_depend_on(model: Any) -> None:
    """Shuffled ages harm the regression more than other columns do; nothing but its own column is shuffled."""
    found = model.importance(visits(300, seed=1), repeats=3)
    minutes = found.filter(task="minutes")
    assert (len(found), minutes["column"][0], minutes["metric"][0]) == (9, "age", "mse")
    assert minutes["importance"][0] > 3 * minutes["std"][0] > 0
    assert found.equals(model.importance(visits(300, seed=1), repeats=3))


def test_importance_is_that_of_encoded_shuffled_rows() -> None:
    """Of numbers and dates with empty cells, parts of dates, categories, lists and texts, without encoding anew."""
    rows = visits_of_all_kinds(400).with_columns(seen=pl.concat_str(pl.col("city", "user"), separator="|"))
    rows = rows.select("user", "city", "visits", "amount", "day", "price", "tags", "note", "seen", "click", "minutes")
    kinds: dict[str, Any] = {name: {"kind": "list", "separator": "|"} for name in ("tags", "seen")}
    kinds |= {"note": "text", "price": {"format": "1.234,5"}, "seen": {**kinds["seen"], "target": "city"}}
    gaps = rows.with_columns(day=pl.when(pl.int_range(pl.len()) % 9 > 0).then("day"))
    model = mtl.fit(gaps, {"click": "binary", "minutes": "regression"}, columns=kinds, **QUICK)
    assert {len(model.encoder.columns_by_name[name].inputs) for name in ("amount", "user", "day")} == {0, 1, 3}
    before, draw = model.evaluate(gaps), np.random.default_rng(0)
    table = model.importance(gaps, repeats=1)
    for column in model.columns:
        after = model.evaluate(gaps.with_columns(gaps[column].gather(draw.permutation(len(gaps)))))
        for task, metric, sign in (("click", "auroc", 1), ("minutes", "mse", -1)):
            lost = sign * (before[f"{task}/{metric}"] - after[f"{task}/{metric}"])
            assert table.filter(task=task, column=column)["importance"].item() == lost


def test_importance_of_the_rows_of_a_file(model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = visits(300, seed=1)
    rows.write_csv(tmp_path / "new.csv")
    model.save(tmp_path / "model.ckpt")
    given = [str(tmp_path / "model.ckpt"), str(tmp_path / "new.csv"), "--repeats", "2", "--device", "cpu"]
    importance_command([*given, "-o", str(tmp_path / "importance.parquet")])
    found = model.importance(rows, repeats=2)
    assert pl.read_parquet(tmp_path / "importance.parquet").equals(found)
    capsys.readouterr()
    importance_command(given)
    shown = [line.split() for line in capsys.readouterr().out.splitlines() if " age " in line]
    assert [words[:3] for words in shown if words[0] == "minutes"] == [["minutes", "age", "mse"]]


def test_effects_compare_a_cell_with_those_of_other_rows(model: Any, tmp_path: Path) -> None:
    """An effect is the prediction minus its mean with other cells in the column; the command writes the same."""
    rows, others = visits(3, seed=1), visits(40, seed=2)
    found = model.explain(rows, reference=others, samples=4)
    assert found.group_by("row", "task").len()["len"].unique().to_list() == [len(model.columns)]
    cells = others.select(model.columns).sample(4, with_replacement=True, seed=0)["age"]
    for column, task in (("minutes_prediction", "minutes"), ("clicked_probability", "clicked")):
        means = np.mean([model.predict(rows.with_columns(age=pl.lit(cell)))[column].to_numpy() for cell in cells], 0)
        expected = model.predict(rows)[column].to_numpy() - means
        effects = found.filter(task=task, column="age").sort("row")["effect"].to_numpy()
        assert np.allclose(effects, expected, atol=1e-6)
    plan = model.predict(rows)["plan_class"][0]
    basic = np.mean([model.predict(rows[:1].with_columns(age=cell))[f"plan_probability_{plan}"][0] for cell in cells])
    effect = found.filter(row=0, task="plan", column="age")["effect"][0]
    assert effect == pytest.approx(model.predict(rows)[f"plan_probability_{plan}"][0] - basic, abs=1e-6)
    with pytest.raises(InputError, match="one row has nothing to be compared with"):
        model.explain(rows[:1])
    model.save(tmp_path / "model.ckpt")
    rows.write_csv(tmp_path / "rows.csv")
    others.write_csv(tmp_path / "others.csv")
    given = [str(tmp_path / name) for name in ("model.ckpt", "rows.csv")]
    words = ["--reference", str(tmp_path / "others.csv"), "--samples", "4", "--device", "cpu"]
    explain_command([*given, *words, "-o", str(tmp_path / "effects.parquet")])
    assert pl.read_parquet(tmp_path / "effects.parquet").equals(found)


def test_effects_are_printed_with_prediction_and_experts(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model.save(tmp_path / "model.ckpt")
    visits(30, seed=1).write_csv(tmp_path / "rows.csv")
    explain_command([str(tmp_path / "model.ckpt"), str(tmp_path / "rows.csv"), "--tasks", "minutes", "--device", "cpu"])
    out = capsys.readouterr().out
    assert "its mean with the cells of 20 other rows" in " ".join(out.split())
    lines = [line.split() for line in out.splitlines() if " minutes " in line]
    assert [words[0] for words in lines] == [str(row) for row in range(1, 11)]


def test_effects_are_printed_without_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mtl.fit(visits(), {"clicked": "binary"}, **QUICK | {"network": "shared_bottom"}).save(tmp_path / "model.ckpt")
    visits(3, seed=1).write_csv(tmp_path / "rows.csv")
    explain_command([str(tmp_path / "model.ckpt"), str(tmp_path / "rows.csv"), "--device", "cpu"])
    out = capsys.readouterr().out
    assert "largest effects" in out
    assert "xperts" not in out


def test_rows_that_explain_makes_up_are_not_warned_of(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Two rows of an unknown city become 40; of 40 real ones the encoder would warn."""
    rows = visits(40, seed=1).with_columns(city=pl.lit("Paris"))
    model.encoder.remarks.warned.clear()
    model.explain(rows[:2], reference=visits(40, seed=2), samples=20)
    assert "unknown or rare" not in caplog.text
    model.predict(rows)
    assert "40 of 40 cells are unknown or rare" in caplog.text


def test_importance_for_an_undefined_metric_is_nan(model: Any) -> None:
    found = model.importance(visits(300, seed=1).filter(clicked=1), repeats=2).filter(task="clicked")
    assert found["metric"].unique().to_list() == ["auroc"]
    assert found["importance"].is_nan().all()
    assert found["std"].is_nan().all()


def test_last_state_and_own_yaml_files(model: Any, tmp_path: Path) -> None:
    """``test_checkpoint=last`` returns the last weights; a gate in a file of one's own is found by its name."""
    (tmp_path / "my, conf" / "gate").mkdir(parents=True)
    (tmp_path / "my, conf" / "gate" / "mine.yaml").write_text("_target_: mtl.gates.SoftmaxGate\n_partial_: true\n")
    options = {**SMALL, "optimizer.lr": 10.0, "test_checkpoint": "last"}
    folder, test = tmp_path / "my, conf", visits(50, seed=2)
    found = mtl.fit(visits(), TASKS, test=test, gate="mine", config_dir=folder, **QUICK | {"options": options})
    assert found.evaluate(test) == pytest.approx(dict(found.metrics))
    assert type(found.network.mixture.gate).__name__ == "SoftmaxGate"


def test_interrupt_keeps_the_best_state(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C after two of 50 epochs gives the model of two epochs, tested."""
    shown = EpochBar.on_train_epoch_end

    def interrupted(bar: EpochBar, trainer: Any, module: Any) -> None:
        shown(bar, trainer, module)
        if trainer.current_epoch == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(EpochBar, "on_train_epoch_end", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    stopped = mtl.fit(visits(), TASKS, **QUICK | {"max_epochs": 50, "progress": True})
    assert same(model, stopped)
    assert stopped.metrics == model.metrics
    assert "stopped by Ctrl-C after step 2; the best state so far is kept" in caplog.text
    assert signal.getsignal(signal.SIGINT) == handler


def test_ctrl_c_during_the_test_says_that_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MultiTaskModule, "on_test_epoch_end", lambda module: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match=r"^stopped by SIGINT; without folder=, nothing is kept$"):
        mtl.fit(visits(), TASKS, **QUICK)


def test_killed_and_resumed_equals_one_that_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After SIGTERM and after a kill; rows in memory, and names that no word of Hydra's can hold."""
    tasks = {"it's: clicked": {"kind": "binary", "column": "clicked"}, "minutes": "regression"}
    given: dict[str, Any] = QUICK | {"gate": "topk", "seed": 3, "max_epochs": 4, "batch_size": 64, "ignore": ["plan"]}
    whole = mtl.fit(visits(), tasks, **given)
    shown = EpochBar.on_train_epoch_start

    def stopped(bar: EpochBar, trainer: Any, module: Any) -> None:
        shown(bar, trainer, module)
        if trainer.current_epoch == 1:
            signal.raise_signal(signal.SIGTERM)
        if trainer.current_epoch == 2:
            raise MemoryError("as if it were killed")

    monkeypatch.setattr(EpochBar, "on_train_epoch_start", stopped)
    given["progress"] = True
    with pytest.raises(Stopped, match=r"^stopped by SIGTERM; without folder=, nothing is kept$"):
        mtl.fit(visits(), tasks, **given)
    folder = tmp_path / "run"
    call = re.escape(f"mtl.fit(frame, tasks, resume='{folder}')")
    with pytest.raises(Stopped, match=f"^stopped by SIGTERM after step 4, saved; resume with: {call}$"):
        mtl.fit(visits(), tasks, **given, folder=folder)
    with pytest.raises(InputError, match=f"contains a run already; resume it with: {call}; or choose another folder"):
        mtl.fit(visits(), tasks, **given, folder=folder)
    with pytest.raises(MemoryError):
        mtl.fit(visits(), tasks, resume=folder)
    for wrong, message in (
        ({"frame": visits(seed=1)}, "the run has other rows"),
        ({"lr": 1.0}, "optimizer.lr is 0.001 in the checkpoint, 1.0 now"),
        ({"folder": folder}, "folder and resume: give one or the other"),
        ({"resume": tmp_path}, "no such file"),
        ({"tasks": TASKS}, "data.tasks.* in the checkpoint"),
    ):
        with pytest.raises(InputError, match=message):
            mtl.fit(**{"frame": visits(), "tasks": tasks, "resume": folder} | wrong)
    with pytest.raises(InputError, match=f"this run has its rows from Python; {call} goes on with it"):
        read_start([f"ckpt={folder}"])
    again = mtl.fit(visits(), tasks, resume=folder, progress=False)
    assert same(whole, again)
    assert whole.metrics == again.metrics


def test_names_and_values_that_hydra_cannot_read(tmp_path: Path) -> None:
    """Columns may have any names; the run in ``folder`` is one like others, and no run replaces it."""
    names = {"clicked": "Umsatz > 0 (€)", "city": "it's: a, b"}
    rows = visits().rename(names)
    tasks = {names["clicked"]: {"kind": "binary", "positive": 0}}
    ignored: dict[str, Any] = {"ignore": ["minutes", "plan", "it's: a, b"], "folder": tmp_path / "run"}
    model = mtl.fit(rows, tasks, **QUICK, **ignored)
    assert model.columns == ["age", "visits"]
    assert model.metrics[f"{names['clicked']}/auroc"] == mtl.load(tmp_path / "run").metrics[f"{names['clicked']}/auroc"]
    with pytest.raises(InputError, match=r"contains a run already; .*choose another folder"):
        mtl.fit(rows, tasks, **QUICK, **ignored)
    with pytest.raises(InputError, match="has no column"):
        mtl.fit(rows, TASKS, **QUICK, folder=tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


@pytest.fixture
def _own_hydra(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "mine.yaml").write_text("answer: 42\n")
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(tmp_path), version_base="1.2"):
        yield


@pytest.mark.usefixtures("_own_hydra")
def test_program_of_the_caller_is_left_as_it_was(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Hydra, random numbers, variables, threads and allocator; and a second fit equals the first."""
    monkeypatch.setattr(memory, "keep_freed_memory", lambda: pytest.fail("the allocator would change for good"))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    variables, threads, version = dict(os.environ), torch.get_num_threads(), VersionBase.instance().getbase()
    mtl.fit(visits(), {"clicked": "binary"}, gate="topk", seed=3, threads=1, **QUICK)
    assert same(model, mtl.fit(visits(), TASKS, **QUICK))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert (dict(os.environ), torch.get_num_threads()) == (variables, threads)
    assert VersionBase.instance().getbase() == version
    assert compose("mine").answer == 42


def with_cell(name: str, value: Any) -> Any:
    """Return the rows as pandas has them, with one cell replaced."""
    frame = as_pandas(visits())
    frame[name] = frame[name].astype(object)
    frame.loc[3, name] = value
    return frame


CALL = {"kind": "multiclass", "_target_": "os.getcwd"}
YES = pl.when(pl.col("age") > 40).then(pl.lit("yes")).otherwise(pl.lit("no"))
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "tasks": ({"tasks": ["clicked"]}, r"tasks=\[\"clicked\"\]: must be a dict of names and kinds"),
    "kind": ({"tasks": {"clicked": "binry"}}, "data.tasks.clicked=binry: must be 'binary', .*; did you mean binary"),
    "column": (
        {"tasks": {"click": "binary"}},
        "frame has no column 'click' \\(did you mean 'clicked'\\?\\)",
    ),
    "no tasks": ({"tasks": {}}, "data.tasks is empty: give at least one task"),
    "no rows": ({"frame": visits().clear()}, "frame has no rows"),
    "text": ({"frame": with_cell("minutes", "ten")}, "frame, column 'minutes', row 4: 'ten' is not a number"),
    "text as numbers": (
        {"tasks": {"plan": "regression"}},
        "plan.kind=regression: column 'plan' .*; use kind=multiclass",
    ),
    "two texts": ({"tasks": {"yes": "regression"}, "frame": visits().with_columns(yes=YES)}, "'yes'; use kind=binary"),
    "share of valid": ({"valid": 1.5}, "^valid=1.5: shares must be between 0 and 1, and leave rows"),
    "shares of all": ({"valid": 0.5, "test": 0.5}, "^valid=0.5, test=0.5: shares must be between 0 and 1, and leave"),
    "one class": (
        {"frame": visits().with_columns(clicked=1)},
        "frame, column 'clicked': all .* are '1'; .* two classes",
    ),
    "class": ({"tasks": {"plan": CALL}}, "no such option"),
    "class in it": ({"tasks": {"plan": {"kind": "multiclass", "class_weights": CALL}}}, "class_weights"),
    "folder": ({"folder": 5}, "folder=5: must be a path"),
    "folder with a NUL": ({"folder": "a\0b"}, r"folder=a\\x00b: must be a path"),
    "folder that interpolates": ({"folder": "${x}"}, r"folder=\$\{x\}: must be a path without \$\{"),
    "options": ({"options": [1]}, r"options=\[1\]: must be a valid dictionary"),
    "option that is no text": ({"options": {1: 2}}, "options.1: this name must be a valid string"),
    "long option": ({"options": {"q" * 5000: 1}}, r"File name too long: .*\.\.\.q{50}"),
    "folder that is a file": ({"folder": __file__}, "test_fit.py cannot be written: file exists"),
    "folder with a long name": ({"folder": "q" * 5000}, "cannot be written: file name too long"),
    "long task": ({"tasks": {"q" * 5000: "binary"}}, "this name must be text of at most 100 characters"),
    "objects": (
        {"frame": visits().with_columns(clicked=pl.Series([object()] * 200, dtype=pl.Object))},
        "frame, column 'clicked': its type Object is neither text nor number; .* holds the labels",
    ),
    "groups of lists": (
        {"frame": visits().with_columns(of=pl.lit([1, 2])), "group_column": "of"},
        r"frame, column 'of': its type List\(Int..\) is neither text nor number",
    ),
    "weights of lists": (
        {"frame": visits().with_columns(w=pl.lit([1, 2])), "weight_column": "w"},
        r"frame, column 'w': its type List\(Int..\) is neither text nor number",
    ),
    "options and keyword": (
        {"max_epochs": 2, "options": {"trainer": {"max_epochs": 3}}},
        "trainer.max_epochs is given twice, by a keyword or in options",
    ),
    "option in two ways": (
        {"options": {"optimizer": {"lr": 1e-3}, "optimizer.lr": 1e-2}},
        "optimizer.lr is given twice, by a keyword or in options",
    ),
    "fractions in two ways": ({"test": 0.2, "split": {"fractions": [0.8, 0.1, 0.1]}}, "fractions are given twice"),
    "config_dir": ({"config_dir": "nothing"}, "config_dir=nothing: no such folder"),
    "resume": ({"resume": "nothing"}, "checkpoint nothing: no such file"),
    "no file": ({"frame": "nowhere.csv"}, "nowhere.csv"),
    "keyword": ({"max_epoch": 3}, "max_epoch: no such keyword; did you mean max_epochs"),
    "option": ({"options": {"optimizer.lrr": 3}}, "optimizer.lrr=3: no such option; did you mean optimizer.lr"),
    "valid": ({"valid": visits().drop("city")}, "valid lacks columns of frame: .*city"),
    "epochs": ({"max_epochs": 0}, "max_epochs=0 trains nothing"),
    "name": ({"tasks": {"${x}": "binary"}}, r"this name must be text .*\$\{"),
    "ignored": ({"ignore": np.array(["age", "cty"])}, "no column 'cty' \\(did you mean 'city'"),
    "devices": ({"devices": 2}, "trainer.devices=2 makes 2 processes: mtl.fit trains in one"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_gives_one_sentence(name: str) -> None:
    wrong, sentence = WRONG[name]
    given = {"frame": visits(), "tasks": TASKS, **QUICK, **wrong}
    with pytest.raises(InputError, match=sentence) as error:
        mtl.fit(**given)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("method", "option", "value"),
    [
        ("predict", "tasks", 3),
        ("predict", "tasks", "clicked"),
        ("predict", "batch_size", 1.5),
        ("routing", "batch_size", 0),
        ("evaluate", "batch_size", -1),
        ("importance", "seed", -1),
        ("importance", "repeats", 0),
        ("importance", "repeats", -1),
        ("explain", "samples", 0),
        ("drift", "batch_size", "x"),
    ],
)
def test_wrong_option_of_a_method_is_one_sentence(model: Any, method: str, option: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"^{option}={value}: "):
        getattr(model, method)(visits(20), **{option: value})


def test_a_run_needs_no_best_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    frame = pl.DataFrame({"x": range(60), "y": [0, 1] * 30})
    quick: dict[str, Any] = QUICK | {"max_epochs": 1, "progress": True, "options": {"callbacks.best": None}}
    mtl.fit(frame, {"y": "binary"}, **quick)
    assert "the run keeps no best checkpoint: testing the last weights" in caplog.text
    assert "no finite" not in caplog.text
