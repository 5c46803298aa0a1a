"""What a run says at its end: advice with measured reasons, and commands that work as they are."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from mtl.checkpoints.files import read
from mtl.cli.report import main as report
from mtl.cli.use import predict
from mtl.pipeline import finish
from mtl.pipeline.advice import advice, never_predicted, size_advice, skill_score, unhelpful_calibration
from mtl.pipeline.run import run
from mtl.report.baseline_comparison import compare_with_baselines, describe_many_tasks, describe_task
from mtl.runs.caller import Caller
from mtl.runs.commands import CommandLine
from mtl.table_models import MAX_OUTPUTS
from mtl.training.labeled_predictions import LabeledPredictions
from mtl.training.measurements import Measurements
from mtl.types import TaskSpec
from tests.integration.helpers import compose_small
from tests.unit.test_fit import SMALL, visits

FINE = {"epoch": 3, "val": 0.5, "train": 0.5, "since": 5, "later_val": 0.52, "last_train": 0.4}
RECORD: dict[str, Any] = {
    "main_metrics": {"a": "auroc", "b": "mse"},
    "numbers": {
        "test": {"network": {"a/auroc": 0.8, "b/mse": 1.0}, "constant": {"a/auroc": 0.5, "b/mse": 2.0}},
        "val": {"network": {"a/loss": 0.5, "b/loss": 0.5}},
    },
    "parameters": 24_000,
    "data": {"rows": {"train": 20}},
}


def test_no_advice_without_a_measured_reason() -> None:
    assert advice(RECORD, {"a": FINE, "b": FINE}) == []
    for small in ({"since": 2, "later_val": 0.9}, {"later_val": 0.9, "last_train": 0.6}):
        assert advice(RECORD, {"a": FINE | small, "b": FINE}) == []
    assert advice({**RECORD, "numbers": {}}, {}) == []


def test_advice_names_tasks_and_numbers() -> None:
    [over] = advice(RECORD, {"a": FINE, "b": FINE | {"later_val": 0.6}})
    assert over.startswith("Over-fitting from epoch 4: the validation loss rises (b 0.5, then 0.6)")
    assert "Try a smaller network (recipe.expert_units; 1,200 parameters for each training row)" in over
    [over] = advice({**RECORD, "data": {"rows": {"train": {"a": 5, "b": 15}}}}, {"b": FINE | {"later_val": 0.6}})
    assert "1,200 parameters for each training row" in over
    [apart] = advice(RECORD, {"a": FINE, "b": FINE | {"val": 0.4, "later_val": 0.4}})
    assert apart.startswith("Not at their best in the tested epoch: b 0.4, tested 0.5,")
    test = RECORD["numbers"]["test"] | {"network": {"a/auroc": 0.504, "b/mse": 2.1}}
    assert advice({**RECORD, "numbers": {"test": test}}, {}) == ["No better than a constant prediction: a; b."]


def test_quick_models_are_better_or_worse_only_beyond_the_error_of_the_test_rows() -> None:
    def said(error: float, **network: float) -> list[str]:
        names = {"a": "a/auroc", "b": "b/mse"}
        test = {
            "network": {names[task]: value for task, value in network.items()},
            "constant": {"a/auroc": 0.5},
            "network - constant": {"a/auroc": [0.3, 0.01]},
            "linear": {"a/auroc": 0.79, "b/mse": 1.5},
            "network - linear": {"a/auroc": [0.01, error], "b/mse": [-0.5, 0.2]},
        }
        return compare_with_baselines(Measurements.from_plain({"test": test}), RECORD["main_metrics"])

    assert said(0.006, a=0.8, b=1.0) == ["Against linear on these test rows: better in b; undecided in a."]
    assert said(0.005, a=0.8, b=1.0) == ["Against linear on these test rows: better in a, b."]
    assert said(0.005, a=0.7, b=2.0) == ["Against linear on these test rows: worse in a, b."]
    alone = Measurements.from_plain(RECORD["numbers"])
    assert compare_with_baselines(alone, RECORD["main_metrics"]) == []


def measured_with(metric: str, lead: float, sem: float | None, constant: float = 0.5) -> Measurements:
    """Return a network of value 0.8 whose lead over a linear model has the error ``sem``; a forest is further away."""
    leads = {"constant": (0.8 - constant, 0.05), "linear": (lead, sem), "forest": (2 * abs(lead) + 0.1, 0.01)}
    sign = -1 if metric == "mse" else 1
    models = {model: {f"a/{metric}": 0.8 - sign * by} for model, (by, _) in leads.items()}
    errors = {f"network - {m}": {f"a/{metric}": [sign * by, sem]} for m, (by, sem) in leads.items() if sem is not None}
    return Measurements.from_plain({"test": {"network": {f"a/{metric}": 0.8}, **models, **errors}})


@pytest.mark.parametrize("metric", ["auroc", "mse"])
@pytest.mark.parametrize(
    ("lead", "sem", "verdict", "advised"),
    [
        (0.02, 0.005, "better than linear, the best", "look below where it is wrong"),
        (0.02, 0.01, "undecided against linear, the best", "more test rows would decide it"),  # p is 2 * 0.0455
        (0.02, 0.02, "undecided against linear, the best", "more test rows would decide it"),
        (-0.02, 0.005, "worse than linear, the best", "use linear, or search better options with mtl tune"),
        (0.02, None, "beside linear, the best", "test on more rows"),
    ],
)
def test_a_task_has_one_line_with_what_to_do_next(
    metric: str, lead: float, sem: float | None, verdict: str, advised: str
) -> None:
    text = describe_task(measured_with(metric, lead, sem), "a", metric, 0.01)
    assert text.startswith(f"a: {metric} 0.800 [0.780, 0.820], better than a constant (")  # 0.8 -+ 1.96 * 0.01
    assert verdict in text
    assert text.count("lead") == (sem is not None)  # not that over a constant, which is clear
    assert f"Next: {advised}" in text
    assert "forest" not in text


def test_a_task_says_what_is_unknown() -> None:
    unlearned = measured_with("auroc", 0.02, 0.02, constant=0.75)
    text = describe_task(unlearned, "a", "auroc")
    assert "auroc 0.8000, undecided against a constant (0.7500, lead +0.050 [-0.048, 0.148])" in text
    assert "Next: check its labels and inputs" in text
    assert "auroc 0.80 [0.41, 1.00]," in describe_task(unlearned, "a", "auroc", 0.2)  # not above a perfect one
    lifted = Measurements.from_plain({"test": {"network": {"a/lift@10%": 3.33}}})
    assert "lift@10% 3.3 [1.4, 5.3]." in describe_task(lifted, "a", "lift@10%", 1.0)
    many = measured_with("auroc", 0.02, None)
    many.update(Measurements.of({f"test/t{number}/auroc": 0.7 for number in range(MAX_OUTPUTS)}))
    assert "Next: look below where it is wrong, or " in describe_task(many, "a", "auroc")  # no errors are computed
    assert describe_task(unlearned, "b", "auroc").startswith("b: auroc is undefined on these test rows. Next: ")
    alone = Measurements.from_plain({"test": {"network": {"a/auroc": 0.8}}})
    assert describe_task(alone, "a", "auroc").startswith("a: auroc 0.8000. Next: look below where it is wrong, or ")


def test_many_tasks_are_counted() -> None:
    values = {"network": [0.8, 0.6, None, 0.4], "constant": [0.5, 0.5, 0.5, 0.5], "linear": [0.9, None, 0.2, 0.3]}
    models = {model: {f"t{n}/auroc": value for n, value in enumerate(of)} for model, of in values.items()}
    text = describe_many_tasks(Measurements.from_plain({"test": models}), {f"t{n}": "auroc" for n in range(4)})
    assert text == "Better than constant in 2 of 3 tasks, linear in 1 of 2 tasks where both have a value."
    assert describe_many_tasks(Measurements(), {"t": "auroc"}) == ""


def test_skill_is_the_way_from_a_constant_to_a_perfect_prediction() -> None:
    assert skill_score("auroc", 0.75, 0.5) == 0.5
    assert skill_score("mse", 0.5, 2.0) == 0.75
    assert skill_score("accuracy", 1.0, 1.0) is None
    assert skill_score("coverage", 0.9, 0.8) is None
    assert skill_score("lift@10%", 3.0, 1.5) is None
    assert skill_score("auroc", None, 0.5) is None


def test_printed_commands_work_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    visits().write_csv(tmp_path / "my rows.csv")
    sizes = [f"{name}={value}".replace(" ", "") for name, value in SMALL.items()]
    tasks = ["data.tasks.clicked={kind: binary}", "data.tasks.plan={kind: multiclass}", "data.ignore=[minutes]"]
    words = ["data=table", f"data.path='{tmp_path}/my rows.csv'", *tasks, *sizes, "gate=topk", "trainer.max_epochs=2"]
    seen: list[Any] = []
    monkeypatch.setattr(finish, "advice", lambda record, progress: seen.append(progress) or ["Advice."])
    run(compose_small(tmp_path / "my run", *words), caller=Caller(CommandLine(arguments=words, overrides=words)))
    kept = read(tmp_path / "my run" / "checkpoints" / "last.ckpt")["callbacks"]["EpochReport"]["progress"]
    assert seen == [kept]  # not that of the best epoch, which is tested
    assert set(kept) == {"clicked", "plan"}
    end = capsys.readouterr().out.partition("next:\n")[2]
    first, second, third, time = [shlex.split(line) for line in end.splitlines()]
    predict(first[first.index("predict") + 1 :])
    assert "clicked_probability" in capsys.readouterr().out
    report(second[second.index("report") + 1 :])
    page = (tmp_path / "my run" / "summary.md").read_text()
    assert "Largest errors" in page
    assert "beside a constant (0.5000)" in page  # 19 rows are too few for an error
    assert "* Advice." in page
    kept = [word for word in words if word.startswith(("data", "trainer"))]
    options = third[third.index("tune") + 1 :]
    assert options[:4] == ["study=table", "name='my run'", "gate=topk", "n_trials=30"]
    assert set(kept) <= set(options)
    assert time[:3] == ["#", "31", "runs,"]


def test_classes_that_are_never_predicted_are_named() -> None:
    tasks = [
        TaskSpec("buy", "binary", classes=("no", "yes")),
        TaskSpec("kind", "multiclass", 4),
        TaskSpec("x", "binary"),
    ]
    rows = {
        "buy": LabeledPredictions(torch.tensor([0.1, 0.4]), torch.tensor([0, 1])),
        "kind": LabeledPredictions(torch.tensor([0, 0, 2]), torch.tensor([0, 1, 3])),
    }
    [sentence] = never_predicted(tasks, rows)
    assert sentence.endswith('in the test rows: buy: yes; kind: "1", "3".')
    assert not never_predicted(tasks, {"buy": LabeledPredictions(torch.tensor([0.1, 0.6]), torch.tensor([0, 1]))})


def test_a_network_that_is_too_large_for_its_rows_is_said_with_a_size_to_try() -> None:
    assert size_advice(1_000_000, 1000, [256]) == []
    [sentence] = size_advice(2_000_000, 1000, [512, 256])
    assert sentence.startswith("2,000 parameters besides embeddings for each training row: ")
    assert sentence.endswith("try recipe.expert_units=[256,128]")
    assert size_advice(7e6, 1000, [100])[0].endswith("=[8]")  # the power of two below 100 / 7
    assert size_advice(1e9, 1000, [256])[0].endswith("=[8]")
    assert size_advice(1e9, 0, [256]) == size_advice(1e9, 1000, []) == []


@pytest.mark.parametrize(("units", "advised"), [(4, False), (512, True)])
def test_a_run_on_a_table_says_how_many_parameters_a_row_has(
    units: int, advised: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    visits(200).write_csv(tmp_path / "rows.csv")
    words = [
        "data=table",
        f"data.path={tmp_path / 'rows.csv'}",
        "data.tasks.clicked=binary",
        "gate=softmax",
        "ensemble=1",
    ]
    with caplog.at_level("INFO"):
        run(
            compose_small(
                tmp_path / "run", *words, f"recipe.expert_units=[{units}]", "trainer.max_epochs=1", "blend=none"
            )
        )
    [first] = [line for line in caplog.messages if "parameters (" in line]
    assert " for each training row), run folder" in first
    assert any("besides embeddings" in line for line in caplog.messages) == advised


def test_calibration_that_makes_the_test_worse_is_named() -> None:
    measured = {"logloss before": 0.24, "logloss after": 0.25}
    [sentence] = unhelpful_calibration({"a": measured, "b": measured | {"logloss after": 0.2}, "c": {}})
    assert sentence.startswith("The calibration of a has not helped on the test rows")
    assert not unhelpful_calibration({})
