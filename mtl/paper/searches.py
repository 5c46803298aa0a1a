"""Judge claims on the number of trials that a search needs (COMET, figures 2 and 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mtl.paper.definition import Claim
from mtl.paper.verdicts import Judgement, Verdict
from mtl.report.budget import both_known, budget, resampled, trials_needed
from mtl.report.statistics import RESAMPLES, SIGNIFICANCE, Value

Pairs = Sequence[tuple[Value, Value]]  # of each trial: the validation value, and the value of the claim's column


def judge_search(claim: Claim, trials: Mapping[str, Pairs], names: Mapping[str, str], higher: bool) -> Judgement:
    """Judge a claim on the number of trials.

    ``trials``: by the key of the gate; ``names``: of the gates; ``higher``: whether higher values are better.
    """
    found = [
        _compared(claim.times or 1.0, trials.get(claim.gate, []), trials.get(key, []), names[key], higher)
        for key in claim.than
    ]
    order = list(Verdict)
    verdict = max((each for each, _ in found), key=order.index)
    return Judgement(claim, verdict, "; ".join(reason for _, reason in found))


def _compared(times: float, own: Pairs, others: Pairs, name: str, higher: bool) -> tuple[Verdict, str]:
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
