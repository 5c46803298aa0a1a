"""Plot mean and confidence band of a metric over runs: ``python -m mtl.analysis.curves outputs/multirun/<sweep>``."""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from omegaconf import OmegaConf
from scipy.stats import t as student
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mtl.analysis.figures import COLOURS, LINES
from mtl.run.checkpoint import flatten
from mtl.types import InputError, require

Course = dict[int, float]  # training step -> value


@dataclass(frozen=True)
class Curve:
    """A metric over training: at each of ``steps`` the mean over ``runs`` runs, with its confidence interval."""

    label: str
    runs: int
    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


def read_course(folder: Path, metric: str) -> Course:
    """Return the values of ``metric`` that the run in ``folder`` logged, by step; InputError if there are none."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    known = sorted(events.Tags()["scalars"])
    require(metric in known, f"{folder}: no metric {metric}; it has {', '.join(known) or 'none'}")
    return {event.step: event.value for event in events.Scalars(metric)}


def labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return for each run the options that differ between runs, such as ``gate.pattern=full data.rho=0``.

    Seeds and folders are ignored. Of options that always change together, only the one with the shortest name is shown.
    """
    flat = [flatten(dict(config)) for config in configs]
    columns: dict[tuple[str, ...], str] = {}
    for name in sorted({name for config in flat for name in config}, key=lambda name: (len(name), name)):
        values = tuple(str(config.get(name, "-")) for config in flat)
        own = "seed" in name.split(".")[-1] or name.startswith("paths.") or name == "label"
        inside = any(config["paths"]["run_dir"] in value for config, value in zip(configs, values, strict=True))
        if own or inside or len(set(values)) == 1:
            continue
        columns.setdefault(values, name)
    shown = sorted((name, values) for values, name in columns.items())
    rows = [" ".join(f"{name}={values[run]}" for name, values in shown) for run in range(len(flat))]
    return [row or "all runs" for row in rows]


def average(label: str, courses: Sequence[Course], band: float) -> Curve:
    """Return the mean over runs at their common steps, with its ``band`` confidence interval (Student's t)."""
    steps = sorted(set.intersection(*(set(course) for course in courses)))
    mean, low, high = [], [], []
    for step in steps:
        values = [course[step] for course in courses]
        centre, reach = statistics.fmean(values), 0.0
        if len(values) > 1:
            error = statistics.stdev(values) / math.sqrt(len(values))
            reach = float(student.ppf((1 + band) / 2, len(values) - 1)) * error
        mean.append(centre)
        low.append(centre - reach)
        high.append(centre + reach)
    return Curve(label, len(courses), steps, mean, low, high)


def read_curves(folder: Path, metric: str, band: float) -> list[Curve]:
    """Return a curve for each setting among the runs in ``folder``, in the order of the runs.

    Runs that have not logged the metric (yet) are left out, with a message on stderr.
    """
    runs = sorted((path.parent for path in folder.glob("**/config.yaml")), key=_natural)
    require(bool(runs), f"{folder} contains no run; a run is a folder with a config.yaml")
    configs: list[Any] = [OmegaConf.to_container(OmegaConf.load(run / "config.yaml")) for run in runs]
    groups: dict[str, list[Course]] = {}
    missing: list[InputError] = []
    for run, label in zip(runs, labels(configs), strict=True):
        try:
            groups.setdefault(label, []).append(read_course(run, metric))
        except InputError as error:
            missing.append(error)
    if len(missing) == len(runs):
        raise missing[0]
    for reason in missing:
        print(f"left out: {str(reason).split(';')[0]}", file=sys.stderr)
    groups = {label: courses for label, courses in groups.items() if courses}
    return [average(label, courses, band) for label, courses in groups.items()]


def draw(curves: Sequence[Curve], metric: str, band: float) -> Figure:
    """Draw curves with their bands in one panel."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for index, curve in enumerate(curves):
        colour, style = COLOURS[index % len(COLOURS)], LINES[index % len(LINES)]
        axes.plot(
            curve.steps, curve.mean, style, color=colour, linewidth=1.6, label=f"{curve.label} ({curve.runs} runs)"
        )
        axes.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=0.2, linewidth=0)
    axes.set(xlabel="training step", ylabel=metric, title=f"{metric}: mean and its {band:.0%} confidence interval")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    return figure


def write_csv(path: Path, curves: Sequence[Curve]) -> None:
    """Write the curves as rows ``setting, runs, step, mean, low, high``."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["setting", "runs", "step", "mean", "low", "high"])
        for curve in curves:
            for row in zip(curve.steps, curve.mean, curve.low, curve.high, strict=True):
                writer.writerow([curve.label, curve.runs, *row])


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, write ``curves_<metric>.csv`` and ``.png`` into the folder."""
    parser = argparse.ArgumentParser(prog="python -m mtl.analysis.curves", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of a sweep, or any folder that contains runs")
    parser.add_argument("--metric", default="val/loss")
    parser.add_argument("--band", type=float, default=0.9, help="level of the confidence interval")
    given = parser.parse_args(arguments)
    try:
        require(0 < given.band < 1, f"--band={given.band}: must lie between 0 and 1")
        curves = read_curves(given.folder, given.metric, given.band)
    except InputError as error:
        sys.exit(f"error: {error}")
    stem = given.folder / f"curves_{given.metric.replace('/', '_')}"
    write_csv(stem.with_suffix(".csv"), curves)
    draw(curves, given.metric, given.band).savefig(stem.with_suffix(".png"), dpi=120)
    for curve in curves:
        last = f"{curve.mean[-1]:.4f} [{curve.low[-1]:.4f}, {curve.high[-1]:.4f}]" if curve.steps else "no common step"
        print(f"{curve.label}: {curve.runs} runs, last {last}")
    print(stem.with_suffix(".png"))


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that puts ``10_x`` after ``9_x``."""
    return [(int(part.split("_")[0]) if part.split("_")[0].isdigit() else -1, part) for part in path.parts]


if __name__ == "__main__":
    main()
