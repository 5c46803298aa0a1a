"""Judge whether the claims of a publication hold in our runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from mtl.paper.definition import Claim
from mtl.report.grid import rounded
from mtl.report.statistics import (
    FEWEST,
    POWER,
    SIGNIFICANCE,
    Difference,
    Outcome,
    Summary,
    Value,
    Values,
    difference,
    one_sample,
    runs_to_decide,
    summarise,
)
from mtl.report.trials import both_known, budget, resampled, trials_needed

BINARY = 0.99  # the share of one-hot selectors from which on a gate has selected experts
RESAMPLES = 2000  # of the trials of a search
MOST = 1000  # a larger number of seeds is not spelled out
Pairs = Sequence[tuple[Value, Value]]  # of each trial: the validation value, that of the claim's column
RULES = (
    f"A claim holds if the difference has the claimed sign and is significant (two-sided t test, p < {SIGNIFICANCE}); "
    'where a size is claimed, "holds" adds only that the difference is not significantly less than claimed. It is '
    "contradicted if the opposite sign is significant, or if the difference is significantly smaller than claimed. "
    "Otherwise it is undecided: so many seeds would make the observed difference significant with probability "
    f"{POWER:.0%}. Runs that failed or have no defined value leave only the better ones: with such runs of its gate a "
    "claim does not hold, and with such runs of the other gate it is not contradicted. Runs of the same seeds are "
    f"compared in pairs (Student's test) if there are {FEWEST}, else as samples (Welch's test). Where the values of "
    "one gate hardly vary and those of the other are skewed, the test errs: of 3 to 10 lognormal values (sigma 1), 16 "
    "to 18 % contradict a true claim, a bootstrap t test still 9 to 10 %, while a permutation test of 3 to 5 runs "
    "shows nothing. A claim on one number holds if the mean over runs is within its bound and every run has the "
    "number, and is contradicted if it is significantly outside. A claim on the selected experts is undecided while "
    f"fewer than {BINARY:.0%} of the selectors are binary. A claim that a gate is worse by at most a share is tested "
    "against that share. A claim on the number of trials of a search holds if it does in at least "
    f"{1 - SIGNIFICANCE / 2:.1%} of {RESAMPLES:,} bootstrap samples of the trials; it is contradicted if it does in at "
    f"most {SIGNIFICANCE / 2:.1%}."
)


class Verdict(StrEnum):
    """Verdicts on a claim; for several comparisons, the last one in this order counts."""

    HOLDS = "holds"
    NOT_RUN = "not run"
    UNDECIDED = "undecided"
    CONTRADICTED = "contradicted"


@dataclass(frozen=True)
class Judgement:
    """A claim, the verdict of our runs, and the numbers."""

    claim: Claim
    verdict: Verdict
    reason: str


def judge(
    claim: Claim,
    values: Mapping[str, Values],
    names: Mapping[str, str],
    binary: Mapping[str, Sequence[Value]] | None = None,
    overlap: float = 0.0,
) -> Judgement:
    """Judge ``claim`` by the finished runs.

    ``values``: the values of the claim's column by the key of the gate and the run, and those of ``claim.other`` by its
    name; ``names``: of the gates; ``binary``: the shares of binary selectors of those gates that have selectors;
    ``overlap``: as in ``summarise``.
    """
    own = values.get(claim.gate, {})
    others = [*claim.than, *([claim.other] if claim.other else [])]
    if not others:
        found = [_bounded(claim, own, overlap)]
    else:
        found = [_compared(claim, own, values.get(other, {}), names.get(other, other), overlap) for other in others]
    order = list(Verdict)
    verdict, reasons = max((each for each, _ in found), key=order.index), [reason for _, reason in found]
    shares = {key: mean for key, row in (binary or {}).items() if (mean := summarise(row).mean) is not None}
    reasons += [f"{share:.0%} of the selectors of {names[key]} are binary" for key, share in shares.items()]
    if claim.binary and verdict != Verdict.NOT_RUN and min(shares.values(), default=1.0) < BINARY:
        verdict = Verdict.UNDECIDED
    return Judgement(claim, verdict, "; ".join(reasons))


def seeds_to_decide(mean: float, deviation: float, overlap: float = 0.0) -> str:
    """Say how many seeds would make the mean difference significant with probability ``POWER``."""
    needed = runs_to_decide(mean, deviation, 1, overlap) if mean else math.inf
    count = f"about {max(needed, FEWEST):,}" if needed <= MOST else f"more than {MOST:,}"
    return f"{count} seeds would decide"


def _bounded(claim: Claim, own: Values, overlap: float) -> tuple[Verdict, str]:
    mine = summarise(list(own.values()), 1.0, overlap)
    if mine.mean is None or mine.count < FEWEST:
        return _few(mine), _counted(mine.count)
    reason = f"{_text(mine)}, {_counted(mine.count)}"
    for bound, outside in ((claim.at_least, "less"), (claim.at_most, "greater")):
        if bound is not None and (mine.mean < bound if outside == "less" else mine.mean > bound):
            apart = one_sample(mine, bound)
            if apart and apart.outcome() != Outcome.OPEN:
                return Verdict.CONTRADICTED, reason
            return Verdict.UNDECIDED, f"{reason}; {seeds_to_decide(mine.mean - bound, mine.deviation, overlap)}"
    # A run without a value has not reached the event whose time is bounded
    return Verdict.UNDECIDED if mine.undefined else Verdict.HOLDS, reason


def _compared(claim: Claim, own: Values, others: Values, name: str, overlap: float) -> tuple[Verdict, str]:
    mine, theirs = (summarise(list(values.values()), 1.0, overlap) for values in (own, others))
    if mine.mean is None or theirs.mean is None or min(mine.count, theirs.count) < FEWEST:
        return _few(mine, theirs), f"{_counted(mine.count)} against {_counted(theirs.count)} of {name}"
    by, sign = claim.by or -(claim.margin or 0.0), 1 if claim.higher else -1
    found, short = (difference(own, others, factor, overlap) for factor in (1.0, 1 + sign * by))
    assert found is not None  # both settings have values
    assert short is not None
    found, short = found.times(sign), short.times(sign)
    share = found.mean / abs(theirs.mean) if theirs.mean else None
    digits = ".1g" if share and abs(share) < 0.001 else ".1f"
    size = "" if share is None else f", {100 * abs(share):{digits}}% {'better' if found.mean > 0 else 'worse'}"
    reason = f"{_text(mine)} against {_text(theirs)} of {name}{size}{_p(found)}"
    if by < 0:  # the claim is only that the gate is not worse than so
        found, reason = short, f"{reason}; against {-by:.1%} worse{_p(short)}"
    verdict = None
    if found.outcome() == Outcome.WORSE:
        verdict = Verdict.CONTRADICTED
    elif by > 0 and short.outcome() == Outcome.WORSE:
        verdict, reason = Verdict.CONTRADICTED, f"{reason}; less than the claimed {by:.0%}{_p(short)}"
    elif found.outcome() == Outcome.BETTER:
        verdict = Verdict.HOLDS
    if verdict is None:
        return Verdict.UNDECIDED, f"{reason}; {seeds_to_decide(found.mean, found.deviation, overlap)}"
    # The runs that have a value are the better ones of their gate
    biased = mine.undefined if verdict == Verdict.HOLDS else theirs.undefined
    return Verdict.UNDECIDED if biased else verdict, reason


def _p(found: Difference) -> str:
    return "" if found.p is None else f", p={found.p:.2g}"


def _few(*gates: Summary) -> Verdict:
    return Verdict.UNDECIDED if all(each.count + each.undefined for each in gates) else Verdict.NOT_RUN


def _text(value: Summary) -> str:
    mean = "-" if value.mean is None else rounded(value.mean, value.error)
    undefined = f" ({_counted(value.undefined)} without a value)" if value.undefined else ""
    return f"{mean}{undefined}"


def _counted(runs: int) -> str:
    return f"{runs} run{'' if runs == 1 else 's'}"


def judge_search(claim: Claim, trials: Mapping[str, Pairs], names: Mapping[str, str], higher: bool) -> Judgement:
    """Judge a claim on the number of trials.

    ``trials``: by the key of the gate; ``names``: of the gates; ``higher``: whether higher values are better.
    """
    found = [
        _compared_searches(claim.times or 1.0, trials.get(claim.gate, []), trials.get(key, []), names[key], higher)
        for key in claim.than
    ]
    order = list(Verdict)
    verdict = max((each for each, _ in found), key=order.index)
    return Judgement(claim, verdict, "; ".join(reason for _, reason in found))


def _compared_searches(times: float, own: Pairs, others: Pairs, name: str, higher: bool) -> tuple[Verdict, str]:
    mine, theirs = budget("", own, higher), budget("", others, higher)
    counts = f"{mine.whole if mine else 0} trials against {theirs.whole if theirs else 0} of {name}"
    if mine is None or theirs is None:
        return Verdict.NOT_RUN, counts
    needed = trials_needed(mine.test, theirs.test[-1], higher)
    random, sign = np.random.default_rng(0), 1 if higher else -1
    values = sign * resampled(both_known(own), higher, random, RESAMPLES)  # [RESAMPLES, trials]
    reached = values >= sign * resampled(both_known(others), higher, random, RESAMPLES)[:, -1:]
    fewer = np.where(reached.any(1), theirs.whole / (reached.argmax(1) + 1), 0)
    share = float(np.mean(fewer >= times))
    reason = f"not reached with {counts}"
    if needed is not None:
        reason = f"{theirs.whole / needed:.3g} times fewer: {needed} for the value of {name} with {theirs.whole}"
    low, high = np.quantile(fewer, [SIGNIFICANCE / 2, 1 - SIGNIFICANCE / 2])
    reason = f"{reason} ({low:.3g} to {high:.3g} in {1 - SIGNIFICANCE:.0%} of the samples; 0: not reached)"
    if share >= 1 - SIGNIFICANCE / 2:
        return Verdict.HOLDS, reason
    return Verdict.CONTRADICTED if share <= SIGNIFICANCE / 2 else Verdict.UNDECIDED, reason
