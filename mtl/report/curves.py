"""Draw mean and confidence band of a metric over training, a curve for each setting."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl
import scipy  # imports its parts at their first use
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mtl.analysis.figures import look
from mtl.checks import InputError, first_line, join_names, require
from mtl.files.escaping import escape_mathtext
from mtl.files.run_files import MAX_STEP_LOG_BYTES, checked_file

BAND = 0.95  # level of the confidence interval
CSV_LOG = Path("csv") / "metrics.csv"  # written by logger=csv
_SIZE = (5.6, 3.6)  # inches of the panel and its labels, without the legend; two stand side by side in a page
_BELOW = 66  # characters of names in a line of the legend
_LINE, _LINES = 32, 6  # characters per line, and lines, of a label in the legend
_FAR = 20
_FAINT, _FAINTEST = 0.25, 0.05  # opacity of the bands, which are fainter if there are many


def read_history(folder: Path, metric: str) -> pl.DataFrame:
    """Return the values of ``metric`` that the run in ``folder`` logged, as columns ``step`` and ``value``.

    Raises InputError if there are none. If a step was trained twice, the last value counts.
    """
    log = folder / CSV_LOG
    if log.is_file():
        try:
            table = pl.read_csv(checked_file(log, folder, MAX_STEP_LOG_BYTES), infer_schema_length=None)
            _check(folder, metric, [name for name in table.columns if "/" in name])
            value = pl.col(metric).cast(pl.Float64, strict=False).alias("value")
            history = table.select(pl.col("step").cast(pl.Int64), value).drop_nulls()
        except pl.exceptions.PolarsError as error:
            raise InputError(f"{log} is damaged: {first_line(error)}") from None
    else:
        for file in folder.glob("*tfevents*"):
            checked_file(file, folder, MAX_STEP_LOG_BYTES)
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        _check(folder, metric, events.Reload().Tags()["scalars"] if folder.is_dir() else [])
        points = [(event.step, event.value) for event in events.Scalars(metric)]
        history = pl.DataFrame(points, {"step": pl.Int64, "value": pl.Float64}, orient="row")
    return history.unique("step", keep="last").sort("step")


def smoothed(history: pl.DataFrame, window: int) -> pl.DataFrame:
    """Return for each step the mean value of the latest ``window`` steps, from the first complete window on."""
    means = history.with_columns(pl.col("value").rolling_mean_by("step", f"{window}i"))
    return means.filter(pl.col("step") >= pl.col("step").min() + window - 1)


def _check(folder: Path, metric: str, names: Sequence[str]) -> None:
    """Raise InputError unless ``metric`` is among the ``names`` that a run logged."""
    require(metric in names, f"{folder}: no metric {metric}; it has {join_names(sorted(names)) or 'none'}")


def curves_of(runs: Sequence[tuple[str, str]], metric: str, window: int = 1) -> tuple[pl.DataFrame, list[InputError]]:
    """Return a curve for each setting among ``runs``, pairs of (folder, setting), and an error for each run left out.

    A curve has a row for each step that all of its runs logged, with the columns ``setting``, ``runs`` (their number),
    ``step``, ``mean``, ``low`` and ``high``: the last two are the ends of Student's t confidence interval of level
    ``BAND``, or the mean of fewer than three runs. Each value is the mean of what a run logged in the latest ``window``
    steps.
    """
    curves, missing = [], []
    for number, (folder, setting) in enumerate(runs):
        try:
            history = smoothed(read_history(Path(folder), metric), window)
        except InputError as error:
            missing.append(error)
        else:
            named = pl.lit(setting).alias("setting"), pl.lit(number).alias("run")
            curves.append(history.select(*named, "step", "value"))
    if not curves:
        return pl.DataFrame(), missing
    values = pl.concat(curves).with_columns(pl.col("run").n_unique().over("setting").alias("runs"))
    mean, std = pl.col("value").mean().alias("mean"), pl.col("value").std().fill_null(0).alias("std")
    points = values.group_by("setting", "runs", "step", maintain_order=True).agg(mean, std, pl.len())
    quantile, counts = scipy.stats.t.ppf, set(values["runs"])
    quantiles = {count: quantile((1 + BAND) / 2, count - 1) if count > 2 else 0.0 for count in counts}
    reach = pl.col("runs").replace_strict(quantiles, return_dtype=pl.Float64) * pl.col("std") / pl.col("runs").sqrt()
    ends = [(pl.col("mean") - reach).alias("low"), (pl.col("mean") + reach).alias("high")]
    shared = points.filter(pl.col("len") == pl.col("runs")).with_columns(ends)
    return shared.select("setting", "runs", "step", "mean", "low", "high"), missing


def draw(curves: pl.DataFrame, heading: str, metric: str, window: int = 1) -> Figure:
    """Draw curves with their bands in one panel; the legend below it needs ``savefig(bbox_inches="tight")``.

    ``window``: as in ``curves_of``, for the title.
    """
    figure = Figure(figsize=_SIZE)
    axes = figure.add_subplot()
    counts, settings, far = set(curves["runs"]), curves["setting"].n_unique(), _far(curves)
    for index, ((label, count), curve) in enumerate(curves.group_by("setting", "runs", maintain_order=True)):
        of = "" if len(counts) == 1 else f" {_runs(count)}"
        name = _in_lines(f"{label}{of}{', beyond the picture' if label in far else ''}")
        point = "o" if len(curve) == 1 else None  # a line through one point cannot be seen
        style = look(index) | {"linewidth": 1.6, "marker": point, "label": name}
        [line] = axes.plot(curve["step"], curve["mean"], **style)
        faint = _FAINT / settings + _FAINTEST
        axes.fill_between(curve["step"], curve["low"], curve["high"], color=line.get_color(), alpha=faint, linewidth=0)
    if far:
        near = curves.filter(~pl.col("setting").is_in(list(far)))
        low, high = near.select(pl.col("low").min(), pl.col("high").max()).row(0)
        axes.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))
    over = f" of {window} steps" if window > 1 else ""
    metric = escape_mathtext(metric)
    band = f" and its {BAND * 100:.0f} % confidence interval" if max(counts) > 2 else ""
    axes.set(xlabel="training step", ylabel=metric, title=f"{metric}{over}{f': mean{band}' if max(counts) > 1 else ''}")
    axes.grid(alpha=0.25)
    title = _in_lines(heading if len(counts) > 1 else f"{heading} {_runs(*counts)}")
    text: dict[str, Any] = {"fontsize": 8, "title_fontsize": 8, "alignment": "left", "labelspacing": 0.7}
    longest = max(len(line) for label in axes.get_legend_handles_labels()[1] for line in label.split("\n"))
    columns = min(settings, max(1, _BELOW // (longest + 8)))  # with room for the line
    axes.legend(title=title, loc="upper left", bbox_to_anchor=(0, -0.19), borderaxespad=0, ncols=columns, **text)
    return figure


def _far(curves: pl.DataFrame) -> set[str]:
    """Return the settings that end so far from the others that these would lie on one line; none of fewer than four.

    The distance to the median of the last values is more than ``_FAR`` times the median distance.
    """
    last = curves.group_by("setting", maintain_order=True).last()
    distance = (last["mean"] - last["mean"].median()).abs()
    usual: Any = distance.median()
    return set(last["setting"].filter(distance > _FAR * usual)) if len(last) > 3 and usual > 0 else set()


def curves_by_epoch(
    folder: Path, panels: Mapping[str, Sequence[str]], epochs: float | None, tested: int | None
) -> dict[str, Figure]:
    """Draw what one run logged, by title: the metrics of each of ``panels`` that it has, over epochs from 0.

    ``epochs``: how many it trained; without them, nothing is drawn. ``tested``: the epoch to mark.
    """
    drawn = dict[str, Figure]()
    for title, metrics in panels.items() if epochs else ():
        figure = Figure(figsize=(4.2, 3.0), layout="constrained")
        if draw_by_epoch(figure.add_subplot(), folder, title, metrics, float(epochs or 0), tested):
            drawn[title] = figure
    return drawn


def draw_by_epoch(
    axes: Axes, folder: Path, title: str, metrics: Sequence[str], epochs: float, tested: int | None
) -> bool:
    """Draw those of ``metrics`` that the run in ``folder`` has logged; return whether there are any."""
    curves = {}
    for metric in metrics:
        with suppress(InputError):
            curves[metric] = read_history(folder, metric)
    if not curves:
        return False
    steps = (1 + max(history["step"][-1] for history in curves.values())) / epochs  # of an epoch
    for index, (metric, history) in enumerate(curves.items()):
        at, point = (history["step"] + 1) / steps - 1, "o" if len(history) == 1 else None
        label = "training" if metric.startswith("train/") else "validation"
        axes.plot(at, history["value"], **look(index), linewidth=1.6, marker=point, label=label)
    if tested is not None:
        axes.axvline(tested, color="0.4", linewidth=0.8, linestyle=":", label="tested")
    axes.set(xlabel="epoch", ylabel="loss" if len(metrics) > 1 else escape_mathtext(metrics[0]))
    axes.locator_params(axis="x", integer=True)
    axes.set_title(escape_mathtext(title), fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    return True


def _runs(count: int) -> str:
    return f"({count} run{'s' if count > 1 else ''})"


def _in_lines(text: str) -> str:
    """Break ``text`` into lines that are short enough for a legend."""
    text = escape_mathtext(text)
    return "\n".join(textwrap.wrap(text, _LINE, break_on_hyphens=False, max_lines=_LINES, placeholder=" ..."))
