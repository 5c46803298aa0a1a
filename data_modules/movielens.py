"""MovieLens as two tasks on (user, movie) pairs: was the movie watched (rated), and how was it rated?"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import polars as pl
import torch
from torch import Tensor

from mtl.checks import InputError

from .files.cache import cached
from .files.reading import quote
from .interactions import InteractionsDataModule, Words, read_lines, repair, versions
from .options import choice

logger = logging.getLogger(__name__)

FORMAT = 1  # of the cache; increase it when the content changes
STARS = 5


@dataclass(frozen=True)
class Variant:
    """A release of MovieLens: where its ratings are, and the sizes and ranges that its README states."""

    folder: str
    ratings: str
    separator: str
    md5: str  # of the archive {folder}.zip
    users: int  # largest user id; the same for movies
    movies: int
    rows: int


VARIANTS = {
    "1m": Variant("ml-1m", "ratings.dat", "::", "c4d9eecfca2ab87c1945afe126590906", 6040, 3952, 1_000_209),
    "100k": Variant("ml-100k", "u.data", "\t", "0e33842e24a9c977be4e0107933c0723", 943, 1682, 100_000),
}


class MovieLensDataModule(InteractionsDataModule):
    """Serve the ratings of MovieLens (Harper & Konstan 2015) and as many unwatched pairs.

    Tasks: ``watch`` (binary, weight ``alpha``) and ``rating`` (regression on the 1-5 scale, weight 1 - ``alpha``,
    NaN on unwatched pairs). Inputs: ``user`` and ``item``, int64 ids from 0.
    """

    words = Words("watch", "item", item="movie", record="rating", seen="rated", unseen="unwatched")

    def __init__(
        self,
        data_dir: str,
        variant: Literal["1m", "100k"] = "1m",
        alpha: float = 0.9,
        negatives: Literal["uniform", "per_user"] = "uniform",
        split: Sequence[float] = (0.8, 0.1, 0.1),
        download: bool = True,
        base_url: str = "https://files.grouplens.org/datasets/movielens",
        **common: Any,
    ) -> None:
        super().__init__(data_dir, alpha, split, download, base_url, negatives, **common)
        self.variant = VARIANTS[choice("variant", variant, list(VARIANTS))]
        self.folder = self.data_dir / self.variant.folder
        self.ratings_file = self.source = self.folder / self.variant.ratings

    def prepare_data(self) -> None:
        """Fetch, unpack and parse what is missing. Safe to kill, and to run in several processes at once."""
        self.obtain(self.ratings_file, self.data_dir / f"{self.variant.folder}.zip", md5=self.variant.md5)
        self.records()

    def records(self) -> dict[str, Tensor]:
        """Return ``user``, ``item`` (int64 ids from 0) and ``rating`` (float32), each ``[R]``."""
        path = self.data_dir / "cache" / f"movielens-{self.variant.folder.removeprefix('ml-')}.pt"
        key = (FORMAT, *versions(self.ratings_file))
        return cached(path, lambda: read_ratings(self.ratings_file, self.variant), key)


def read_ratings(file: Path, variant: Variant) -> dict[str, Tensor]:
    """Parse a ratings file to ``user``, ``item`` and ``rating``, each ``[R]``.

    Raises InputError, which names the first damaged or repeated row.
    """
    frame = read_lines(file)
    field = variant.separator.join([r"([0-9]{1,9})", r"([0-9]{1,9})", r"([0-9])", r"[0-9]+"])
    columns = {"1": "user", "2": "item", "3": "rating"}
    groups = pl.col("line").str.extract_groups(rf"^{field}\r?$")
    frame = frame.with_columns(groups.struct.field(old).cast(pl.Int64).alias(new) for old, new in columns.items())

    good = (
        pl.col("user").is_between(1, variant.users)
        & pl.col("item").is_between(1, variant.movies)
        & pl.col("rating").is_between(1, STARS)
    ).fill_null(False)
    damaged = frame.select(good.not_().arg_true()).to_series()
    if len(damaged):
        shown = variant.separator.replace("\t", "<tab>").join(["user", "movie", "rating", "timestamp"])
        raise InputError(
            f"{file}, line {damaged[0] + 1}: {quote(frame['line'][damaged[0]])} is not a rating; {len(damaged)} of "
            f"{len(frame)} rows are damaged. Expected {shown}, whole numbers, with user in 1..{variant.users}, "
            f"movie in 1..{variant.movies}, rating in 1..{STARS}. {repair(file)}"
        )
    repeated = frame.select(pl.struct("user", "item").is_first_distinct().not_().arg_true()).to_series()
    if len(repeated):
        raise InputError(
            f"{file}, line {repeated[0] + 1}: {quote(frame['line'][repeated[0]])} rates a movie that this user has "
            f"rated on an earlier line; {len(repeated)} of {len(frame)} rows are repeated. {repair(file)}"
        )
    if len(frame) != variant.rows:
        logger.warning("%s has %d ratings, the published file %d", file, len(frame), variant.rows)
    user, item, rating = (torch.from_numpy(frame[name].to_numpy(writable=True)) for name in columns.values())
    return {"user": user - 1, "item": item - 1, "rating": rating.float()}
