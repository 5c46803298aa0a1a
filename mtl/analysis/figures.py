"""Draw routing, in colours that colour-blind readers can tell apart (viridis; Okabe and Ito's eight)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442"]
LINES = ["-", "--", "-.", ":"]
_MOST_TASKS = 16  # further tasks get no panel


def heat_map(share: Tensor, tasks: Sequence[str]) -> Figure:
    """Draw ``share [T, E]``, the mean weight of each expert for each task."""
    values = share.double().cpu().numpy()
    num_tasks, num_experts = values.shape
    figure = Figure(figsize=(3 + 0.38 * num_experts, 2 + 0.3 * num_tasks), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(values, cmap="viridis", vmin=0, vmax=max(values.max(), 1e-9), aspect="auto")
    axes.set(title="Which experts each task uses", xlabel="expert", ylabel="task")
    axes.set_xticks(range(num_experts), [str(n) for n in range(num_experts)], fontsize=8)
    axes.set_yticks(range(num_tasks), list(tasks), fontsize=8)
    if values.size <= 256:
        for row, column in np.ndindex(values.shape):
            value = float(values[row, column])
            ink = "white" if value < 0.6 * values.max() else "black"
            axes.text(column, row, _short(value), ha="center", va="center", fontsize=7, color=ink)
    figure.colorbar(image, ax=axes, label="mean weight over samples")
    return figure


def permutation(hard: Tensor, soft: Tensor, is_hard: bool, tasks: Sequence[str]) -> Figure:
    """Draw the permutation matrices ``[P, E, E]``: the soft ones, and the hard ones that evaluation uses."""
    shown = min(len(hard), _MOST_TASKS)
    size = 2.2 + 0.14 * hard.shape[-1]
    figure = Figure(figsize=(2 * size + 1, 0.8 + size * shown), layout="constrained")
    grid = figure.subplots(shown, 2, squeeze=False)
    for row in range(shown):
        whose = f", task {tasks[row]}" if len(hard) > 1 else ""
        titles = (f"soft (Sinkhorn){whose}", f"{'hardened' if is_hard else 'used in evaluation'}{whose}")
        for axes, matrix, title in zip(grid[row], (soft[row], hard[row]), titles, strict=True):
            image = axes.imshow(matrix.double().numpy(), cmap="viridis", vmin=0, vmax=1)
            axes.set(title=title, xlabel="expert", ylabel="output of the gate")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.yaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=grid, label="entry", shrink=0.8)
    figure.suptitle("Permutation of the experts")
    return figure


def courses(steps: Sequence[int], shares: Tensor, tasks: Sequence[str], binary_since: int) -> Figure:
    """Draw ``shares [N, T, E]``, the experts' mean weights in the batches at ``steps``, in one panel per task.

    Batches that lack a task, whose shares of it are NaN, are left out of its panel. Like figures C.3 to C.5 of
    DSelect-k's supplement. The experts with the largest final weights are coloured, the others are grey.
    """
    shown = min(shares.shape[1], _MOST_TASKS)
    columns = min(shown, 4)
    rows = math.ceil(shown / columns)
    figure = Figure(figsize=(1.6 + 3.1 * columns, 1.3 + 2.2 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    values = shares[:, :shown].double().numpy()
    known = [np.flatnonzero(~np.isnan(values[:, task, 0])) for task in range(shown)]  # the batches that have the task
    final = np.sum([values[index[-1], task] for task, index in enumerate(known) if len(index)], 0)
    heaviest = np.argsort(-final, kind="stable")[: len(COLOURS)]
    for index, axes in enumerate(grid.flat):
        if index >= shown:
            axes.set_axis_off()
            continue
        at, course = np.asarray(steps)[known[index]], values[known[index], index]  # [n], [n, E]
        for expert in range(values.shape[2]):
            if expert not in heaviest:
                axes.plot(at, course[:, expert], color="0.75", linewidth=0.8)
        for rank, expert in enumerate(heaviest):
            style = LINES[rank % len(LINES)]
            line = axes.plot(at, course[:, expert], style, color=COLOURS[rank], linewidth=1.4)
            line[0].set_label(f"expert {expert}")
        if binary_since >= 0:
            axes.axvline(binary_since, color="0.4", linewidth=0.8, linestyle=(0, (1, 2)))
        axes.set_title(tasks[index], fontsize=9)
        axes.grid(alpha=0.25)
    for axes in grid[-1]:
        axes.set_xlabel("training step")
    for axes in grid[:, 0]:
        axes.set_ylabel("mean weight")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    others = values.shape[2] - len(heaviest)
    title = None if not others else f"grey: {others} others"
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, title=title, title_fontsize=8)
    since = f"; all selectors binary since step {binary_since} (dotted)" if binary_since >= 0 else ""
    more = "" if shown == shares.shape[1] else f"; first {shown} of {shares.shape[1]} tasks"
    figure.suptitle(f"Weights of the experts in training{since}{more}", fontsize=11)
    return figure


def connections(matrices: Sequence[Tensor], tasks: Sequence[str]) -> Figure:
    """Draw which components each task uses, ``[T, C]`` for each layer, in one panel per layer."""
    widths = [matrix.shape[1] for matrix in matrices]
    figure = Figure(figsize=(2.2 + 0.25 * sum(widths), 1.4 + 0.25 * len(tasks)), layout="constrained")
    grid = figure.subplots(1, len(matrices), squeeze=False, sharey=True, width_ratios=widths)[0]
    for layer, (axes, matrix) in enumerate(zip(grid, matrices, strict=True)):
        axes.imshow(matrix.double().numpy(), cmap="viridis", vmin=0, vmax=1, aspect="auto")
        axes.set(title=f"layer {layer}", xlabel="component")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xticks([n - 0.5 for n in range(1, matrix.shape[1])], minor=True)
        axes.set_yticks([n - 0.5 for n in range(1, len(tasks))], minor=True)
        axes.grid(which="minor", color="white", linewidth=0.6)
        axes.tick_params(which="minor", length=0)
    grid[0].set_yticks(range(len(tasks)), list(tasks), fontsize=8)
    figure.suptitle("Which components each task uses (bright)", fontsize=11)
    return figure


def probabilities(steps: Sequence[int], history: Sequence[Tensor], tasks: Sequence[str]) -> Figure:
    """Draw connection probabilities over training, ``[N, T, C]`` for each layer, in one panel per task and layer."""
    shown = min(len(tasks), _MOST_TASKS)
    columns = len(history)
    figure = Figure(figsize=(1.2 + 2.2 * columns, 1.0 + 1.5 * shown), layout="constrained")
    grid = figure.subplots(shown, columns, squeeze=False, sharex=True, sharey=True)
    for task in range(shown):
        for layer in range(columns):
            axes, values = grid[task, layer], history[layer][:, task].double().numpy()
            for component in range(values.shape[1]):
                style, colour = LINES[component // len(COLOURS) % len(LINES)], COLOURS[component % len(COLOURS)]
                axes.plot(steps, values[:, component], style, color=colour, linewidth=1.2)
            axes.set_ylim(-0.03, 1.03)
            axes.set_title(f"{tasks[task]}, layer {layer}", fontsize=8)
            axes.grid(alpha=0.25)
    for axes in grid[-1]:
        axes.set_xlabel("training step")
    more = "" if shown == len(tasks) else f"; first {shown} of {len(tasks)} tasks"
    figure.suptitle(f"Connection probabilities in training, one line per component{more}", fontsize=11)
    return figure


def _short(value: float) -> str:
    """Format a weight with two decimals; 0 gives an empty string."""
    return "" if value == 0 else f"{value:.2f}".lstrip("0") if value < 0.995 else "1"
