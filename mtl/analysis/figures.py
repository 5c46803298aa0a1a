"""Draw routing, in colours that colour-blind readers can tell apart (viridis; Okabe and Ito's eight).

Margins are computed from the lengths of the labels, and only outer panels have ticks: matplotlib's automatic layout and
its ticks would take most of the time of a picture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442"]
LINES = ["-", "--", "-.", ":"]
LETTER = 0.07  # inches, the mean width of a letter of size 8
_MOST_TASKS = 16  # further tasks get no panel
_MOST_TICKS = 32  # that name an expert each


def heat_map(share: Tensor, tasks: Sequence[str]) -> Figure:
    """Draw ``share [T, E]``, the mean weight of each expert for each task."""
    values = share.double().cpu().numpy()
    num_tasks, num_experts = values.shape
    size = max(2.6, 0.4 * num_experts), max(1.2, 0.3 * num_tasks)
    figure, [[axes]] = _panels(1, 1, size, _left(tasks), right=1.1)
    image = axes.imshow(values, cmap="viridis", vmin=0, vmax=max(values.max(), 1e-9), aspect="auto")
    axes.set(title="Which experts each task uses", xlabel="expert")
    _name_columns(axes, num_experts)
    axes.set_yticks(range(num_tasks), list(tasks), fontsize=8)
    if values.size <= 256:
        for row, column in zip(*np.nonzero(values), strict=True):
            value = float(values[row, column])
            ink = "white" if value < 0.6 * values.max() else "black"
            axes.text(column, row, _short(value), ha="center", va="center", fontsize=7, color=ink)
    _colour_bar(figure, image, "mean weight over samples")
    return figure


def permutation(hard: Tensor, soft: Tensor, is_hard: bool, tasks: Sequence[str]) -> Figure:
    """Draw the permutation matrices ``[P, E, E]``: the soft ones, and the hard ones that evaluation uses."""
    shown, size = min(len(hard), _MOST_TASKS), 1.2 + 0.14 * hard.shape[-1]
    figure, grid = _panels(shown, 2, (size, size), 0.7, right=1.1, top=0.7, gaps=(0.5, 0.5))
    image: Any = None
    for row, panels in enumerate(grid):
        titles = ("soft (Sinkhorn)", "hardened" if is_hard else "used in evaluation")
        for axes, matrix, title in zip(panels, (soft[row], hard[row]), titles, strict=True):
            image = axes.imshow(matrix.double().numpy(), cmap="viridis", vmin=0, vmax=1)
            axes.set_title(title if len(hard) == 1 else f"{title}, {tasks[row]}", fontsize=9)
            axes.tick_params(labelsize=8)
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.yaxis.get_major_locator().set_params(integer=True)
    figure.supxlabel("expert", fontsize=9)
    figure.supylabel("output of the gate", fontsize=9)
    _colour_bar(figure, image, "entry")
    figure.suptitle("Permutation of the experts", fontsize=11)
    return figure


def courses(steps: Sequence[int], shares: Tensor, tasks: Sequence[str], binary_since: int) -> Figure:
    """Draw ``shares [N, T, E]``, the experts' mean weights in the batches at ``steps``, in one panel per task.

    Batches that lack a task, whose shares of it are NaN, are left out of its panel. Like figures C.3 to C.5 of
    DSelect-k's supplement. The experts with the largest final weights are coloured, the others are grey.
    """
    shown = min(shares.shape[1], _MOST_TASKS)
    columns = min(shown, 4)
    figure, grid = _panels(math.ceil(shown / columns), columns, (2.6, 1.6), 0.7, right=1.4, top=0.7)
    for axes in grid.flat[shown:]:
        axes.set_visible(False)
    values = shares[:, :shown].double().numpy()
    known = [np.flatnonzero(~np.isnan(values[:, task, 0])) for task in range(shown)]  # the batches that have the task
    final = np.sum([values[index[-1], task] for task, index in enumerate(known) if len(index)], 0)
    heaviest = np.argsort(-final, kind="stable")[: len(COLOURS)].tolist()
    others = [expert for expert in range(values.shape[2]) if expert not in heaviest]
    looks = [(COLOURS[rank], LINES[rank % len(LINES)]) for rank in range(len(heaviest))]
    for task, axes in enumerate(grid.flat[:shown]):
        at, course = np.asarray(steps)[known[task]], values[known[task], task]  # [n], [n, E]
        _lines(axes, at, course[:, others], [("0.75", "-")] * len(others), 0.8)
        _lines(axes, at, course[:, heaviest], looks, 1.4)
        if binary_since >= 0:
            axes.axvline(binary_since, color="0.4", linewidth=0.8, linestyle=(0, (1, 2)))
        axes.set_title(tasks[task], fontsize=9)
    _share_scales(grid, steps, max(1e-9, float(np.nanmax(values))))
    figure.supxlabel("training step", fontsize=9)
    figure.supylabel("mean weight", fontsize=9)
    handles = [LineCollection([], colors=colour, linestyles=line, linewidths=1.4) for colour, line in looks]
    title = f"grey: {len(others)} others" if others else None
    labels = [f"expert {expert}" for expert in heaviest]
    figure.legend(handles, labels, loc="upper right", fontsize=8, title=title, title_fontsize=8)
    since = [f"all selectors binary since step {binary_since} (dotted)"] if binary_since >= 0 else []
    more = [] if shown == shares.shape[1] else [f"first {shown} of {shares.shape[1]} tasks"]
    figure.suptitle(f"Weights of the experts in training\n{'; '.join(since + more)}", fontsize=10)
    return figure


def binary_selectors(shares: Mapping[str, tuple[Sequence[int], Sequence[float]]]) -> Figure:
    """Draw the share of the selectors that are one-hot in the batches at some steps: (steps, shares) of each layer."""
    figure, [[axes]] = _panels(1, 1, (4.5, 2.4), 0.7, right=1.4 if len(shares) > 1 else 0.2, top=0.5)
    for index, (name, (steps, values)) in enumerate(shares.items()):
        colour, line = COLOURS[index % len(COLOURS)], LINES[index % len(LINES)]
        axes.plot(steps, values, line, color=colour, linewidth=1.4, label=name, marker="o" if len(steps) == 1 else None)
    axes.set_ylim(-0.03, 1.03)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    figure.supxlabel("training step", fontsize=9)
    figure.supylabel("share of selectors", fontsize=9)
    if len(shares) > 1:
        figure.legend(loc="upper right", fontsize=8)
    figure.suptitle("Binary selectors in training", fontsize=10)
    return figure


def connections(matrices: Sequence[Tensor], tasks: Sequence[str]) -> Figure:
    """Draw which components each task uses, ``[T, C]`` for each layer, in one panel per layer."""
    widths = [max(0.8, 0.25 * matrix.shape[1]) for matrix in matrices]
    size = float(np.mean(widths)), max(1.0, 0.25 * len(tasks))
    figure, [panels] = _panels(1, len(matrices), size, _left(tasks), top=0.8, ratios=widths)
    for layer, (axes, matrix) in enumerate(zip(panels, matrices, strict=True)):
        num_components = matrix.shape[1]
        axes.imshow(matrix.double().numpy(), cmap="viridis", vmin=0, vmax=1, aspect="auto")
        axes.set_title(f"layer {layer}", fontsize=9)
        _name_columns(axes, num_components)
        axes.set_yticks([])
        rows = [[(-0.5, n - 0.5), (num_components - 0.5, n - 0.5)] for n in range(1, len(tasks))]
        columns = [[(n - 0.5, -0.5), (n - 0.5, len(tasks) - 0.5)] for n in range(1, num_components)]
        axes.add_collection(LineCollection([*rows, *columns], colors="white", linewidths=0.6), autolim=False)
    panels[0].set_yticks(range(len(tasks)), list(tasks), fontsize=8)
    figure.supxlabel("component", fontsize=9)
    figure.suptitle("Which components each task uses (bright)", fontsize=11)
    return figure


def probabilities(steps: Sequence[int], history: Sequence[Tensor], tasks: Sequence[str]) -> Figure:
    """Draw connection probabilities over training, ``[N, T, C]`` for each layer, in one panel per task and layer."""
    shown = min(len(tasks), _MOST_TASKS)
    figure, grid = _panels(shown, len(history), (2.6, 1.1), 0.7, top=0.7)
    for task, panels in enumerate(grid):
        for layer, axes in enumerate(panels):
            values = history[layer][:, task].double().numpy()
            numbers = range(values.shape[1])
            looks = [(COLOURS[n % len(COLOURS)], LINES[n // len(COLOURS) % len(LINES)]) for n in numbers]
            _lines(axes, np.asarray(steps), values, looks, 1.2)
            axes.set_title(f"{tasks[task]}, layer {layer}", fontsize=8)
    _share_scales(grid, steps, 1.0)
    figure.supxlabel("training step", fontsize=9)
    more = "" if shown == len(tasks) else f"; first {shown} of {len(tasks)} tasks"
    figure.suptitle(f"Connection probabilities in training\none line per component{more}", fontsize=10)
    return figure


def _panels(
    rows: int,
    columns: int,
    size: tuple[float, float],
    left: float,
    right: float = 0.2,
    top: float = 0.45,
    gaps: tuple[float, float] = (0.12, 0.35),
    ratios: Sequence[float] | None = None,
) -> tuple[Figure, Any]:
    """Return a figure and its panels ``[rows, columns]``; lengths are in inches.

    ``size``: mean width, and height of a panel; ``gaps``: between columns, and between rows; ``ratios``: of the widths.
    """
    bottom = 0.6
    width = left + columns * size[0] + (columns - 1) * gaps[0] + right
    height = bottom + rows * size[1] + (rows - 1) * gaps[1] + top
    figure = Figure(figsize=(width, height))
    edges = {"left": left / width, "right": 1 - right / width, "bottom": bottom / height, "top": 1 - top / height}
    spaces = {"wspace": gaps[0] / size[0], "hspace": gaps[1] / size[1], "width_ratios": ratios}
    return figure, figure.subplots(rows, columns, squeeze=False, gridspec_kw=edges | spaces)


def _left(names: Sequence[str]) -> float:
    """Return the margin, in inches, that ``names`` need to the left of the panels."""
    return 0.4 + LETTER * max(map(len, names))


def _lines(axes: Axes, at: Any, values: Any, looks: Sequence[tuple[str, str]], width: float) -> None:
    """Draw the columns of ``values [N, C]`` over ``at [N]``, each in its (colour, style), as one artist."""
    points = [np.column_stack((at, column)) for column in values.T]
    colours, styles = [colour for colour, _ in looks], [style for _, style in looks]
    axes.add_collection(LineCollection(points, colors=colours, linestyles=styles, linewidths=width), autolim=False)


def _share_scales(grid: Any, steps: Sequence[int], highest: float) -> None:
    """Give all panels of ``grid`` the same scales and grid lines, and the outer ones ticks."""
    start, end = min(steps), max(*steps, min(steps) + 1)
    across = [tick for tick in MaxNLocator(4, integer=True).tick_values(start, end) if start <= tick <= end]
    up = [tick for tick in MaxNLocator(4).tick_values(0, highest) if 0 <= tick <= highest]
    lines = [[(tick, 0), (tick, highest)] for tick in across] + [[(start, tick), (end, tick)] for tick in up]
    for (row, column), axes in np.ndenumerate(grid):
        lowest = row == len(grid) - 1 or not grid[row + 1, column].get_visible()
        axes.set(xlim=(start, end), ylim=(-0.03 * highest, 1.03 * highest))
        axes.set_xticks(across if lowest else [])
        axes.set_yticks(up if column == 0 else [])
        axes.tick_params(labelsize=8)
        axes.add_collection(LineCollection(lines, colors="0.9", linewidths=0.8, zorder=0), autolim=False)


def _name_columns(axes: Axes, count: int) -> None:
    """Number ``count`` columns, at most ``_MOST_TICKS`` of them."""
    axes.set_xticks(range(0, count, -(-count // _MOST_TICKS)))
    axes.tick_params(axis="x", labelsize=8)


def _colour_bar(figure: Figure, image: Any, label: str) -> None:
    """Add a colour bar at the right edge, in a margin of 1.1 inches."""
    width, edges = figure.get_figwidth(), figure.subplotpars
    axes = figure.add_axes((1 - 0.95 / width, edges.bottom, 0.15 / width, edges.top - edges.bottom))
    figure.colorbar(image, cax=axes, label=label)
    axes.tick_params(labelsize=8)


def _short(value: float) -> str:
    """Format a weight with two decimals; 0 gives an empty string."""
    return "" if value == 0 else f"{value:.2f}".lstrip("0") if value < 0.995 else "1"
