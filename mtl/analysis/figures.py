"""Draw routing, in colours that colour-blind readers can tell apart: shades of blue, and Okabe and Ito's eight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from mtl.loggers.base import MAX_LISTED_TASKS

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442"]
LINES = ["-", "--", "-.", ":"]
_MIN_DRAWN_WEIGHT = 0.005  # smaller weights are left out: they would be written as .00
_MAX_TASKS = 16  # further tasks get no panel
_MAX_TICKS = 32  # ticks that each name an expert


def look(index: int) -> dict[str, Any]:
    """Return colour and style of the line ``index``; colours repeat with another style."""
    turn = index // len(COLOURS)
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": LINES[(index + turn) % len(LINES)]}


def heat_map(share: Tensor, tasks: Sequence[str]) -> Figure:
    """Draw ``share [T, E]``, the mean weight of each expert for each task, see ``draw_heat_map``."""
    num_tasks, num_experts = share.shape
    figure, [[axes]] = _panels(1, 1, (max(2.6, 0.4 * num_experts), max(1.2, 0.4 * min(num_tasks, MAX_LISTED_TASKS))))
    draw_heat_map(axes, share, tasks)
    return figure


def draw_heat_map(axes: Axes, share: Tensor, tasks: Sequence[str]) -> None:
    """Draw ``share [T, E]``, the mean weight of each expert for each task.

    More than ``MAX_LISTED_TASKS`` tasks are unnamed, and those with the same main expert stand together.
    """
    values, num_tasks = share.double().cpu().numpy(), len(share)
    if num_tasks > MAX_LISTED_TASKS:
        values = values[np.lexsort((-values.max(1), values.argmax(1)))]
    image = _matrix(axes, values)
    axes.set(title="Which experts each task uses", xlabel="expert")
    if num_tasks > MAX_LISTED_TASKS:
        axes.set(yticks=[], ylabel=f"{num_tasks} tasks, by the expert with the largest weight")
    else:
        axes.set_yticks(range(num_tasks), list(tasks))
    if values.size <= 256:
        for row, column in zip(*np.nonzero(values >= _MIN_DRAWN_WEIGHT), strict=True):
            value = float(values[row, column])
            ink = "black" if image.norm(value) < 0.6 else "white"
            text = f"{value:.2f}".lstrip("0") if value < 0.995 else "1"
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color=ink)
    axes.figure.colorbar(image, ax=axes, label="mean weight", ticks=[0, 0.05, 0.25, 0.5, 1])


def permutation(hard: Tensor, soft: Tensor, is_hard: bool, tasks: Sequence[str]) -> Figure:
    """Draw the permutation matrices ``[P, E, E]``: the soft ones, and the hard ones that evaluation uses."""
    num_panels, size = min(len(hard), _MAX_TASKS), 1.2 + 0.14 * hard.shape[-1]
    figure, grid = _panels(num_panels, 2, (size, size), share=True)
    for row, panels in enumerate(grid):
        titles = ("soft (Sinkhorn)", "hardened" if is_hard else "used in evaluation")
        for axes, matrix, title in zip(panels, (soft[row], hard[row]), titles, strict=True):
            image = _matrix(axes, matrix.double().numpy())
            axes.set_title(title if len(hard) == 1 else f"{title}, {tasks[row]}", fontsize=9)
    figure.supxlabel("expert", fontsize=9)
    figure.supylabel("output of the gate", fontsize=9)
    figure.colorbar(image, ax=grid, label="entry")
    figure.suptitle("Permutation of the experts", fontsize=11)
    return figure


def connections(matrices: Sequence[Tensor], tasks: Sequence[str]) -> Figure:
    """Draw which components each task uses, ``[T, C]`` for each layer, in one panel per layer."""
    widths = [max(0.8, 0.25 * matrix.shape[1]) for matrix in matrices]
    size = float(np.mean(widths)), max(1.0, 0.25 * min(len(tasks), MAX_LISTED_TASKS))
    figure, [panels] = _panels(1, len(matrices), size, width_ratios=widths)
    for layer, (axes, matrix) in enumerate(zip(panels, matrices, strict=True)):
        _matrix(axes, matrix.double().numpy())
        axes.set_title(f"layer {layer}", fontsize=9)
        are_named = layer == 0 and len(tasks) <= MAX_LISTED_TASKS
        axes.set_yticks(range(len(tasks)), list(tasks) if are_named else [""] * len(tasks))
        edges = [np.arange(count - 1) + 0.5 for count in matrix.shape]
        axes.hlines(edges[0], -0.5, matrix.shape[1] - 0.5, colors="white", linewidths=0.6)
        axes.vlines(edges[1], -0.5, len(tasks) - 0.5, colors="white", linewidths=0.6)
    figure.supxlabel("component", fontsize=9)
    figure.suptitle("Which components each task uses (blue)", fontsize=11)
    return figure


def curves(steps: Sequence[int], shares: Tensor, tasks: Sequence[str], binary_since: int | None) -> Figure:
    """Draw ``shares [N, T, E]``, the experts' mean weights in the batches at ``steps``, in one panel per task.

    Batches without a task (NaN) are left out of its panel. The experts with the largest final weights are coloured, all
    others (such as those that no task uses in the end) are grey. See figures C.3 to C.5 of DSelect-k's supplement.
    """
    num_panels = min(shares.shape[1], _MAX_TASKS)
    columns = min(num_panels, 4)
    size = (2.6, 1.6) if columns > 1 else (4.5, 2.4)
    figure, grid = _panels(math.ceil(num_panels / columns), columns, size, share=True)
    for axes in grid.flat[num_panels:]:
        axes.set_visible(False)
    values = shares[:, :num_panels].double().numpy()
    batches = [np.flatnonzero(~np.isnan(values[:, task, 0])) for task in range(num_panels)]  # that have the task
    final = np.sum([values[index[-1], task] for task, index in enumerate(batches) if len(index)], 0)
    ranking = np.argsort(-final, kind="stable").tolist()
    heaviest = [expert for expert in ranking[: len(COLOURS)] if final[expert] >= _MIN_DRAWN_WEIGHT]
    others = [expert for expert in range(values.shape[2]) if expert not in heaviest]
    looks = [look(rank) for rank in range(len(heaviest))]
    for task, axes in enumerate(grid.flat[:num_panels]):
        at, history = np.asarray(steps)[batches[task]], values[batches[task], task]  # [n], [n, E]
        _lines(axes, at, history[:, others], [{"color": "0.75", "linestyle": "-"}] * len(others), 0.8)
        _lines(axes, at, history[:, heaviest], looks, 1.4)
        if binary_since:
            axes.axvline(binary_since, color="0.4", linewidth=0.8, linestyle=(0, (1, 2)))
        axes.set_title(tasks[task], fontsize=9)
    handles = [Line2D([], [], **style, linewidth=1.4) for style in looks]
    title = f"grey: {len(others)} others" if others else None
    labels = [f"expert {expert}" for expert in heaviest]
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, title=title, title_fontsize=8)
    since = [f"99 % of the selectors binary since step {binary_since} (dotted)"] if binary_since else []
    more = [] if num_panels == shares.shape[1] else [f"first {num_panels} of {shares.shape[1]} tasks"]
    title = f"Weights of the experts in training\n{'; '.join(since + more)}"
    return _over_steps(figure, grid, steps, max(1e-9, float(np.nanmax(values))), "mean weight", title)


def probabilities(steps: Sequence[int], history: Sequence[Tensor], tasks: Sequence[str]) -> Figure:
    """Draw connection probabilities over training, ``[N, T, C]`` for each layer, in one panel per task and layer."""
    num_panels = min(len(tasks), _MAX_TASKS)
    figure, grid = _panels(num_panels, len(history), (2.6, 1.1), share=True)
    for (task, layer), axes in np.ndenumerate(grid):
        values = history[layer][:, task].double().numpy()
        _lines(axes, np.asarray(steps), values, [look(number) for number in range(values.shape[1])], 1.2)
        axes.set_title(f"{tasks[task]}, layer {layer}", fontsize=8)
    more = "" if num_panels == len(tasks) else f"; first {num_panels} of {len(tasks)} tasks"
    title = f"Connection probabilities in training\none line per component{more}"
    return _over_steps(figure, grid, steps, 1.0, "", title)


def _panels(
    rows: int, columns: int, size: tuple[float, float], share: bool = False, width_ratios: Sequence[float] | None = None
) -> tuple[Figure, Any]:
    """Return a figure and its panels ``[rows, columns]`` of the mean ``size`` in inches; ``share``: of equal scales."""
    figure = Figure(figsize=(columns * size[0] + 1.6, rows * size[1] + 1.1), layout="constrained")
    ratios = {"width_ratios": width_ratios}
    return figure, figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=share, gridspec_kw=ratios)


def _matrix(axes: Axes, values: Any) -> Any:
    """Draw ``values [rows, columns]`` and number the columns, at most ``_MAX_TICKS`` of them; return the image.

    All pictures have the same scale, by the square root, where a weight of 0.05 can still be seen.
    """
    axes.set_xticks(range(0, values.shape[1], -(-values.shape[1] // _MAX_TICKS)))
    axes.tick_params(labelsize=8)
    # 0 is white, which becomes the page where a dark page inverts its pictures
    return axes.imshow(values, cmap="Blues", norm=PowerNorm(0.5, 0, max(1, values.max())), aspect="auto")


def _lines(axes: Axes, at: Any, values: Any, looks: Sequence[Mapping[str, str]], width: float) -> None:
    """Draw the columns of ``values [N, C]`` over ``at [N]``, each in its ``look``, as one artist."""
    points = [np.column_stack((at, column)) for column in values.T]
    colours, styles = [style["color"] for style in looks], [style["linestyle"] for style in looks]
    axes.add_collection(LineCollection(points, colors=colours, linestyles=styles, linewidths=width), autolim=False)


def _over_steps(figure: Figure, grid: Any, steps: Sequence[int], highest: float, label: str, title: str) -> Figure:
    """Give the panels of values from 0 to ``highest`` over training steps their scales and titles."""
    for axes in grid.flat:
        axes.set(xlim=(min(steps), max(*steps, min(steps) + 1)), ylim=(-0.03 * highest, 1.03 * highest))
        axes.locator_params(nbins=4)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
    figure.supxlabel("training step", fontsize=9)
    figure.supylabel(label, fontsize=9)
    figure.suptitle(title, fontsize=10)
    return figure
