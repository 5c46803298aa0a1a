"""Judge whether the claims of a publication hold in our runs, by the rules of ``benchmarks/accuracy/rules.md``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from mtl.files.formatting import number
from mtl.paper.definition import Claim
from mtl.report.statistics import (
    MIN_RUNS,
    SIGNIFICANCE,
    Difference,
    Summary,
    Value,
    Values,
    Verdict,
    difference,
    one_sample,
    required_runs,
    summarise,
)
from mtl.report.trials import both_known, budget, required_trials, resampled

BINARY = 0.99  # the fraction of one-hot selectors from which on a method has selected experts
RESAMPLES = 2000  # of the trials of a search
MAX_SEEDS = 1000  # a larger number of seeds is not spelled out
TrialValues = Sequence[tuple[Value, Value]]  # of each trial: the validation value, that of the claim's column


class ClaimStatus(StrEnum):
    """Verdicts on a claim; for several comparisons, the last one in this order counts."""

    HOLDS = "holds"
    NOT_RUN = "not run"
    UNDECIDED = "undecided"
    CONTRADICTED = "contradicted"


@dataclass(frozen=True)
class Judgement:
    """A claim, the verdict of our runs, and the numbers."""

    claim: Claim
    verdict: ClaimStatus
    reason: str


def judge(
    claim: Claim,
    values: Mapping[str, Values],
    names: Mapping[str, str],
    binary: Mapping[str, Sequence[Value]] | None = None,
    overlap: float = 0.0,
) -> Judgement:
    """Judge ``claim`` by the finished runs.

    ``values``: the values of the claim's column by the key of the method and the run, and those of ``claim.other`` by
    its name; ``names``: of the methods; ``binary``: the fractions of binary selectors of those methods that have
    selectors; ``overlap``: as in ``summarise``.
    """
    method_values = values.get(claim.method, {})
    others = [*claim.than, *([claim.other] if claim.other else [])]
    verdicts = [] if others else [_bounded(claim, method_values, overlap)]
    for other in others:
        name = names.get(other, other.replace("/", " "))
        verdicts.append(_compared(claim, method_values, values.get(other, {}), name, overlap))
    verdict, reasons = _last(verdicts)
    shares = {key: mean for key, row in (binary or {}).items() if (mean := summarise(row).mean) is not None}
    if claim.binary:
        reasons += [f"{share:.0%} of the selectors of {names[key]} are binary" for key, share in shares.items()]
        if verdict != ClaimStatus.NOT_RUN and min(shares.values(), default=1.0) < BINARY:
            verdict = ClaimStatus.UNDECIDED
    return Judgement(claim, verdict, "; ".join(reasons))


def required_seeds(mean: float, std: float, overlap: float = 0.0) -> str:
    """Say how many seeds would make the mean difference significant with the probability ``statistics.POWER``."""
    needed = required_runs(mean, std, 1, overlap) if mean else math.inf
    count = f"about {max(needed, MIN_RUNS):,}" if needed <= MAX_SEEDS else f"more than {MAX_SEEDS:,}"
    return f"{count} seeds would decide"


def _bounded(claim: Claim, values: Values, overlap: float) -> tuple[ClaimStatus, str]:
    mine = summarise(list(values.values()), 1.0, overlap)
    if mine.mean is None or mine.count < MIN_RUNS:
        return _few(mine), _counted(mine.count)
    reason = f"{_text(mine)}, {_counted(mine.count)}"
    for bound, outside in ((claim.at_least, "less"), (claim.at_most, "greater")):
        if bound is not None and (mine.mean < bound if outside == "less" else mine.mean > bound):
            apart = one_sample(mine, bound)
            if apart and apart.verdict() != Verdict.UNDECIDED:
                return ClaimStatus.CONTRADICTED, reason
            return ClaimStatus.UNDECIDED, f"{reason}; {required_seeds(mine.mean - bound, mine.std, overlap)}"
    # A run without a value has not reached the event whose time is bounded
    return ClaimStatus.UNDECIDED if mine.undefined else ClaimStatus.HOLDS, reason


def _compared(claim: Claim, values: Values, others: Values, name: str, overlap: float) -> tuple[ClaimStatus, str]:
    mine, theirs = (summarise(list(sample.values()), 1.0, overlap) for sample in (values, others))
    if mine.mean is None or theirs.mean is None or min(mine.count, theirs.count) < MIN_RUNS:
        return _few(mine, theirs), f"{_counted(mine.count)} against {_counted(theirs.count)} of {name}"
    by, sign = claim.by or -(claim.margin or 0.0), 1 if claim.higher else -1
    delta, short = (difference(values, others, factor, overlap) for factor in (1.0, 1 + sign * by))
    assert delta is not None  # both settings have values
    assert short is not None
    delta, short = delta.scaled(sign), short.scaled(sign)
    missing = f" ({_counted(delta.undefined)} without a value)" if delta.undefined else ""
    reason = f"{_change(delta, theirs)} against {name}{missing}"
    if by < 0:  # the claim is only that the method is not worse than so
        delta, reason = short, f"{reason}; {_change(short, theirs)} against {-by:.1%} worse"
    if delta.verdict() == Verdict.WORSE:
        verdict = ClaimStatus.CONTRADICTED
    elif by > 0 and short.verdict() == Verdict.WORSE:
        verdict, reason = ClaimStatus.CONTRADICTED, f"{reason}; {_change(short, theirs)} against the claimed {by:.0%}"
    elif delta.verdict() == Verdict.BETTER:
        verdict = ClaimStatus.HOLDS
    else:
        return ClaimStatus.UNDECIDED, f"{reason}; {required_seeds(delta.mean, delta.std, overlap)}"
    # The runs that have a value are the better ones of their method
    biased = mine.undefined if verdict == ClaimStatus.HOLDS else theirs.undefined
    return ClaimStatus.UNDECIDED if biased else verdict, reason


def _change(delta: Difference, base: Summary) -> str:
    """Return a difference, of which positive ones are better, in percent of ``base``; in its own unit if that is 0."""
    return replace(delta.scaled(100 / abs(base.mean) if base.mean else 1.0), undefined=0).text()


def _few(*methods: Summary) -> ClaimStatus:
    has_runs = all(summary.count + summary.undefined for summary in methods)
    return ClaimStatus.UNDECIDED if has_runs else ClaimStatus.NOT_RUN


def _text(value: Summary) -> str:
    delta = one_sample(value)
    has_error = delta and delta.interval and delta.sem
    text = replace(delta, undefined=0).text(sign="") if delta and has_error else number(value.mean or 0.0, 4)
    return text + (f" ({_counted(value.undefined)} without a value)" if value.undefined else "")


def _counted(runs: int) -> str:
    return f"{runs} run{'' if runs == 1 else 's'}"


def judge_search(claim: Claim, trials: Mapping[str, TrialValues], names: Mapping[str, str], higher: bool) -> Judgement:
    """Judge a claim on the number of trials.

    ``trials``: by the key of the method; ``names``: of the methods; ``higher``: whether higher values are better.
    """
    mine, times = trials.get(claim.method, []), claim.times or 1.0
    verdicts = [_compared_searches(times, mine, trials.get(key, []), names[key], higher) for key in claim.than]
    verdict, reasons = _last(verdicts)
    return Judgement(claim, verdict, "; ".join(reasons))


def _last(verdicts: Sequence[tuple[ClaimStatus, str]]) -> tuple[ClaimStatus, list[str]]:
    """Return the verdict of several comparisons, see ``ClaimStatus``, and all reasons."""
    order = list(ClaimStatus)
    return max((verdict for verdict, _ in verdicts), key=order.index), [reason for _, reason in verdicts]


def _compared_searches(
    times: float, trials: TrialValues, others: TrialValues, name: str, higher: bool
) -> tuple[ClaimStatus, str]:
    mine, theirs = budget("", trials, higher), budget("", others, higher)
    counts = f"{mine.whole if mine else 0} trials against {theirs.whole if theirs else 0} of {name}"
    if mine is None or theirs is None:
        return ClaimStatus.NOT_RUN, counts
    needed = required_trials(mine.test, theirs.test[-1], higher)
    random, sign = np.random.default_rng(0), 1 if higher else -1
    values = sign * resampled(both_known(trials), higher, random, RESAMPLES)  # [RESAMPLES, trials]
    reached = values >= sign * resampled(both_known(others), higher, random, RESAMPLES)[:, -1:]
    fewer = np.where(reached.any(1), theirs.whole / (reached.argmax(1) + 1), 0)
    share = float(np.mean(fewer >= times))
    reason = f"not reached with {counts}"
    if needed is not None:
        reason = f"{number(theirs.whole / needed, 3)} times fewer: {needed} for the value of {name} with {theirs.whole}"
    low, high = np.quantile(fewer, [SIGNIFICANCE / 2, 1 - SIGNIFICANCE / 2])
    ends = f"{number(low, 3)} to {number(high, 3)}"
    reason = f"{reason} ({ends} in {1 - SIGNIFICANCE:.0%} of the samples; 0: not reached)"
    if share >= 1 - SIGNIFICANCE / 2:
        return ClaimStatus.HOLDS, reason
    return ClaimStatus.CONTRADICTED if share <= SIGNIFICANCE / 2 else ClaimStatus.UNDECIDED, reason
