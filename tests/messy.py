"""Write a table of 20,000 made-up orders with the faults of real tables: ``python -m tests.messy FILE [SEED]``.

It has an identifier in each row, customers by number, ages, dates in three formats, numbers written as text, countries
with typing errors, incomes with outliers, empty cells, a constant, and a label whose rarer class has 2 % of the rows.
"""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

ROWS, CUSTOMERS = 20_000, 4_000
COUNTRIES = ("France", "Germany", "Italy", "Norway", "Poland", "Spain", "Sweden", "Turkey")
TASKS: dict[str, dict[str, Any]] = {
    "churned": {"kind": "binary"},
    "fraud": {"kind": "binary"},
    "plan": {"kind": "multiclass"},
    "spend": {"kind": "regression"},
}


def messy(rows: int = ROWS, seed: int = 0) -> pl.DataFrame:
    """Draw the table: labels depend on the customer, and in curves and products on age, income, dates and the rest."""
    draw = np.random.default_rng(seed)
    customer = draw.integers(CUSTOMERS, size=rows)
    trait, home = draw.normal(size=CUSTOMERS)[customer], draw.integers(8, size=CUSTOMERS)[customer]
    age = np.clip(draw.gamma(6, 7, rows).round() + 16, 16, 118)
    income = np.exp(draw.normal(10.3, 0.5, rows))
    days, late = draw.integers(2_000, size=rows), draw.integers(60 * 24 * 365, size=rows)
    due, weight = draw.integers(1, 400, rows), draw.gamma(2, 5, rows)
    price = np.exp(draw.normal(6.5, 1, rows))
    young, rich, recent = np.exp(-(((age - 40) / 15) ** 2)), np.log(income) - 10.3, days / 1_000 - 1
    churn = 0.8 * trait + 2 * recent - 1.5 * young + (home % 3 == 0) * rich * 2 - 0.3
    fraud = -8.2 + 2.5 * (np.log(price) - 6.5) + 2.5 * (late % 1440 < 360) + 1.5 * (home == 5) + (due < 30)
    plan = np.stack([rich * 2 + young, np.full(rows, 0.6), recent * 1.5 + (weight > 12)], 1)
    spend = 40 + 12 * trait + 15 * rich * (1 + young) + 3 * np.sqrt(weight) + 8 * np.sin(days / 200)
    names = np.array(COUNTRIES)[home]
    wrong = draw.random(rows) < 0.03
    names[wrong] = [mistyped(name, draw) for name in names[wrong]]
    income[draw.random(rows) < 0.003] *= 10_000  # in cents, and more

    def stamps(minutes: Any, form: str) -> list[str]:
        start = np.datetime64("2020-01-01T00:00")
        return [(start + np.timedelta64(int(one), "m")).astype(datetime).strftime(form) for one in minutes]

    frame = pl.DataFrame(
        {
            "Order ID": [f"ORD-{number:07d}" for number in draw.permutation(9_999_999)[:rows]],
            "customer_id": 10_000 + customer,
            "Age": age.astype(int),
            "Country": names,
            "signup": stamps(days * 1440, "%d/%m/%Y"),
            "ordered": stamps(1440 * 2_000 + late, "%Y-%m-%d %H:%M"),
            "due": stamps((2_400 + due) * 1440, "%b %d, %Y"),
            "income": income.round(2),
            "weight": [f"{value:.1f} kg" for value in weight],
            "price": [f"{value:,.2f}" for value in price],
            "currency": ["EUR"] * rows,
            "churned": np.where(draw.random(rows) < sigmoid(churn), "yes", "no"),
            "fraud": (draw.random(rows) < sigmoid(fraud)).astype(int),
            "plan": np.array(["basic", "free", "premium"])[(plan + draw.gumbel(size=plan.shape)).argmax(1)],
            "spend": (spend + 6 * draw.normal(size=rows)).round(2),
        }
    )
    gaps = {"Age": 0.04, "Country": 0.02, "income": 0.05, "churned": 0.05, "spend": 0.2}
    empty = {name: pl.Series(draw.random(rows) < share) for name, share in gaps.items()}
    return frame.with_columns(
        pl.when(hole).then(None).otherwise(pl.col(name)).alias(name) for name, hole in empty.items()
    )


def mistyped(name: str, draw: np.random.Generator) -> str:
    """Return ``name`` with a letter left out, doubled or in another case."""
    place = int(draw.integers(1, len(name)))
    letter = ("", name[place] * 2, name[place].upper())[int(draw.integers(3))]
    return name[:place] + letter + name[place + 1 :]


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


if __name__ == "__main__":
    messy(seed=int((sys.argv[2:] or [0])[0])).write_csv(Path(sys.argv[1]))
