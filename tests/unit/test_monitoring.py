"""The best checkpoint and early stopping, on a run whose validation losses are given."""

from __future__ import annotations

import logging
import math
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mtl.callbacks.best_checkpoint import BestCheckpoint
from mtl.callbacks.early_stopping import EarlyStop
from mtl.callbacks.epoch_report import EpochReport, TrialReport, main_metric
from mtl.callbacks.last_checkpoint import LastCheckpoint
from mtl.callbacks.lr_schedule import PlateauRate
from mtl.callbacks.monitoring import MonitorCheck
from mtl.callbacks.routing_monitor import RoutingMonitor
from pytorch_lightning import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from mtl.checkpoints.files import CheckpointIO
from mtl.checks import InputError
from mtl.pipeline.run import HARMLESS_WARNINGS
from mtl.runs.signals import SIGNALS, Stopped
from mtl.training.module import MultiTaskModule
from mtl.types import TaskSpec
from tests.standins import bare_network

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in HARMLESS_WARNINGS]


class Scripted(LightningModule):
    """Logs the given validation losses, one for each validation."""

    def __init__(self, losses: Sequence[float], config: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.losses, self.config = list(losses), config or {}
        self.undefined: dict[str, str] = {}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        pass

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        self.log("val/loss", self.losses.pop(0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["config"] = {}

    def logged_names(self) -> list[str]:
        return ["val/loss"]


def fit(
    losses: Sequence[float], callbacks: list[Callback], ckpt: Path | None = None, config: Any = None, **options: Any
) -> Trainer:
    trainer = Trainer(
        max_epochs=options.pop("max_epochs", len(losses)),
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=options.pop("num_sanity_val_steps", 0),
        plugins=[CheckpointIO()],
        callbacks=callbacks,
        **options,
    )
    rows = DataLoader(torch.ones(4, 1), batch_size=2)
    trainer.fit(Scripted(losses, config), rows, rows, ckpt_path=ckpt, weights_only=True)
    return trainer


def step_of(path: Path) -> int:
    return int(torch.load(path, weights_only=True)["global_step"])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_nan_and_infinity_are_never_the_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit([math.nan, 0.5, -math.inf], [BestCheckpoint(str(tmp_path))])
    assert step_of(tmp_path / "best.ckpt") == 4
    assert "epoch 0: val/loss is nan, so its checkpoint is not kept" in caplog.text


def test_epoch_without_validation_does_not_count(tmp_path: Path) -> None:
    callbacks = [BestCheckpoint(str(tmp_path)), EarlyStop(patience=2)]
    trainer = fit([0.5, 0.6, 0.7, 0.8], callbacks, max_epochs=8, check_val_every_n_epoch=2)
    assert trainer.current_epoch == 6  # the second and third validation bring no improvement
    assert step_of(tmp_path / "best.ckpt") == 4


def test_callbacks_read_each_validation_once() -> None:
    """Not that of the sanity check; a plateau also those within an epoch, early stopping the last of an epoch."""
    stop, plateau = EarlyStop(patience=9), PlateauRate(patience=9)
    losses = [0.0, 0.5, 0.1, 0.2, 0.3]  # of the sanity check, then twice an epoch of two batches
    fit(losses, [stop, plateau], max_epochs=2, num_sanity_val_steps=1, val_check_interval=1, enable_checkpointing=False)
    assert (float(stop.best_score), stop.wait_count) == (pytest.approx(0.1), 1)
    assert (plateau.best, plateau.waited) == (pytest.approx(0.1), 2)


def test_only_trials_need_the_value_that_a_study_monitors() -> None:
    fit([0.5], [TrialReport()], config={"monitor": "val/other"}, enable_checkpointing=False)


def test_a_task_without_a_training_label_in_an_epoch_has_no_progress_there() -> None:
    """Its loss of an earlier epoch is still among the logged values."""
    trainer: Any = SimpleNamespace(callback_metrics={"train/a/loss": 0.4, "val/a/loss": 0.5}, current_epoch=1)
    report, module = EpochReport(), SimpleNamespace(tasks={"a": None})
    report.on_value(trainer, module, 0.5)  # type: ignore[arg-type]  # stand-ins
    assert report.progress == {}


@pytest.mark.parametrize("how", ["copied", "moved"])
def test_moved_run_goes_on_with_its_best(how: str, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    fit([0.3, 0.2, 0.6], [BestCheckpoint(str(here)), LastCheckpoint(str(here))])
    (shutil.copytree if how == "copied" else shutil.move)(here, there)
    best = BestCheckpoint(str(there))
    fit([0.9], [best, LastCheckpoint(str(there))], there / "last.ckpt", max_epochs=4)
    assert step_of(there / "best.ckpt") == 4
    assert Path(best.best_model_path).parent == there
    assert float(best.best_model_score) == pytest.approx(0.2)
    fit([0.1], [best, LastCheckpoint(str(there))], there / "last.ckpt", max_epochs=5)
    assert step_of(there / "best.ckpt") == 10
    if how == "copied":
        assert step_of(here / "best.ckpt") == 4


def test_a_killed_run_knows_a_best_that_is_newer_than_its_last_save(tmp_path: Path) -> None:
    last = tmp_path / "last.ckpt"
    fit([0.5], [BestCheckpoint(str(tmp_path)), LastCheckpoint(str(tmp_path))], max_epochs=1)
    saved = last.read_bytes()
    fit([0.1], [BestCheckpoint(str(tmp_path)), LastCheckpoint(str(tmp_path))], last, max_epochs=2)
    last.write_bytes(saved)  # as if the second epoch had not been saved
    best = BestCheckpoint(str(tmp_path))
    fit([0.3], [best, LastCheckpoint(str(tmp_path))], last, max_epochs=2)
    assert float(best.best_model_score) == pytest.approx(0.1)
    assert step_of(tmp_path / "best.ckpt") == 4


def test_short_epochs_share_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = list[int]()
    monkeypatch.setattr(Trainer, "save_checkpoint", lambda self, *args, **kwargs: saved.append(self.current_epoch))
    fit([0.5] * 5, [LastCheckpoint(str(tmp_path), every_n_minutes=10)], max_epochs=5)
    assert saved == [0, 4]


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_resumed_run_without_its_best_file_says_so(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit([0.2], [BestCheckpoint(str(tmp_path)), LastCheckpoint(str(tmp_path))])
    (tmp_path / "best.ckpt").unlink()
    if how == "damaged":
        (tmp_path / "best.ckpt").write_bytes(b"half")
    best = BestCheckpoint(str(tmp_path))
    fit([0.9], [best, LastCheckpoint(str(tmp_path))], tmp_path / "last.ckpt", max_epochs=2)
    assert caplog.text.count("the best checkpoint so far, best.ckpt, is not in") == 1
    assert float(best.best_model_score) == pytest.approx(0.9)


def test_early_stopping_says_why_and_takes_a_new_patience(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    trainer = fit([0.1, 0.2, 0.3, 0.4], [EarlyStop(patience=2), LastCheckpoint(str(tmp_path))])
    assert trainer.current_epoch == 3
    assert "early stopping: val/loss has not improved for 2 epochs; its best is " in caplog.text
    trainer = fit(
        [0.4] * 9, [EarlyStop(patience=5), LastCheckpoint(str(tmp_path))], tmp_path / "last.ckpt", max_epochs=9
    )
    assert trainer.current_epoch == 6


def checked(*callbacks: Callback) -> None:
    """Check what the ``callbacks`` of a run monitor."""
    module = MultiTaskModule(bare_network(), [TaskSpec("a", "binary"), TaskSpec("b", "regression")], None)
    run: Any = SimpleNamespace(callbacks=list(callbacks))
    MonitorCheck().on_fit_start(run, module)


@pytest.mark.parametrize("watcher", [BestCheckpoint("x", monitor="val/los"), EarlyStop(monitor="val/los")])
def test_unknown_monitor_stops_the_run_before_its_first_step(watcher: Any) -> None:
    with pytest.raises(InputError) as error:
        checked(watcher)
    message = str(error.value)
    assert ".monitor=val/los: no value of this name is logged; there are val/loss, train/step_loss" in message
    assert message.endswith("did you mean val/loss?")


def test_known_monitors_pass() -> None:
    for monitor in ("val/loss", "val/a/auroc", "train/loss", "train/aux/x", "val/experts_per_sample"):
        checked(BestCheckpoint("x", monitor=monitor), EarlyStop(monitor=monitor), RoutingMonitor("x"))
    own = type("Own", (Callback,), {"__module__": "elsewhere"})()  # it may log anything
    checked(EarlyStop(monitor="mine"), own)


@pytest.mark.parametrize("make", [lambda path: BestCheckpoint(path, monitor="mine"), lambda path: EarlyStop("mine")])
def test_monitor_that_turns_out_to_be_missing_is_one_message(make: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"monitor=mine: no value of this name is logged; there are val/loss"):
        fit([0.1], [make(str(tmp_path))])


class SignalIn(Callback):
    """Send a signal in one of the trainer's hooks."""

    def __init__(self, hook: str, number: int = signal.SIGTERM) -> None:
        setattr(self, hook, lambda *_: signal.raise_signal(number))


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.mark.parametrize(
    ("hook", "number"),
    [
        ("on_before_backward", signal.SIGTERM),
        ("on_validation_epoch_start", signal.SIGINT),
        ("on_train_epoch_end", signal.SIGHUP),
    ],
)
def test_signal_in_training_saves_and_stops(hook: str, number: int, tmp_path: Path) -> None:
    before = handlers()
    last = LastCheckpoint(str(tmp_path))
    with last.caller.signals.listening(), pytest.raises(Stopped, match=r"after step \d, saved; resume with: .* ckpt="):
        fit([0.1] * 9, [SignalIn(hook, number), last])
    assert step_of(tmp_path / "last.ckpt") == (1 if hook == "on_before_backward" else 2)
    assert handlers() == before


def test_signal_in_the_last_epoch_stops_before_the_test(tmp_path: Path) -> None:
    last = LastCheckpoint(str(tmp_path))
    with last.caller.signals.listening(), pytest.raises(Stopped, match=r"weights are in .*last.ckpt, test them with"):
        fit([0.1], [SignalIn("on_validation_epoch_start"), last])


def test_signal_in_the_test_stops_at_once(tmp_path: Path) -> None:
    best, last, before = BestCheckpoint(str(tmp_path)), LastCheckpoint(str(tmp_path)), handlers()
    with last.caller.signals.listening():
        trainer = fit([0.1], [SignalIn("on_test_batch_start"), last, best])
        with pytest.raises(Stopped, match=rf"during the test; .* evaluate={best.best_model_path}"):
            trainer.test(Scripted([]), DataLoader(torch.ones(4, 1)), verbose=False)
    assert handlers() == before


def test_signal_in_the_sanity_check_stops_at_once(tmp_path: Path) -> None:
    last = LastCheckpoint(str(tmp_path))
    with last.caller.signals.listening(), pytest.raises(Stopped, match="with nothing to save"):
        fit([0.1] * 3, [SignalIn("on_validation_epoch_start"), last], num_sanity_val_steps=1)


def test_leftovers_of_killed_runs_are_deleted(tmp_path: Path) -> None:
    for name in (".last.ckpt.4711", ".best.ckpt.12", ".hidden", "mine.ckpt", ".last.ckpt.txt"):
        (tmp_path / name).touch()
    fit([0.1], [LastCheckpoint(str(tmp_path))])
    assert names(tmp_path) == [".hidden", ".last.ckpt.txt", "last.ckpt", "mine.ckpt"]


@pytest.mark.parametrize(
    ("monitor", "values", "line"),
    [
        ("val/loss", {"val/a/mse": 2.0, "val/b/mse": 4.0, "val/c/auroc": 0.9}, "mean mse of 2 tasks 3"),
        ("val/loss", {"val/a/mse": 2.0, "val/b/mse": math.nan}, "mean mse of 1 of 2 tasks 2"),
        ("val/loss", {"val/c/auroc": 0.9}, "c/auroc 0.9"),
        ("val/loss", {"val/average": 0.5, "val/a/mse": 2.0}, "average 0.5"),
        ("val/c/auroc", {"val/a/mse": 2.0, "val/c/auroc": 0.9}, "c/auroc 0.9"),
    ],
)
def test_metric_in_the_line_of_an_epoch(monitor: str, values: dict[str, float], line: str) -> None:
    evaluation = SimpleNamespace(main_metrics=lambda: {"a": "mse", "b": "mse", "c": "auroc"})
    assert main_metric(SimpleNamespace(config={"monitor": monitor}, evaluation=evaluation), values) == line
