"""Draw a column of the tables over numbers, such as those of tasks or the budgets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.figure

from mtl.analysis.figures import look
from mtl.analysis.patterns import random_jaccard
from mtl.paper.definition import Figure, Paper
from mtl.report.page import Picture, picture
from mtl.report.runs import Runs, config
from mtl.report.statistics import summarise

Points = list[tuple[float, float, float]]  # (x, mean, standard error)


def figure_of(paper: Paper, figure: Figure, groups: Mapping[str, Runs]) -> Picture | None:
    """Return the figure, means over finished runs with standard errors; None if no run has any of its columns."""
    panels = {column: lines for column in figure.columns if (lines := _lines(paper, figure, groups, column))}
    if not panels:
        return None
    drawn = matplotlib.figure.Figure(figsize=(4.2 * len(panels) + 1.6, 3.4), layout="constrained")
    [grid] = drawn.subplots(1, len(panels), squeeze=False)
    order = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    names: dict[str, Any] = {}  # the line of each name, for the legend
    for axes, (column, lines) in zip(grid, panels.items(), strict=True):
        for name, line in lines.items():
            style: dict[str, Any] = {**look(order.index(name)), "marker": "o", "markersize": 4, "capsize": 3}
            names[name] = axes.errorbar(*zip(*line, strict=True), **style)
        if column in figure.random:
            measured = {x for line in lines.values() for x, _, _ in line}
            places = [(at, _random(groups.get(key))) for key, at in figure.at.items() if at in measured]
            points = [(at, value) for at, value in places if value]
            if points:
                [names["random selection"]] = axes.plot(*zip(*sorted(points), strict=True), color="0.5", linestyle=":")
        axes.set(xlabel=figure.label, ylabel=column, xticks=sorted(figure.at.values()))
        axes.grid(alpha=0.25)
    drawn.legend(names.values(), names.keys(), loc="outside right upper", fontsize=8)
    return picture(drawn, f"{figure.title}: means over runs, with standard errors")


def _lines(paper: Paper, figure: Figure, groups: Mapping[str, Runs], column: str) -> dict[str, Points]:
    """Return the points of each method over groups, or of each group over methods."""
    lines: dict[str, Points] = {}
    for group, method in paper.rows():
        of_group = group.key in figure.at
        x, name = (figure.at[group.key], method.name) if of_group else (figure.at.get(method.key), group.name)
        if x is None or group.key not in groups:
            continue
        values = summarise(list(groups[group.key].values(method.name, column).values()))
        if values.mean is not None:
            lines.setdefault(name, []).append((x, values.mean, values.sem or 0.0))
    return {name: sorted(line) for name, line in lines.items()}


def _random(runs: Runs | None) -> float | None:
    """Return the expected Jaccard index of random selections of as many experts as the runs' methods select."""
    recipe = config(Path(runs.table["run"][0])).get("recipe", {}) if runs else {}
    return random_jaccard(recipe["num_experts"], recipe["k"]) if {"num_experts", "k"} <= set(recipe) else None
