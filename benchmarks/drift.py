"""Count the false alarms of ``TrainedModel.drift`` on unchanged days, and whether changes are found.

A day has rows of the distribution of the training rows. ``python benchmarks/drift.py`` prints a row for each case.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import polars as pl

import mtl

QUICK = {
    "max_epochs": 2,
    "threads": 1,
    "progress": False,
    "options": {"blend": "none", "network.num_experts": 2},
}


def draw_day(rows: int, seed: int, users: int, kind: str) -> pl.DataFrame:
    """Return rows with a number, a column of the ``kind``, and a binary and a numeric label."""
    draw = np.random.default_rng(seed)
    amount = draw.gamma(2.0, 30.0, rows)
    columns: dict[str, Any] = {"amount": amount}
    if kind == "categories":
        columns["user"] = [f"u{number}" for number in draw.integers(0, users, rows)]
    elif kind == "dates":
        days = pl.datetime_range(pl.datetime(2025, 1, 1), pl.datetime(2026, 1, 1), eager=True)
        columns["day"] = days.sample(rows, with_replacement=True, seed=seed)
    elif kind == "lists":
        columns["tags"] = [[f"t{tag}" for tag in tags] for tags in draw.zipf(1.5, (rows, 6)).clip(max=500)]
    columns["bought"] = (amount + draw.normal(0, 30, rows) > 60).astype(int)
    columns["spent"] = 0.1 * amount + draw.normal(0, 1, rows)
    return pl.DataFrame(columns)


@dataclass
class Case:
    """Rows of a training and of a day, and how the network is trained."""

    rows: int
    day: int
    users: int = 5
    kind: str = "categories"
    options: dict[str, Any] = field(default_factory=dict)
    bought: dict[str, Any] = field(default_factory=dict)
    again: bool = False  # train a second run that starts from the first


CASES = {
    "few categories": Case(1_200, 500),
    "400 users": Case(1_000, 300, users=400),
    "400 users and long days": Case(1_000, 1_000, users=400),
    "3000 users": Case(1_200, 500, users=3_000),
    "3000 users and more rows": Case(4_000, 2_000, users=3_000),
    "dates": Case(1_200, 500, kind="dates"),
    "lists": Case(1_200, 500, kind="lists"),
    "an ensemble": Case(1_200, 500, options={"recipe": "table_ensemble"}),
    "calibrated": Case(1_200, 500, options={"calibrate": True}),
    "sampled": Case(1_200, 500, bought={"sampling_rate": 0.25}),
    "started from another run": Case(1_200, 500, users=400, again=True),
}


def fit(case: Case, draw: Callable[[int, int], pl.DataFrame], seed: int) -> Any:
    """Return a network that is trained on rows drawn with ``seed``."""
    tasks = {"bought": {"kind": "binary", **case.bought}, "spent": "regression"}
    train = draw(case.rows, seed)
    options = QUICK["options"] | {k: v for k, v in case.options.items() if k != "recipe"}
    keywords = {**QUICK, "options": options, **{k: v for k, v in case.options.items() if k == "recipe"}}
    if not case.again:
        return mtl.fit(train, tasks, **keywords)
    with tempfile.TemporaryDirectory() as folder:
        first = train.with_columns(pl.col("amount") - 90)  # another scale, and other users
        first = first.with_columns(pl.col("user").str.replace("u", "v"))
        mtl.fit(first, tasks, folder=f"{folder}/first", **keywords)
        return mtl.fit(train, tasks, **keywords | {"start_from": f"{folder}/first"})


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trainings", type=int, default=10)
    parser.add_argument("--days", type=int, default=20, help="days of each training")
    parser.add_argument("--only", default=",".join(CASES), help="cases, with commas")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    print("| case | days with an alarm | largest psi | other unit found | lost category found |\n|---|--:|--:|--:|--:|")
    for name in arguments.only.split(","):
        case = CASES[name]
        draw = partial(draw_day, users=case.users, kind=case.kind)
        alarms, largest, units, losses, days = 0, 0.0, 0, 0, 0
        for training in range(arguments.trainings):
            model = fit(case, draw, seed=1_000_000 * training)
            for day in range(arguments.days):
                rows = draw(case.day, 1_000_000 * training + 1 + day)
                table = model.drift(rows)
                alarms, days = alarms + int(table["drifted"].any()), days + 1
                largest = max(largest, float(table["psi"].max()))  # type: ignore[arg-type]  # numbers
                other_unit = model.drift(rows.with_columns(pl.col("amount") * 1000)).filter("drifted")["column"]
                units += "amount" in other_unit
                if name == "few categories":
                    losses += "user" in model.drift(rows.filter(pl.col("user") != "u0")).filter("drifted")["column"]
        lost = losses if name == "few categories" else "-"
        print(f"| {name} | {alarms} of {days} | {largest:.2f} | {units} | {lost} |", flush=True)


if __name__ == "__main__":
    main()
