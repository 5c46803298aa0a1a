"""Write a table of made-up visits with a column of every kind: the rows of golden data and of golden losses."""

from __future__ import annotations

import random
from datetime import datetime, timedelta

import polars as pl

TAGS = ("new", "sale", "red", "blue", "wool")
WORDS = ("quick", "slow", "kind", "rude", "late", "early", "again", "never")


def visits(rows: int = 240, seed: int = 0, users: int = 25) -> pl.DataFrame:
    """Draw visits of ``users`` with numbers, dates, lists, texts, missing cells, weights and labels of all kinds.

    Only ``random.Random`` draws, whose numbers are the same with every version of Python and of all libraries.
    """
    draw = random.Random(seed)
    table = []
    for row in range(rows):
        amount = draw.lognormvariate(3, 1)
        click = draw.random() < 0.4 + 0.3 * (amount > 20)
        day = datetime(2026, 1, 1) + timedelta(days=row * 300 // rows + draw.randrange(3), minutes=draw.randrange(1440))
        table.append(
            {
                "user": f"u{int(users * draw.random() ** 2)}",
                "city": draw.choice(["Lyon", "Oslo", "Rome", None]),
                "visits": draw.randrange(1, 6),
                "amount": None if draw.random() < 0.05 else round(amount, 2),
                "day": day.strftime("%d/%m/%Y %H:%M"),
                "price": f"{amount + 1000:,.2f}".translate(str.maketrans(",.", ".,")),
                "tags": "|".join(draw.sample(TAGS, draw.randrange(4))),
                "note": " ".join(draw.choices(WORDS, k=draw.randrange(1, 8))),
                "weight": round(draw.uniform(0.2, 2), 3),
                "part": draw.choices(["train", "val", "test"], [8, 1, 1])[0],
                "click": int(click) if draw.random() < 0.9 else None,
                "cart": int(click and draw.random() < 0.4),
                "rare": int(draw.random() < 0.05),
                "plan": draw.choice(["free", "basic", "pro"]),
                "minutes": round(amount / 5 + draw.gauss(20, 3), 3),
            }
        )
    return pl.DataFrame(table)
