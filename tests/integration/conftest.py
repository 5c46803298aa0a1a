"""Data sets of random numbers, in the official formats."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.digit_files import write_digits


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data folder with an ml-1m of 40 users, 60 movies and 600 ratings, and 120 + 40 digits and clothes."""
    root = tmp_path_factory.mktemp("data")
    (root / "ml-1m").mkdir()
    pairs = random.Random(0).sample([(u, i) for u in range(1, 41) for i in range(1, 61)], 600)
    rows = [f"{user}::{movie}::{random.Random(user * movie).randint(1, 5)}::0" for user, movie in sorted(pairs)]
    (root / "ml-1m" / "ratings.dat").write_text("\n".join(rows) + "\n", encoding="latin-1")
    for name in ("MNIST", "FashionMNIST"):
        write_digits(root / name / "raw")
    return root
