"""Plot mean and confidence band of a metric over runs: ``python -m mtl.report.curves outputs/multirun/<sweep>``."""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from matplotlib.figure import Figure
from scipy.stats import t as student
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mtl.analysis.figures import COLOURS, LINES
from mtl.checks import InputError, require
from mtl.report.runs import find_runs, name_settings
from mtl.training.values import curve_name
from mtl.writing import write_csv, writing

Course = dict[int, float]  # training step -> value
BAND = 0.9  # level of the confidence interval
CSV_LOG = Path("csv") / "metrics.csv"  # of logger=csv
_SIZE = (7.2, 4.8)  # inches, of the panel and its labels, whatever stands in the legend
_LINE, _LINES = 32, 6  # characters of a line, and lines, of a label in the legend
_FAINT, _FAINTEST = 0.25, 0.05  # opacity of the bands: those of many curves are fainter


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
    """Return the values of ``metric`` that the run in ``folder`` logged, by step; InputError if there are none.

    ``metric`` is the name of a curve, or that which monitors have for it, such as ``val/click/auroc``.
    """
    table = folder / CSV_LOG
    if table.is_file():
        columns = pl.read_csv(table, infer_schema_length=None)
        curve = _known(folder, metric, [name for name in columns.columns if "/" in name])
        return dict(columns.select("step", pl.col(curve).cast(pl.Float64, strict=False)).drop_nulls().iter_rows())
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    curve = _known(folder, metric, events.Reload().Tags()["scalars"] if Path(events.path).is_dir() else [])
    return {event.step: event.value for event in events.Scalars(curve)}


def _known(folder: Path, metric: str, names: Sequence[str]) -> str:
    """Return the one of the logged ``names`` that ``metric`` means."""
    known = sorted(names)
    for name in (metric, curve_name(metric)):
        if name in known:
            return name
    raise InputError(f"{folder}: no metric {metric}; it has {', '.join(known) or 'none'}")


def average(label: str, courses: Sequence[Course], band: float) -> Curve:
    """Return the mean over runs at their common steps, with its ``band`` confidence interval (Student's t)."""
    steps = sorted(set.intersection(*(set(course) for course in courses)))
    values = np.array([[course[step] for step in steps] for course in courses])  # [runs, steps]
    mean, reach = values.mean(0), np.zeros(len(steps))
    if len(courses) > 1:
        reach = student.ppf((1 + band) / 2, len(courses) - 1) * values.std(0, ddof=1) / math.sqrt(len(courses))
    return Curve(label, len(courses), steps, mean.tolist(), (mean - reach).tolist(), (mean + reach).tolist())


def read_curves(folder: Path, metric: str, band: float) -> tuple[str, list[Curve]]:
    """Return what the settings are, and a curve for each among the runs in ``folder``, in the order of the runs.

    Runs that have not logged the metric (yet) are left out, with a message on stderr; InputError if none has.
    """
    runs = find_runs([folder])
    heading, names, _ = name_settings(runs)
    curves, missing = curves_of(list(zip(runs, names, strict=True)), metric, band)
    if not curves:
        raise missing[0]
    for reason in missing:
        print(f"left out: {str(reason).split(';')[0]}", file=sys.stderr)
    return heading, curves


def curves_of(
    runs: Sequence[tuple[Path, str]], metric: str, band: float = BAND
) -> tuple[list[Curve], list[InputError]]:
    """Return a curve for each setting among ``runs``, pairs of (folder, setting), and why a run is left out."""
    groups: dict[str, list[Course]] = {}
    missing: list[InputError] = []
    for run, label in runs:
        try:
            course = read_course(run, metric)
        except InputError as error:
            missing.append(error)
        else:
            groups.setdefault(label, []).append(course)
    return [average(label, courses, band) for label, courses in groups.items()], missing


def draw(curves: Sequence[Curve], heading: str, metric: str, band: float) -> Figure:
    """Draw curves with their bands in one panel, and a legend beside it, for which ``savefig`` has to make room."""
    figure = Figure(figsize=_SIZE)
    axes = figure.add_subplot()
    counts = {curve.runs for curve in curves}
    for index, curve in enumerate(curves):
        turn = index // len(COLOURS)  # a colour comes again with another kind of line
        colour, style = COLOURS[index % len(COLOURS)], LINES[(index + turn) % len(LINES)]
        name = _in_lines(curve.label if len(counts) == 1 else f"{curve.label} {_runs(curve.runs)}")
        point = "o" if len(curve.steps) == 1 else None  # a line through one point cannot be seen
        axes.plot(curve.steps, curve.mean, style, color=colour, linewidth=1.6, marker=point, label=name)
        faint = _FAINT / len(curves) + _FAINTEST
        axes.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=faint, linewidth=0)
    axes.set(xlabel="training step", ylabel=metric, title=f"{metric}: mean and its {band:.0%} confidence interval")
    axes.grid(alpha=0.25)
    title = _in_lines(heading if len(counts) > 1 else f"{heading} {_runs(*counts)}")
    look: dict[str, Any] = {"fontsize": 8, "title_fontsize": 8, "alignment": "left", "labelspacing": 0.7}
    axes.legend(title=title, loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0, **look)
    return figure


def _runs(count: int) -> str:
    return f"({count} run{'s' if count > 1 else ''})"


def _in_lines(text: str) -> str:
    """Break ``text`` into lines that are short enough for a legend."""
    return "\n".join(textwrap.wrap(text, _LINE, break_on_hyphens=False, max_lines=_LINES, placeholder=" ..."))


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, write ``curves_<metric>.csv`` and ``.png`` into the folder."""
    parser = argparse.ArgumentParser(prog="python -m mtl.report.curves", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of a sweep, or any folder that contains runs")
    parser.add_argument("--metric", default="val/loss")
    parser.add_argument("--band", type=float, default=BAND, help="level of the confidence interval")
    given = parser.parse_args(arguments)
    stem = given.folder / f"curves_{given.metric.replace('/', '_')}"
    try:
        require(0 < given.band < 1, f"--band={given.band}: must lie between 0 and 1")
        heading, curves = read_curves(given.folder, given.metric, given.band)
        points = [
            [curve.label, curve.runs, *row]
            for curve in curves
            for row in zip(curve.steps, curve.mean, curve.low, curve.high, strict=True)
        ]
        write_csv(stem.with_suffix(".csv"), ["setting", "runs", "step", "mean", "low", "high"], points)
        with writing(stem.with_suffix(".png")) as file:
            draw(curves, heading, given.metric, given.band).savefig(file, format="png", dpi=120, bbox_inches="tight")
    except InputError as error:
        sys.exit(f"error: {error}")
    for curve in curves:
        last = f"{curve.mean[-1]:.4f} [{curve.low[-1]:.4f}, {curve.high[-1]:.4f}]" if curve.steps else "no common step"
        print(f"{heading} {curve.label}: {curve.runs} runs, last {last}")
    print(stem.with_suffix(".png"))


if __name__ == "__main__":
    main()
