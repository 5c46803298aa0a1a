"""Watch runs while they go on: ``watch.html``, a page that reloads itself, and the same table on the console."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import polars as pl
from filelock import FileLock, Timeout
from rich.live import Live

from mtl.checks import InputError
from mtl.files.formatting import duration, number
from mtl.files.run_files import LOCK, LOG, MAX_STEP_LOG_BYTES, checked_file
from mtl.files.tables import Table
from mtl.files.writing import write_text
from mtl.report.page import Page, Section
from mtl.report.runs import FINISHED, UNFINISHED, config, find_runs, last_message, read_results
from mtl.training.metrics import mode_of

WATCH_PAGE = "watch.html"  # beside the page of the runs
RUNNING = "running"
HEADER = ["run", "state", "epochs", "best", "time left", "message"]
POLL_S = 2  # seconds between two looks
_LOOKS = 5  # so many without a running run end the watch: the next run of a sweep may be about to start
_NEW_S = 10  # seconds since the last line of its log in which a run counts as running
_EPOCH = re.compile(r"epoch (?P<epoch>\d+): (?P<values>train .+), (?P<seconds>\S+) s$", re.MULTILINE)


def watch(folders: Sequence[Path], target: Path) -> None:
    """Show the runs in ``folders`` in ``target``/watch.html until none is running; InputError if there are none."""
    find_runs(folders)  # before anything is written
    ended: dict[Path, list[str]] = {}
    idle, page = 0, Page(str(target.resolve().name), [], pl.DataFrame(), reload_s=POLL_S)
    try:
        with Live(auto_refresh=False) as console:
            while idle < _LOOKS:
                of_runs = {run: ended.get(run) or row_of(run) for run in find_runs(folders)}
                ended, rows = {run: row for run, row in of_runs.items() if row[1] == FINISHED}, [*of_runs.values()]
                counts = Counter(state for _, state, *_ in rows)
                counted = ", ".join(f"{count} {state}" for state, count in counts.items())
                table = Table(HEADER, rows)
                section = Section(f"{counted}, at {time.strftime('%H:%M:%S')}", tables=[table])
                page = replace(page, sections=[section])
                write_text(target / WATCH_PAGE, page.html())
                console.update(table, refresh=True)
                idle = 0 if RUNNING in counts else idle + 1
                time.sleep(POLL_S)
    finally:
        write_text(target / WATCH_PAGE, replace(page, reload_s=0).html())


def row_of(run: Path) -> list[str]:
    """Return the cells of a run: its folder, state, epochs, best monitored value, time left, and why it has ended."""
    results, problem = read_results(run)
    options, (state, reason) = config(run), last_message(run / LOG)
    monitor, most = str(options.get("monitor", "val/loss")), (options.get("trainer") or {}).get("max_epochs") or -1
    epochs, best, seconds = progress_of(run / LOG, monitor)
    if results is not None:
        state, epochs, best = FINISHED, int(results.epochs or 0), results.best
    elif state == UNFINISHED and _is_held(run):
        state = RUNNING
    goes_on = state == RUNNING and most > epochs
    left = f"at most {duration(seconds * (most - epochs))}" if goes_on and seconds else ""
    message = "" if state in (FINISHED, RUNNING) else problem or reason or ""
    value = "" if best is None else f"{monitor} {number(best, 4)}"
    return [run.name, state, f"{epochs} of {most}" if goes_on else str(epochs), value, left, message]


def progress_of(log: Path, monitor: str) -> tuple[int, float | None, float | None]:
    """Return how many epochs a log has, the best finite value of the ``monitor``, and the seconds of an epoch."""
    try:
        lines = list(_EPOCH.finditer(checked_file(log, log.parent, MAX_STEP_LOG_BYTES).read_text(errors="replace")))
    except (OSError, InputError):
        lines = []
    name = "val" if monitor == "val/loss" else monitor.removeprefix("val/")
    cells = [dict(part.rpartition(" ")[::2] for part in line["values"].split(", ")).get(name, "nan") for line in lines]
    values = [value for text in cells if math.isfinite(value := float(text.replace(",", "")))]
    best = (max if mode_of(monitor) == "max" else min)(values, default=None)
    seconds = median(float(line["seconds"].replace(",", "")) for line in lines) if lines else None
    return 1 + max((int(line["epoch"]) for line in lines), default=-1), best, seconds


def _is_held(run: Path) -> bool:
    """Return whether a process has the run, as a new log shows. A run that begins waits for this look at its lock."""
    lock = FileLock(run / LOCK)
    try:
        if time.time() - (run / LOG).stat().st_mtime < _NEW_S:
            return True
        if (run / LOCK).exists():
            lock.acquire(timeout=0)
            lock.release()
    except Timeout:
        return True
    except OSError:
        return False
    return False
