"""Write files of made-up ratings in the layouts of Jester and Book-Crossing."""

from __future__ import annotations

import random
from pathlib import Path


def write_jester(file: Path, users: int = 12) -> None:
    """Write a csv file of ``users`` rows; each user has rated 60 of the 100 jokes."""
    rng = random.Random(0)
    rows = []
    for _ in range(users):
        ratings = [99.0] * 40 + [rng.uniform(-10, 10) for _ in range(60)]
        rng.shuffle(ratings)
        rows.append(",".join(["60", *(f"{rating:.2f}" for rating in ratings)]))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(rows) + "\n")


def write_books(file: Path, users: int = 40, books: int = 40, each: int = 12) -> None:
    """Write ``each`` records for each user; one in eleven has no rating."""
    rng = random.Random(0)
    rows = ['"User-ID";"ISBN";"Book-Rating"']
    for user in range(users):
        for book in rng.sample(range(books), each):
            rows.append(f'"{276725 + user}";"{book:09}X";"{rng.randint(0, 10)}"')
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\r\n".join(rows) + "\r\n", encoding="latin-1", newline="")
