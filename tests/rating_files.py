"""Make files of ratings in the layouts of Jester and Book-Crossing."""

from __future__ import annotations

import gzip
from pathlib import Path

import torch
from mtl.data_modules.books import HEADER
from torch import Tensor

JOKES = 100
Record = tuple[int, str, int]


def write(file: Path, lines: list[str], end: str = "\n") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    raw = "".join(line + end for line in lines).encode("latin-1")
    file.write_bytes(gzip.compress(raw, mtime=0) if file.suffix == ".gz" else raw)
    return file


def book_records(users: int = 20, books: int = 24, each: int = 8) -> list[Record]:
    """Return records of users 1000, 997, ..., each of ``each`` of the books B01, B02, ...; a third have no rating."""
    generator = torch.Generator().manual_seed(1)
    return [
        (1000 - 3 * user, f"B{book + 1:02}", (user * 7 + book) % 10 + 1 if (user + book) % 3 else 0)
        for user in range(users)
        for book in torch.randperm(books, generator=generator)[:each].tolist()
    ]


def book_lines(records: list[Record] | None = None) -> list[str]:
    records = book_records() if records is None else records
    return [HEADER, *(f'"{user}";"{isbn}";"{rating}"' for user, isbn, rating in records)]


def joke_ratings(users: int, seed: int = 0) -> Tensor:
    """Return ratings ``[users, 100]`` in hundredths; a third of them are 9900, not rated."""
    generator = torch.Generator().manual_seed(seed)
    ratings = torch.randint(-1000, 1001, (users, JOKES), generator=generator)
    return ratings.masked_fill(torch.rand(users, JOKES, generator=generator) < 1 / 3, 9900)


def joke_lines(ratings: Tensor) -> list[str]:
    return [
        ",".join([str(sum(value != 9900 for value in row)), *(f"{value / 100:.2f}" for value in row)])
        for row in ratings.tolist()
    ]
