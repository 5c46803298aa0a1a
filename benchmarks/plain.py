"""Compare the tuned functions to plain torch (``fast=false``), in turn in one process.

python benchmarks/plain.py [--rounds N]. Steps and predictions of the MovieLens network, as in ``step.py``; forward and
backward of convolutional experts, as in ``conv.py``.
"""

from __future__ import annotations

from collections.abc import Callable

from common import options, take_turns, undisturbed, write

# isort: split
import statistics

from step import GATES, decided, inference, ours, training

from mtl import fast


def plainly(call: Callable[[], object]) -> Callable[[], object]:
    """Return ``call`` with all tuned functions switched off."""

    def run() -> None:
        with fast.disabled():
            call()

    return run


def main() -> None:
    given = options(__doc__, rounds=12)
    networks = {
        "softmax, dense": lambda: ours(GATES["softmax"]),
        "comet, dense": lambda: ours(GATES["comet"]),
        "comet decided, sparse": lambda: decided("sparse"),
        "topk, sparse": lambda: ours(GATES["topk"], "sparse"),
    }
    calls: dict[str, Callable[[], object]] = {}
    for name, network in networks.items():
        calls[f"train 512, {name}"] = training(network(), 512, fused=True)
        calls[f"predict 512, {name}"] = inference(network(), 512, None)
        calls[f"predict 8192, {name}"] = inference(network(), 8192, None)
    rows = []
    for name, call in calls.items():
        seconds = take_turns({"tuned": call, "plain": plainly(call)}, given.rounds, calls=5)
        tuned, plain = (1000 * statistics.median(seconds[way]) for way in ("tuned", "plain"))
        best = undisturbed(seconds)
        rows.append(
            {
                "what": name,
                "tuned, ms": tuned,
                "plain, ms": plain,
                "tuned of plain": tuned / plain,
                "undisturbed": best["tuned"] / best["plain"],
            }
        )
    write(given, "plain", "Tuned functions beside plain torch", rows)


if __name__ == "__main__":
    main()
