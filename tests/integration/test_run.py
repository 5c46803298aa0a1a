"""Train, go on, evaluate, sweep: what a user does, on small data."""

from __future__ import annotations

import csv
import json
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mtl.checkpoints.files import read
from mtl.checks import InputError
from mtl.pipeline.run import run
from mtl.report.runs import read_runs
from mtl.report.watch import progress_of
from mtl.training.module import MultiTaskModule
from mtl.training.schedules import SHAPES
from tests.conftest import ROOT
from tests.integration.helpers import compose_small, resume_small
from tests.programs import Forked, Outcome

DRAWN = ["logger=tensorboard", "callbacks.routing.figures=true", "callbacks.routing.figures_every_n_epochs=2"]
FEW = ["data.rows=[300,100,100]", "data.num_groups=1", "data.tasks_per_group=3", "callbacks.routing.figures=false"]


def program(folder: Path, *words: str) -> Outcome:
    """Run the program as its user does; ``folder`` takes what it prints."""
    return Forked([*words, "trainer.accelerator=cpu", "callbacks.progress=null"], folder, cwd=ROOT).wait()


def losses(run_dir: Path) -> dict[str, float]:
    return json.loads((run_dir / "results.json").read_text())["numbers"]["test"]["network"]


def test_files_of_a_run(tmp_path: Path) -> None:
    cfg = compose_small(tmp_path, "trainer.max_epochs=3", *DRAWN)
    best = run(cfg)
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["best"] == pytest.approx(best)
    assert record["numbers"]["val"]["network"]["loss"] == pytest.approx(best)  # of the tested checkpoint
    assert record["epochs"] == 3
    assert record["seconds_per_epoch"] > 0
    test = record["numbers"]["test"]["network"]
    assert {"loss", "experts_per_sample", "task_000/loss", "task_000/mse"} <= test.keys()
    assert record["versions"]["torch"] == torch.__version__
    assert record["versions"].keys() >= {"mtl", "commit", "python"}
    saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert saved == ["best.ckpt", "last.ckpt", "last.previous.ckpt"]
    assert list(tmp_path.glob("events*"))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".results")]
    assert test["flops_selected"] <= test["flops_dense"]
    routing = {path.name for path in (tmp_path / "routing").iterdir()}
    names = ("expert_share", "weights_over_training")
    assert set(record["numbers"]["training"]["network"]) == {"flops_dense", "flops_selected", "binary_after"}
    assert routing == {f"{name}.{kind}" for name in names for kind in ("png", "csv")}


