"""Measure how long ``mtl reproduce NAME scale=laptop`` takes: what ``hours`` of the scale in ``conf/paper`` is.

python benchmarks/paper_hours.py [NAME ...] [--data data]

An epoch of a run of each group and each gate is timed. A row takes as long an epoch as its gate does, or else its
group, and has as many epochs as in the recorded page, without one as many as it may have. Runs also start and end,
which is counted once for each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

import polars as pl
from common import ROOT

from mtl.cli.compose import CONF, opened
from mtl.cli.reproduce import configuration
from mtl.cli.study import first_run
from mtl.files.records import RESULTS
from mtl.paper.definition import Pair, Paper, read


def timed(paper: Paper, pair: Pair, folder: Path) -> tuple[float, float]:
    """Return the seconds of an epoch of a row's run, and those of all the rest of the run."""
    words = [*paper.definition(*pair, chosen=[]).words, "trainer.max_epochs=1", f"paths.run_dir='{folder}'"]
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "mtl", "train", *words], check=True, stdout=subprocess.DEVNULL)
    epoch = float(json.loads((folder / RESULTS).read_text())["seconds_per_epoch"])
    return epoch, time.perf_counter() - began - epoch


def epochs(paper: Paper, pair: Pair) -> float:
    """Return the mean number of epochs of a row's recorded runs, or the number that a run may have."""
    page = ROOT / "benchmarks" / "accuracy" / f"{paper.name}.csv"
    if page.exists():
        runs = pl.read_csv(page).filter(group=pair[0].key, setting=pair[1].name)
        if "epochs" in runs.columns and runs["epochs"].count():
            return float(runs["epochs"].mean())
    return float(first_run(paper.definition(*pair, chosen=[]).words).trainer.max_epochs)


def hours(name: str, data: str) -> float:
    """Return the hours of the laptop scale of a table."""
    cfg = configuration([name])[1]
    paper = read(cfg, name, [f"paths.data_dir={data}", "callbacks.progress=null"])
    known: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (group, gate) in enumerate(paper.fewest().pairs()):
            found = timed(paper, (group, gate), Path(folder) / str(number))
            print(f"{name} {group.key}/{gate.key}: an epoch {found[0]:.1f} s, the rest {found[1]:.1f} s", flush=True)
            for key in (group.key, gate.key):
                known.setdefault(key, []).append(found)
    seconds = 0.0
    for group, gate in paper.pairs():
        epoch, rest = (fmean(part) for part in zip(*known.get(gate.key, known[group.key]), strict=True))
        runs = (paper.scale.seeds or 0) + paper.scale.n_trials * bool(paper.space_of(group, gate))
        seconds += runs * (epoch * epochs(paper, (group, gate)) + rest)
    return seconds / 3600


def main() -> None:
    """Print the hours of each table that the command line names; without names, of all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=sorted(path.stem for path in (CONF / "paper").glob("*.yaml")))
    parser.add_argument("--data", default="data", help="folder of the data sets")
    given = parser.parse_args()
    with opened():
        for name in given.names:
            try:
                print(f"{name}: {hours(name, given.data):.2g} hours", flush=True)
            except subprocess.CalledProcessError:
                print(f"{name}: a run failed; its data may be missing", flush=True)


if __name__ == "__main__":
    main()
