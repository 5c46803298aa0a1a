"""MovieLens as two tasks on (user, movie) pairs: was the movie watched (rated), and how was it rated?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import polars as pl
from torch import Tensor

from mtl.checks import require
from mtl.options import Address, FilePath, Fraction, validated

from .files.reading import parsing, read_lines, repair
from .interactions import InteractionsDataModule, to_tensors
from .tables.options import Fractions


@dataclass(frozen=True)
class Variant:
    """A release of MovieLens: where its ratings are, and the sizes that its README states."""

    folder: str
    ratings: str
    separator: str
    md5: str  # of the archive {folder}.zip
    users: int  # largest user id; the same for movies
    movies: int


VARIANTS = {
    "1m": Variant("ml-1m", "ratings.dat", "::", "c4d9eecfca2ab87c1945afe126590906", 6040, 3952),
    "100k": Variant("ml-100k", "u.data", "\t", "0e33842e24a9c977be4e0107933c0723", 943, 1682),
}


class MovieLensDataModule(InteractionsDataModule):
    """Serve the ratings of MovieLens (Harper & Konstan 2015) and as many unwatched pairs.

    Tasks: ``watch`` (binary, weight ``alpha``) and ``rating`` (regression on the 1-5 scale, weight 1 - ``alpha``,
    NaN on unwatched pairs). Inputs: ``user`` and ``item``, int64 ids from 0.
    """

    task, input, item = "watch", "item", "movie"

    @validated
    def __init__(
        self,
        data_dir: FilePath,
        variant: Literal["1m", "100k"] = "1m",
        alpha: Fraction = 0.9,
        split: Fractions = (0.8, 0.1, 0.1),
        download: bool = True,
        base_url: Address = "https://files.grouplens.org/datasets/movielens",
        **common: Any,
    ) -> None:
        self.variant = VARIANTS[variant]
        super().__init__(data_dir, alpha, split, download, base_url, **common)
        self.folder = self.data_dir / self.variant.folder
        self.source = self.folder / self.variant.ratings

    def fetch_files(self) -> None:
        self.fetch_archive(self.source, self.data_dir / f"{self.folder.name}.zip", f"md5:{self.variant.md5}")

    def parse(self) -> dict[str, Tensor]:
        return read_ratings(self.source, self.variant)


def read_ratings(file: Path, variant: Variant) -> dict[str, Tensor]:
    """Parse a file of ratings, each a line of user, movie, rating and time. Raises InputError."""
    with parsing(file):
        cells = pl.col("line").str.split(variant.separator).list
        lines = read_lines(file).select(
            user=cells.get(0).cast(pl.Int64) - 1,
            item=cells.get(1).cast(pl.Int64) - 1,
            rating=cells.get(2).cast(pl.Float32),
        )
        in_range = pl.col("user").is_between(0, variant.users - 1) & pl.col("item").is_between(0, variant.movies - 1)
        require(lines.select(in_range.all()).item(), f"{file} has other users or movies than MovieLens. {repair(file)}")
    return to_tensors(lines, "user", "item", "rating")
