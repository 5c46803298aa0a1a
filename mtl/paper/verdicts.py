"""Judge whether the claims of a publication hold in our runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mtl.paper.definition import Claim
from mtl.report.grid import rounded
from mtl.report.statistics import SIGNIFICANCE, Summary, Value, summarise, welch

FEWEST = 3  # the least number of runs of a gate for a verdict
RULES = (
    f"A claim holds if the difference has the right sign, is significant (one-sided unpaired Welch test, "
    f"p < {SIGNIFICANCE}), and is as large as claimed, where a size is claimed. It holds in sign if only the sign is "
    f"right. With fewer than {FEWEST} finished runs of a gate, it is not judged. A claim on one number holds if the "
    "mean over runs is within its bound."
)


class Verdict(StrEnum):
    """Verdicts on a claim, from best to worst; for several comparisons, the worst one counts."""

    HOLDS = "holds"
    IN_SIGN = "holds in sign"
    FEW = "not enough runs to say"
    FAILS = "does not hold"


@dataclass(frozen=True)
class Judgement:
    """A claim, the verdict of our runs, and the numbers."""

    claim: Claim
    verdict: Verdict
    reason: str


def judge(claim: Claim, values: Mapping[str, Sequence[Value]], names: Mapping[str, str]) -> Judgement:
    """Judge ``claim`` by the finished runs.

    ``values``: the values of the claim's column by the key of the gate, one for each run; ``names``: of the gates.
    """
    own = values.get(claim.gate, ())
    if not claim.than:
        found = [_bounded(claim, own)]
    else:
        found = [_compared(claim, own, values.get(other, ()), names[other]) for other in claim.than]
    order = list(Verdict)
    verdict = max((each for each, _ in found), key=order.index)
    return Judgement(claim, verdict, "; ".join(reason for _, reason in found))


def _bounded(claim: Claim, own: Sequence[Value]) -> tuple[Verdict, str]:
    mine = summarise(own)
    if mine.mean is None or mine.count < FEWEST:
        return Verdict.FEW, f"{_runs(mine)}"
    low = claim.at_least is None or mine.mean >= claim.at_least
    high = claim.at_most is None or mine.mean <= claim.at_most
    return Verdict.HOLDS if low and high else Verdict.FAILS, f"{_text(mine)}, {_runs(mine)}"


def _compared(claim: Claim, own: Sequence[Value], others: Sequence[Value], name: str) -> tuple[Verdict, str]:
    mine, theirs = summarise(own), summarise(others)
    if mine.mean is None or theirs.mean is None or min(mine.count, theirs.count) < FEWEST:
        return Verdict.FEW, f"{_runs(mine)} against {_runs(theirs)} of {name}"
    better = mine.mean - theirs.mean if claim.higher else theirs.mean - mine.mean
    share = better / abs(theirs.mean) if theirs.mean else None
    p = welch(own, others, "greater" if claim.higher else "less")
    size = "" if share is None else f", {_percent(abs(share))} {'better' if better > 0 else 'worse'}"
    reason = f"{_text(mine)} against {_text(theirs)} of {name}{size}" + ("" if p is None else f", p={p:.2g}")
    if better <= 0:
        return Verdict.FAILS, reason
    large = claim.by is None or (share is not None and share >= claim.by)
    significant = p is None or p < SIGNIFICANCE  # None: neither varies, but they differ
    return Verdict.HOLDS if large and significant else Verdict.IN_SIGN, reason


def _text(value: Summary) -> str:
    mean = "-" if value.mean is None else rounded(value.mean, value.error)
    undefined = f" ({value.undefined} runs without a value)" if value.undefined else ""
    return f"{mean}{undefined}"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 or share == 0 else f"{100 * share:.1g}%"


def _runs(value: Summary) -> str:
    return f"{value.count} run{'' if value.count == 1 else 's'}"