def test_a_run_has_its_own_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was given, as torch has chosen, or one, for the small layers of the default of tables."""
    usual, seen = torch.get_num_threads(), []
    monkeypatch.setattr(MultiTaskModule, "on_train_start", lambda module: seen.append(torch.get_num_threads()))
    try:
        for overrides in (["threads=3"], [], ["recipe=table_quick"]):
            run(compose_small(tmp_path, "trainer.max_steps=1", *overrides))
    finally:
        torch.set_num_threads(usual)
    assert seen == [3, usual, 1]


def test_a_run_may_end_inside_its_first_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "not" / "there"
    assert run(compose_small(folder, "trainer.max_steps=2")) > 0  # the test loss: there is no val/loss
    record = json.loads((folder / "results.json").read_text())
    assert record["checkpoint"] == "last weights"
    assert record["best"] is None
    assert "no finite val/loss was measured" in caplog.text


def test_logged_values_belong_to_their_step(tmp_path: Path) -> None:
    words = ["gate=softmax_selector", "schedule=temperature", "callbacks.temperature_schedule.epochs=2"]
    words += ["logger=tensorboard"]
    run(compose_small(tmp_path, *words, "trainer.log_every_n_steps=3", "data.batch_size=100"))  # 6 steps an epoch
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("train/step_loss")] == [2, 5, 8, 11]
    course = events.Scalars("train/schedule/gate.temperature")
    config = compose_small(tmp_path, *words).callbacks.temperature_schedule
    expected = [
        SHAPES[config.get("shape", "log_linear")](step / 12, config.start, config.end) for step in (2, 5, 8, 11)
    ]
    assert [event.step for event in course] == [2, 5, 8, 11]
    assert [event.value for event in course] == pytest.approx(expected)


def test_tensorboard_holds_curves_and_pictures(tmp_path: Path) -> None:
    words = ["permutation=sinkhorn", "recipe.permutation.epochs=0.5", "trainer.max_epochs=2"]
    run(compose_small(tmp_path, *words, *DRAWN))
    events = EventAccumulator(str(tmp_path)).Reload()
    tags = events.Tags()
    names = ("expert_share", "permutation", "weights_over_training")
    assert {name: len(events.Images(name)) for name in tags["images"]} == {f"views/{name}": 2 for name in names}
    last = events.Images("views/permutation")[-1]
    assert last.encoded_image_string == (tmp_path / "routing" / "permutation.png").read_bytes()
    assert {"train/loss", "val/loss", "val/experts_per_sample"} <= set(tags["scalars"])
    course = {"train/permutation_soft_to_hard", "train/schedule/permutation.tau", "train/step_loss"}
    assert course <= set(tags["scalars"])
    assert "val/task_000/loss" in tags["scalars"]
    assert (tmp_path / "routing" / "permutation.csv").is_file()


def test_a_run_with_two_loggers_resumes_with_both(tmp_path: Path) -> None:
    words = ["trainer.max_epochs=1", "logger=[tensorboard,csv]", "logger.csv.flush_logs_every_n_steps=7"]
    run(compose_small(tmp_path, *words))
    cfg = resume_small(tmp_path / "checkpoints" / "last.ckpt", tmp_path, "trainer.max_epochs=2")
    assert set(cfg.logger) == {"tensorboard", "csv"}
    assert cfg.logger.csv.flush_logs_every_n_steps == 7
    run(cfg)
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        assert [row["epoch"] for row in csv.DictReader(file) if row["val/loss"]] == ["0", "1"]
    events = EventAccumulator(str(tmp_path)).Reload()
    assert len(events.Scalars("val/loss")) == 2


def test_the_last_checkpoint_can_be_the_tested_one(tmp_path: Path) -> None:
    """A search then judges the trial by that checkpoint too, not by an earlier epoch."""
    value = run(
        compose_small(tmp_path, "test_checkpoint=last", "optimizer.lr=1.0", "trainer.max_epochs=5", "logger=csv")
    )
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["checkpoint"].endswith("last.ckpt")
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        curve = [float(row["val/loss"]) for row in csv.DictReader(file) if row.get("val/loss")]
    assert value == results["best"] == pytest.approx(curve[-1]) != pytest.approx(min(curve))
    with pytest.raises(InputError, match="must be 'best' or 'last'"):
        run(compose_small(tmp_path, "test_checkpoint=first"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    run(compose_small(folder, "trainer.max_epochs=1"))
    return folder


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gate=topk"], r"gate._target_ is mtl.gates.CometGate in the checkpoint, mtl.gates.TopKGate now"),
        (["gate.k=3"], r"gate.k is 2 in the checkpoint, 3 now"),
        (["recipe.learning_rate=0.1"], r"optimizer.lr is 0.01 in the checkpoint, 0.1 now"),
        (["recipe=movielens"], r"network.experts.dropout is 0.0 in the checkpoint, 0.5 now"),
    ],
)
def test_checkpoint_of_another_configuration(words: list[str], message: str, trained: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        resume_small(trained / "checkpoints" / "last.ckpt", tmp_path, *words)


def without_overrides(cfg: DictConfig) -> dict[str, Any]:
    return {key: value for key, value in cfg.items() if key != "overrides"}


def test_a_group_named_on_resume_keeps_what_the_run_has_set_itself(tmp_path: Path) -> None:
    words = ["recipe.patience=3", "trainer.gradient_clip_val=0.5", "trainer.accumulate_grad_batches=2"]
    words += ["trainer.max_epochs=1", "lr_schedule=linear", "callbacks.lr_schedule.warmup=0.3"]
    words += ["callbacks.lr_schedule.end_factor=0.2"]  # which plateau lacks
    run(compose_small(tmp_path, *words, "callbacks.last.every_n_steps=7"))
    path = tmp_path / "checkpoints" / "last.ckpt"
    same = without_overrides(resume_small(path, tmp_path))
    for group in ("recipe=synthetic_moe", "trainer=default", "callbacks=default", "lr_schedule=linear", "gate=comet"):
        assert without_overrides(resume_small(path, tmp_path, group)) == same, group
    cfg = resume_small(path, tmp_path, "trainer=ddp_cpu", "trainer.devices=3", "trainer.max_epochs=4")
    changed = {"devices": 3, "max_epochs": 4, "accelerator": "cpu", "strategy": cfg.trainer.strategy}
    assert dict(cfg.trainer) == dict(same["trainer"]) | changed
    assert cfg.trainer.strategy.broadcast_buffers is False
    assert resume_small(path, tmp_path, "recipe.max_epochs=9").trainer.max_epochs == 1  # it was set to 1 itself
    plateau = resume_small(path, tmp_path, "lr_schedule=plateau").callbacks.lr_schedule
    assert (plateau.warmup, plateau.factor) == (0.3, 0.5)


def test_a_sweep_goes_on_after_a_failure_and_says_why(tmp_path: Path) -> None:
    words = ["-m", "gate=topk", "gate.k=99,1", "seed=1", *FEW, "trainer.max_epochs=1"]
    done = program(tmp_path / "printed", *words, f"hydra.sweep.dir={tmp_path}/sweep")
    assert done.status == 1
    table = read_runs([tmp_path / "sweep"]).table
    assert table["setting"].to_list() == ["99", "1"]
    assert table["state"].to_list() == ["failed", "finished"]
    assert table["reason"][0].startswith("gate.k=99: cannot select 99 of")
    assert (tmp_path / "sweep" / "summary.csv").read_text() == table.write_csv()
    failed, finished = sorted(path for path in (tmp_path / "sweep").iterdir() if path.is_dir())
    assert not (failed / "results.json").exists()
    assert json.loads((finished / "command.json").read_text())["choices"]["gate"] == "topk"


def test_a_sweep_started_again_skips_what_has_finished_and_resumes_the_rest(tmp_path: Path) -> None:
    words = ["-m", "seed=1,2", *FEW, "trainer.max_epochs=12", "trainer.accelerator=cpu", "callbacks.progress=null"]
    words += [f"hydra.sweep.dir={tmp_path}/sweep"]
    first, second = (tmp_path / "sweep" / f"{n}_synthetic_moe_comet_seed{n + 1}" for n in range(2))
    running = Forked(words, tmp_path / "stopped", cwd=ROOT)
    running.wait_for(second / "checkpoints" / "last.ckpt")
    running.signal(signal.SIGTERM)
    outcome = running.wait()
    assert outcome.status == 128 + signal.SIGTERM
    assert "stopped by SIGTERM after step" in outcome.output
    assert "Traceback" not in outcome.output
    assert not list(second.glob("checkpoints/.*"))
    stopped_at = read(second / "checkpoints" / "last.ckpt")["global_step"]
    finished = {path: path.stat().st_mtime_ns for path in first.rglob("*") if path.suffix != ".log"}
    outcome = Forked(words, tmp_path / "again", cwd=ROOT).wait()
    assert outcome.status == 0, outcome.output
    assert f"{first} has finished before" in outcome.output
    assert "Mean ± standard error over 2 seeds" in " ".join(outcome.output.split())
    assert read_runs([tmp_path / "sweep"]).table["seed"].to_list() == [1, 2]
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*") if path.suffix != ".log"} == finished
    assert json.loads((second / "results.json").read_text())["epochs"] == 12
    assert (second / "train.log").read_text().count("INFO mtl.callbacks.epoch_report: epoch ") == 12
    epochs, best, _ = progress_of(second / "train.log", "val/loss")
    assert (epochs, best) == (12, pytest.approx(json.loads((second / "results.json").read_text())["best"], rel=1e-3))
    assert 0 < stopped_at < read(second / "checkpoints" / "last.ckpt")["global_step"]
    words[1] = "seed=1,3"  # another job in the same folder
    outcome = Forked([*words, "hydra.sweep.subdir=0_synthetic_moe_comet_seed1"], tmp_path / "other", cwd=ROOT).wait()
    assert "contains a run already" in outcome.output


def test_printed_command_works_with_files_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "my conf" / "data").mkdir(parents=True)
    (tmp_path / "my conf" / "data" / "mine.yaml").write_text("defaults: [table, _self_]\ntasks: {y: {kind: binary}}\n")
    (tmp_path / "rows.csv").write_text("x,y\n" + "".join(f"{n % 7},{n % 2}\n" for n in range(60)))
    folder, conf = tmp_path / "my run", ["--config-dir", f"{tmp_path}/my conf"]
    words = [*conf, "data=mine", f"data.path={tmp_path}/rows.csv", "trainer.max_epochs=1", f"hydra.run.dir='{folder}'"]
    words += [f"paths.data_dir='{tmp_path}/my sets'", "callbacks.routing.figures=false", "blend=none"]
    assert program(tmp_path / "first", *words).status == 0
    refused = program(tmp_path / "refused", *words).output
    resume = shlex.split(refused.partition("resume it with: ")[2].partition("; or")[0])
    assert resume[:2] == ["python", "train.py"]
    assert program(tmp_path / "resumed", *resume[2:], "trainer.max_epochs=2").status == 0
    config = OmegaConf.load(folder / "config.yaml")
    assert (config.trainer.max_epochs, config.paths.data_dir) == (2, f"{tmp_path}/my sets")
    test = [f"evaluate='{folder}/checkpoints/best.ckpt'", f"data.test_path={tmp_path}/rows.csv"]
    for own in (conf, []):  # the checkpoint has the options of the file
        outcome = program(tmp_path / "tested", *own, *test, f"paths.output_dir={tmp_path}")
        assert outcome.status == 0, outcome.output
    (tmp_path / "my conf" / "gate").mkdir()
    (tmp_path / "my conf" / "gate" / "ours.yaml").write_text("defaults: [topk]\n")
    own = [*conf, "gate=ours", "hydra.run.dir=" + str(tmp_path / "other"), "data.split.fractions=[0.8,0.1,0.1]"]
    assert program(tmp_path / "other_output", *[word for word in words if "run.dir" not in word], *own[2:]).status == 0
    outcome = program(tmp_path / "tested", f"evaluate={tmp_path}/other", f"paths.output_dir={tmp_path}")
    assert "the checkpoint has gate=ours, a file of your own: add --config-dir FOLDER, which holds" in outcome.output


def test_a_failed_run_says_why_in_its_log(tmp_path: Path) -> None:
    """The console shows the message once."""
    words = [*FEW, "optimizer.lr=1e30", "trainer.max_epochs=9", f"hydra.run.dir={tmp_path}/run"]
    done = program(tmp_path / "printed", *words)
    [message] = [line for line in done.output.splitlines() if line.startswith("error: ")]
    row = read_runs([tmp_path / "run"]).table.row(0, named=True)
    assert (row["state"], row["reason"]) == ("failed", message.removeprefix("error: "))
