"""Error of P(purchase | click) by a chain of tasks (ESMM) and by a network trained on the clicked rows alone.

Run: python benchmarks/chains.py. Rows are simulated with known probabilities: users have vectors u and items v and w
[8], with standard normal elements; P(click) = sigmoid(3 s(v) + a - 2.2) and P(purchase | click) = sigmoid(3 s(0.7 v +
0.7 w) + b - 0.7), with s(x) = u.x / sqrt(8), and a, b standard normal for each user. Both networks have the same sizes,
learning rate and largest number of epochs, and stop early. The error is the root mean square over test rows, clicked or
not; "constant" predicts the share of purchases among clicks.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
from typing import Any

import numpy as np
import polars as pl

import mtl

USERS, ITEMS, SIZE = 200, 100, 8
OPTIONS: dict[str, Any] = {
    "recipe.num_experts": 4,
    "recipe.expert_units": [64],
    "recipe.head_units": [32],
    "recipe.embedding_dim": 16,
    "recipe.dropout": 0.2,
    "columns": {"user": "category", "item": "category"},
}


def simulated(rows: int, seed: int) -> pl.DataFrame:
    """Return users, items, labels, and the probabilities ``p_click`` and ``p_given`` that labels were drawn with."""
    draw = np.random.default_rng(seed)
    u, v, w = (draw.standard_normal((count, SIZE)) for count in (USERS, ITEMS, ITEMS))
    a, b = draw.standard_normal((2, USERS))
    user, item = draw.integers(USERS, size=rows), draw.integers(ITEMS, size=rows)
    similar = [3 / SIZE**0.5 * (u[user] * side[item]).sum(1) for side in (v, 0.7 * v + 0.7 * w)]
    p_click, p_given = (1 / (1 + np.exp(-z)) for z in (similar[0] + a[user] - 2.2, similar[1] + b[user] - 0.7))
    click = draw.random(rows) < p_click
    purchase = click & (draw.random(rows) < p_given)
    labels = {"click": click.astype(int), "purchase": purchase.astype(int)}
    return pl.DataFrame({"user": user, "item": item, **labels, "p_click": p_click, "p_given": p_given})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--heads", default="dense")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    print("seed  clicks  purchases  chain   clicked rows  constant")
    errors: dict[str, list[float]] = {"chain": [], "clicked": [], "constant": []}
    for seed in range(args.seeds):
        table = simulated(2 * args.rows, seed)
        rows, test = table[: args.rows].drop("p_click", "p_given"), table[args.rows :]
        clicked = rows.filter(pl.col("click") == 1).drop("click")
        common: dict[str, Any] = {"gate": "softmax", "seed": seed, "max_epochs": args.epochs, "progress": False}
        options = {name if "." in name else f"data.{name}": value for name, value in OPTIONS.items()}
        tasks = {"click": "binary", "purchase": {"kind": "binary", "after": "click"}}
        chain = mtl.fit(rows, tasks, options=options | {"heads": args.heads}, batch_size=256, **common)
        alone = mtl.fit(clicked, {"purchase": "binary"}, options=options, batch_size=256, **common)
        errors_by_name = {
            "chain": chain.predict(test)["purchase_probability_given_click"],
            "clicked": alone.predict(test)["purchase_probability"],
            "constant": pl.Series([clicked["purchase"].mean()] * len(test)),
        }
        for name, values in errors_by_name.items():
            errors[name].append(math.sqrt(float(((values - test["p_given"]) ** 2).mean())))
        shown = "  ".join(f"{values[-1]:.4f}" for values in errors.values())
        print(f"{seed:4}  {len(clicked):6}  {clicked['purchase'].sum():9}  {shown}", flush=True)
    for name, values in errors.items():
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
        print(f"{name}: {statistics.fmean(values):.4f} +- {error:.4f}")


if __name__ == "__main__":
    main()
