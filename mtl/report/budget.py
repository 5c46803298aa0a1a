"""Draw the expected result of random search over its number of trials, one curve for each gate (COMET, appendix F)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from mtl.analysis.figures import look
from mtl.report.grid import Listing, listing
from mtl.report.statistics import Value

SIZES = (1, 2, *range(5, 251, 5))  # numbers of trials, as in COMET
_SIZE = (10.8, 4.3)  # inches, without the legend
_WIDE = 10  # the scale is logarithmic if the largest value is more than this many times the smallest
_LABELLED = (1, 2, 5, 10, 20, 50, 100, 200)  # of SIZES, on the axis


@dataclass(frozen=True)
class Budget:
    """Expected values of the best trial of a search with 1, 2, ... trials, up to its whole budget.

    The best trial is the one with the best ``validation`` value; ``test`` is the test value of the same trial.
    """

    setting: str
    validation: list[float]
    test: list[float]

    @property
    def whole(self) -> int:
        """The number of trials of the whole budget."""
        return len(self.validation)


def chances(trials: int, drawn: int) -> np.ndarray:
    """Return the probabilities ``[trials]`` that the best of ``drawn`` trials is the best, second best, ... of all.

    With replacement, the rank of the best exceeds i with probability (1 - i / trials) ** drawn. COMET estimates these
    probabilities by 1000 resamples.
    """
    above = (1 - np.arange(trials + 1) / trials) ** drawn
    return np.asarray(above[:-1] - above[1:])


@cache
def all_chances(trials: int) -> np.ndarray:
    """Return the ``chances`` of 1, 2, ... drawn of ``trials`` trials, at most the largest of ``SIZES``, by row."""
    return np.stack([chances(trials, size) for size in range(1, min(trials, SIZES[-1]) + 1)])


def budget(setting: str, pairs: Sequence[tuple[Value, Value]], higher: bool) -> Budget | None:
    """Return the budget of a search among trials with these (validation, test) values; None without any.

    ``higher``: whether higher validation values are better. Trials that lack a value are left out. The whole budget is
    the number of trials, at most the largest of ``SIZES``.
    """
    if not len(known := both_known(pairs)):
        return None
    validation, test = known[np.argsort(known[:, 0] * (-1 if higher else 1), stable=True)].T
    weights = all_chances(len(known))
    return Budget(setting, (weights @ validation).tolist(), (weights @ test).tolist())


def both_known(pairs: Sequence[tuple[Value, Value]]) -> np.ndarray:
    """Return the pairs whose values are both finite, ``[N, 2]``."""
    known = [(a, b) for a, b in pairs if a is not None and b is not None and math.isfinite(a) and math.isfinite(b)]
    return np.array(known).reshape(-1, 2)


def resampled(pairs: np.ndarray, higher: bool, random: np.random.Generator, resamples: int) -> np.ndarray:
    """Return the expected test values of ``resamples`` bootstrap samples of a search's trials, by number of trials.

    ``pairs [N, 2]``: validation and test values; ``higher``: whether higher validation values are better. The result
    is ``[resamples, N]``, or with as many columns as the largest of ``SIZES``.
    """
    drawn = pairs[random.integers(len(pairs), size=(resamples, len(pairs)))]  # [resamples, N, 2]
    order = np.argsort(drawn[..., 0] * (-1 if higher else 1), 1)
    return np.asarray(np.take_along_axis(drawn[..., 1], order, 1) @ all_chances(len(pairs)).T)


def trials_needed(values: Sequence[float], target: float, higher: bool) -> int | None:
    """Return the least number of trials whose expected value reaches ``target``; None if none does."""
    reached = (size for size, value in enumerate(values, 1) if (value >= target if higher else value <= target))
    return next(reached, None)


def ratios(budgets: Sequence[Budget], attribute: str, name: str, higher: bool) -> Listing:
    """Return how many trials each setting needs to reach the result of each other setting with its whole budget.

    ``attribute``: "validation" or "test"; ``name``: the name of this value for the reader.
    """
    rows = []
    for own in budgets:
        cells = []
        for other in budgets:
            needed = trials_needed(getattr(own, attribute), getattr(other, attribute)[-1], higher)
            share = "" if needed is None else f"{needed} ({other.whole / needed:.3g}x fewer)"
            cells.append("-" if own is other else share or f"not with {own.whole}")
        rows.append([own.setting, *cells])
    header = ["trials of", *(f"for {each.setting} with {each.whole}" for each in budgets)]
    note = f"The least number of trials with which the row's expected {name} is at least as good as the column's."
    return listing(f"Tuning budget: {name}", header, rows, [note])


def draw(budgets: Sequence[Budget], validation: str, test: str) -> Figure:
    """Draw both expected values over the number of trials, each in its own panel, with a line for each setting."""
    figure = Figure(figsize=_SIZE, layout="tight")
    panels = figure.subplots(1, 2)
    most = max(each.whole for each in budgets)
    titles = (f"{validation} to expect", f"{test} of that trial")
    for axes, title, attribute in zip(panels, titles, ("validation", "test"), strict=True):
        every = [value for each in budgets for value in getattr(each, attribute)]
        for index, each in enumerate(budgets):
            sizes = [size for size in SIZES if size <= each.whole]
            values = [getattr(each, attribute)[size - 1] for size in sizes]
            axes.plot(sizes, values, marker=".", label=f"{each.setting} ({each.whole})", **look(index))
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator([size for size in _LABELLED if size <= most]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set(xlabel="number of trials of the search", title=title)
        if min(every) > 0 and max(every) > _WIDE * min(every):  # runs that diverged would flatten all else
            axes.set_yscale("log")
        axes.grid(alpha=0.25)
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0, fontsize=8, title="gate (trials)")
    return figure
