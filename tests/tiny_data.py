"""Small random data sets in the official file formats."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import polars as pl
from mtl.data_modules.omniglot import ALPHABETS

from tests.celeba_files import write_celeba
from tests.digit_files import write_digits, write_svhn
from tests.glue_files import write_glue
from tests.log_files import write_census, write_kuairand
from tests.omniglot_files import write_omniglot
from tests.rating_files import book_lines, book_records, joke_lines, joke_ratings, write
from tests.squad_files import write_squad
from tests.visit_files import visits


def write_tiny_data(root: Path) -> Path:
    """Write small files of every data set that reads files into the folder ``root``; return ``root``."""
    (root / "ml-1m").mkdir(parents=True)
    pairs = random.Random(0).sample([(u, i) for u in range(1, 41) for i in range(1, 61)], 600)
    rows = [f"{user}::{movie}::{random.Random(user * movie).randint(1, 5)}::0" for user, movie in sorted(pairs)]
    (root / "ml-1m" / "ratings.dat").write_text("\n".join(rows) + "\n", encoding="latin-1")
    for name in ("MNIST", "FashionMNIST"):
        write_digits(root / name / "raw")
    write_svhn(root / "SVHN", {"train": 40, "extra": 30, "test": 20})
    write_celeba(root / "celeba", (20, 8, 8))
    write(root / "jester" / "jester-data-tiny.csv", joke_lines(joke_ratings(12)))
    write_omniglot(root / "omniglot-py" / "images_background", dict.fromkeys(ALPHABETS, 2))
    write(root / "bookcrossing" / "BX-Book-Ratings.csv", book_lines(book_records(40, 40, 12)), "\r\n")
    write_glue(root / "glue")
    write_squad(root / "squad")
    write_census(root / "census_income")
    write_kuairand(root / "KuaiRand-Pure" / "data")
    pl.DataFrame({"user": [1, 2, 3, 4] * 50, "click": [0, 1] * 100}).write_parquet(root / "rows.parquet")
    (root / "molecules").mkdir()
    smiles = [f"c1cc({a})ccc1C({b})=N{c}" for a, b, c in product("NOSC", repeat=3)][:60]
    toxic = {"mol_id": [f"T{row}" for row in range(60)], "NR-A": [0, 1, None] * 20, "SR-B": [1, 0] * 30}
    pl.DataFrame({**toxic, "smiles": smiles}).write_csv(root / "molecules" / "tox21.csv.gz", compression="gzip")
    visits().write_csv(root / "visits.csv")
    return root
