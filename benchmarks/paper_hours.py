"""Measure how long ``mtl reproduce NAME scale=laptop`` takes: what ``hours`` of the scale in ``conf/paper`` is.

python benchmarks/paper_hours.py [NAME ...] [--data data]

An epoch of a run of each group and each method is timed, of short ones the mean of six. An epoch of a row takes as
long as those of its method. A row has as many epochs as in the recorded page, without one as many as it may have. The
runs of its search have as many as they may have, of as many rows, so the hours are an upper bound. What a run does
besides is counted once for each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from pathlib import Path
from statistics import fmean, median

import polars as pl
from common import ROOT

from mtl.checks import InputError, require
from mtl.cli.reproduce import configuration
from mtl.config.check import checked_run
from mtl.config.compose import CONF, opened
from mtl.files.run_files import RESULTS
from mtl.jobs.process import MAIN, SERVER, start
from mtl.paper.definition import Paper, Row, read
from mtl.runs.trial import FITTED

SHORT = 5.0  # seconds: the first epoch of a run takes up to a second longer


def timed(paper: Paper, row: Row, folder: Path, epochs: int = 1) -> tuple[float, float]:
    """Return the seconds of an epoch of a row's run, and those of all the rest of the run."""
    changes = [f"trainer.max_epochs={epochs}", f"paths.run_dir='{folder}'"]
    overrides = [*paper.setting(row).overrides, *changes]
    ours, theirs = SERVER.Pipe()
    began = time.perf_counter()
    with ours, contextlib.suppress(EOFError):  # it has failed
        with theirs:
            run = start(MAIN.main, overrides, folder.with_suffix(".txt"), theirs)
        while ours.recv() != FITTED:
            ours.send(False)  # as a worker that does not prune it
    run.join()
    require(run.exitcode == 0, f"{paper.name}: a run failed, see {folder.with_suffix('.txt')}")
    epoch = float(json.loads((folder / RESULTS).read_text())["seconds_per_epoch"])
    if epochs == 1 and epoch < SHORT:
        return timed(paper, row, folder.with_name(f"{folder.name}_again"), 6)
    return epoch, time.perf_counter() - began - epochs * epoch


def most_epochs(overrides: list[str]) -> float:
    """Return the number of epochs that a run may have."""
    cfg = checked_run(overrides)
    require(cfg.trainer.max_epochs is not None, "the length of this run is given in steps")
    return float(cfg.trainer.max_epochs)


def epochs(paper: Paper, row: Row) -> float:
    """Return the mean number of epochs of a row's recorded runs, or the number that a run may have."""
    page = ROOT / "benchmarks" / "accuracy" / f"{paper.name}.csv"
    if page.exists():
        runs = pl.read_csv(page).filter(group=row.group.key, setting=row.method.name)
        if "epochs" in runs.columns and runs["epochs"].count():
            return float(runs["epochs"].mean())
    return most_epochs(paper.setting(row).overrides)


def hours(name: str, data: str) -> float:
    """Return the hours of the laptop scale of a table."""
    cfg = configuration([name])[1]
    paper = read(cfg, name, [f"paths.data_dir={data}", "callbacks.progress=null"])
    epoch_seconds, other_seconds = dict[str, list[float]](), list[float]()  # the former by method
    with tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(paper.smoke_subset().rows()):
            epoch, rest = timed(paper, row, Path(folder) / str(number))
            print(f"{name} {'/'.join(row.key)}: an epoch {epoch:.2g} s, the rest {rest:.2g} s", flush=True)
            epoch_seconds.setdefault(row.method.key, []).append(epoch)
            other_seconds.append(rest)
    seconds = 0.0
    for row in paper.rows():
        epoch, rest = fmean(epoch_seconds[row.method.key]), median(other_seconds)
        seconds += (paper.scale.seeds or 0) * (epoch * epochs(paper, row) + rest)
        if paper.space_of(row):
            search = most_epochs(paper.search(row).overrides)
            seconds += paper.scale.n_trials * (epoch * search + rest)
    return seconds / 3600


def measure() -> None:
    """Print the hours of each table that the command line names; without names, of all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=sorted(path.stem for path in (CONF / "paper").glob("*.yaml")))
    parser.add_argument("--data", default="data", help="folder of the data sets")
    args = parser.parse_args()
    with opened():
        for name in args.names:
            try:
                print(f"{name}: {hours(name, args.data):.2g} hours", flush=True)
            except InputError as error:
                print(error, flush=True)


if __name__ == "__main__":
    measure()
