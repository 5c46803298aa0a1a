"""The progress bar hears of some steps and of the last one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from pytorch_lightning.callbacks import RichProgressBar

from callbacks import progress_bar
from callbacks.progress_bar import ProgressBar


def steps_told(monkeypatch: pytest.MonkeyPatch, refresh_rate: int, seconds: float) -> list[int]:
    """Return which of ten steps, so many ``seconds`` each, Lightning's bar is told of."""
    told, clock = [], iter(range(10))
    monkeypatch.setattr(RichProgressBar, "on_train_batch_end", lambda self, t, m, o, b, index: told.append(index))
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: next(clock) * seconds)
    monkeypatch.setattr(RichProgressBar, "on_train_epoch_start", lambda self, t, m: None)
    bar = ProgressBar(refresh_rate=refresh_rate)
    bar._told_at = 0.0  # of an epoch before
    bar.on_train_epoch_start(None, None)
    for index in range(10):
        bar.on_train_batch_end(SimpleNamespace(is_last_batch=index == 9), None, None, None, index)
    return told


def test_told_as_often_as_drawn_and_of_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps_told(monkeypatch, 2, 0.125) == [0, 4, 8, 9]


def test_slow_steps_are_all_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps_told(monkeypatch, 2, 1.0) == list(range(10))
