"""Runs that are watched: what their logs and locks say while they go on, and when the watch ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from mtl.cli.report import main
from mtl.report import watch
from mtl.report.watch import row_of
from tests.run_folders import write_run

LINES = """12:00:00 INFO mtl: comet: 1,234 parameters, run folder x
12:00:01 INFO mtl.callbacks.epoch_report: epoch 0: train 0.7287, val 0.6861, click/auroc 0.6985, 2 experts, 1.33 s
12:00:02 INFO mtl.callbacks.epoch_report: time left: at most 9.3 seconds (7 epochs of 1.3 seconds)
12:00:02 INFO mtl.callbacks.epoch_report: epoch 1: train 0.6063, val 0.53, click/auroc 0.8297, 2 experts, 20 s
12:00:03 INFO mtl.callbacks.epoch_report: epoch 2: train 0.58, val nan, click/auroc 0.8, 2 experts, 20 s
"""


def running(folder: Path, monitor: str = "val/loss", log: str = LINES, **config: Any) -> Path:
    """Write a run whose log is old, so that its lock decides."""
    run = write_run(folder, [], None, log=log, config={"monitor": monitor, "trainer": {"max_epochs": 5}, **config})
    os.utime(run / "train.log", (0, 0))
    return run


@pytest.mark.parametrize(
    ("monitor", "best"), [("val/loss", "val/loss 0.53"), ("val/click/auroc", "val/click/auroc 0.8297")]
)
def test_the_log_of_a_run_says_how_far_it_is(monitor: str, best: str, tmp_path: Path) -> None:
    run = running(tmp_path / "run", monitor)
    with FileLock(run / ".lock"):
        assert row_of(run) == ["run", "running", "3 of 5", best, "at most 40 seconds", ""]  # two epochs of 20 s
    assert row_of(run)[1:3] == ["unfinished", "3"]  # its process is gone
    os.utime(run / "train.log")
    assert row_of(run)[1] == "running"  # it has just written: its lock is not touched


def test_runs_that_have_ended_or_not_begun(tmp_path: Path) -> None:
    done = write_run(tmp_path / "done", [], {"loss": 1.0}, log=LINES, best=0.5)
    assert row_of(done) == ["done", "finished", "3", "val/loss 0.5", "", ""]
    failed = running(tmp_path / "failed", log=LINES + "12:00:04 ERROR mtl: NaN loss\n")
    assert row_of(failed)[1:] == ["failed", "3", "val/loss 0.53", "", "NaN loss"]
    begun = running(tmp_path / "begun", log="")
    (begun / "train.log").unlink()
    assert row_of(begun)[1:] == ["unfinished", "0", "", "", ""]


def test_the_watch_ends_with_the_last_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until then its page reloads itself; the report of the runs comes at the end."""
    run, pages = running(tmp_path / "<b>", log=LINES), list[str]()
    lock = FileLock(run / ".lock")
    lock.acquire()

    def sleep(seconds: float) -> None:
        pages.append((tmp_path / "watch.html").read_text())
        assert {path.name for path in tmp_path.iterdir()} == {"<b>", "watch.html"}
        if lock.is_locked:
            write_run(run, [], {"loss": 1.0}, {}, log=LINES)
            lock.release()

    monkeypatch.setattr(watch.time, "sleep", sleep)
    main([str(tmp_path), "--watch"])
    assert '<meta http-equiv="refresh" content="2">' in pages[0]
    assert "1 running" in pages[0]
    assert "summary.csv" not in pages[0]  # there is none yet
    assert "<td>&lt;b&gt;</td>" in pages[0]
    assert ["1 finished" in page for page in pages] == [False, *[True] * 5]
    assert "refresh" not in (tmp_path / "watch.html").read_text()
    assert "Where the numbers come from" in (tmp_path / "report.html").read_text()
    assert "watch.html shows the runs" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=r"error: .*empty contains no run"):
        main([str(tmp_path / "empty"), "--watch"])
    assert not [*(tmp_path / "empty").iterdir()]
    with pytest.raises(SystemExit, match="error: study=s: --watch takes folders"):
        main(["study=s", "--watch"])


def test_a_watched_run_keeps_the_page_that_it_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page that mtl.fit writes has sections that need its rows, which the watch does not have."""
    run = write_run(tmp_path / "run", [], {"loss": 1.0}, {}, log=LINES)
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: None)
    for content in ("page of the run", "page before it was resumed"):
        (run / "report.html").write_text(content)
        if "before" in content:
            os.utime(run / "report.html", (0, 0))
        main([str(run), "--watch"])
        assert (content == (run / "report.html").read_text()) == ("before" not in content)


def test_ctrl_c_ends_the_watch_alone(tmp_path: Path) -> None:
    run = running(tmp_path / "run")
    with FileLock(run / ".lock"):
        command = [sys.executable, "-m", "mtl", "report", "--watch", str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        page = tmp_path / "watch.html"
        while not page.exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    assert "refresh" not in page.read_text()  # nothing writes it any more
