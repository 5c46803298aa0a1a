"""MovieLens as two tasks on (user, movie) pairs: was the movie watched (rated), and which rating did it get."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor

from data_modules.archive import extract_zip
from data_modules.base import TensorDataModule
from data_modules.cache import cached, locked
from data_modules.download import fetch
from data_modules.sampling import draw_distinct, stratified_split, unique
from mtl.types import Batch, Categorical, DataSpec, InputError, TaskSpec, require

logger = logging.getLogger(__name__)

FORMAT = 1  # of the cache; count up when its content changes
STARS = 5


@dataclass(frozen=True)
class Variant:
    """Say where the ratings of one MovieLens release lie, and what its README promises of them."""

    folder: str
    ratings: str
    separator: str
    md5: str  # of the archive {folder}.zip
    users: int  # the largest id, as for movies
    movies: int
    rows: int


VARIANTS = {
    "1m": Variant("ml-1m", "ratings.dat", "::", "c4d9eecfca2ab87c1945afe126590906", 6040, 3952, 1_000_209),
    "100k": Variant("ml-100k", "u.data", "\t", "0e33842e24a9c977be4e0107933c0723", 943, 1682, 100_000),
}
NEGATIVES = ("uniform", "per_user")


class MovieLensDataModule(TensorDataModule):
    """Serve the ratings and as many unwatched pairs.

    Tasks: ``watch`` (binary, weight ``alpha``) and ``rating`` (regression on the 1-5 scale, weight 1 - ``alpha``,
    NaN on unwatched pairs). Inputs: ``user`` and ``item``, int64 ids from 0. ``negatives`` draws the unwatched
    pairs among the users and movies that occur: ``uniform`` over all such pairs, or ``per_user`` as many for each
    user as that user rated (at most what the user has not watched). ``split`` holds for each rating value and for
    the unwatched pairs. Both draws depend on ``seed`` alone.
    """

    def __init__(
        self,
        data_dir: str,
        variant: str = "1m",
        alpha: float = 0.9,
        negatives: str = "uniform",
        split: Sequence[float] = (0.8, 0.1, 0.1),
        download: bool = True,
        base_url: str = "https://files.grouplens.org/datasets/movielens",
        **common: Any,
    ) -> None:
        super().__init__(**common)
        require(bool(data_dir), f"data.data_dir={data_dir!r}: must name a folder")
        require(variant in tuple(VARIANTS), f"data.variant={variant}: must be one of {', '.join(VARIANTS)}")
        require(negatives in NEGATIVES, f"data.negatives={negatives}: must be one of {', '.join(NEGATIVES)}")
        require(_is_share(alpha), f"data.alpha={alpha}: must lie in [0, 1]")
        shares = list(split) if hasattr(split, "__iter__") else []
        fits = len(shares) == 3 and all(_is_share(share) and share > 0 for share in shares)
        require(
            fits and math.isclose(sum(shares), 1.0),
            f"data.split={split}: must be three positive shares (train, val, test) that sum to 1",
        )
        require(0 <= self.seed < 2**63, f"data.seed={self.seed}: must lie in [0, 2**63)")
        self.variant = VARIANTS[variant]
        self.data_dir = Path(data_dir).expanduser()
        self.folder = self.data_dir / self.variant.folder
        self.ratings_file = self.folder / self.variant.ratings
        self.alpha, self.negatives, self.shares = float(alpha), negatives, [float(s) for s in shares]
        self.download, self.base_url = download, base_url.rstrip("/")

    def prepare_data(self) -> None:
        """Fetch, unpack and parse what is not there yet; safe to run in several processes and to kill."""
        if not self.ratings_file.exists():
            archive = self.data_dir / f"{self.variant.folder}.zip"
            with locked(self.data_dir / f".{archive.name}.lock", f"fetching {archive}"):
                if not self.ratings_file.exists():
                    self._fetch(archive)
        self._read_ratings()

    def _fetch(self, archive: Path) -> None:
        url = f"{self.base_url}/{archive.name}"
        by_hand = f"get {url} elsewhere and put it at {archive}, or unzip it so that {self.ratings_file} exists"
        if self.download:
            fetch(url, archive, md5=self.variant.md5, by_hand=by_hand)
        elif not archive.exists():
            raise InputError(f"{self.ratings_file} is missing and data.download=false: set it to true, or {by_hand}")
        extract_zip(archive, self.data_dir)
        require(self.ratings_file.exists(), f"{archive} holds no {self.variant.folder}/{self.variant.ratings}")

    def _read_ratings(self) -> dict[str, Tensor]:
        """Return ``user``, ``item`` (int64, from 0) and ``rating`` (float32), each ``[ratings]``."""
        try:
            stat = self.ratings_file.stat()
        except OSError as error:
            raise InputError(f"cannot read {self.ratings_file}: {error.strerror}; prepare_data() fetches it") from error
        key = (FORMAT, stat.st_size, stat.st_mtime_ns)  # a repaired file is read again
        path = self.data_dir / "cache" / f"movielens-{self.variant.folder.removeprefix('ml-')}.pt"
        return cached(path, lambda: read_ratings(self.ratings_file, self.variant), key)

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        """Return the description and the splits; every row is in exactly one of them."""
        start = time.perf_counter()
        ratings = self._read_ratings()
        users, user = unique(ratings["user"])
        items, item = unique(ratings["item"])
        generator = torch.Generator().manual_seed(self.seed)
        watched = (user * len(items) + item).sort().values
        free = self._draw_unwatched(watched, len(users), len(items), generator)
        rows = Batch(
            {
                "user": torch.cat([ratings["user"], users[free // len(items)]]),
                "item": torch.cat([ratings["item"], items[free % len(items)]]),
            },
            {
                "watch": torch.cat([torch.ones(len(watched)), torch.zeros(len(free))]),
                "rating": torch.cat([ratings["rating"], torch.full((len(free),), torch.nan)]),
            },
        )
        stratum = rows.targets["rating"].nan_to_num(nan=0.0).long()
        parts = stratified_split(stratum, self.shares, generator)
        splits = {name: rows.select(part) for name, part in zip(("train", "val", "test"), parts, strict=True)}
        for name, batch in splits.items():
            require(len(batch) > 0, f"{self.ratings_file}: too few ratings for the {name} share of data.split")
        spec = DataSpec(
            {"user": Categorical(int(users[-1]) + 1), "item": Categorical(int(items[-1]) + 1)},
            [
                TaskSpec("watch", "binary", weight=self.alpha),
                TaskSpec("rating", "regression", weight=1.0 - self.alpha),
            ],
        )
        counts = ", ".join(f"{len(batch)} {name}" for name, batch in splits.items())
        logger.info("%s: %s rows in %.1f s", self.variant.folder, counts, time.perf_counter() - start)
        return spec, splits

    def _draw_unwatched(self, watched: Tensor, users: int, items: int, generator: torch.Generator) -> Tensor:
        """Return distinct codes user * items + item that are not in the sorted codes ``watched [ratings]``."""
        if self.negatives == "uniform":
            counts, sizes = torch.tensor([len(watched)]), torch.tensor([users * items - len(watched)])
            require(
                bool(counts <= sizes),
                f"data.negatives=uniform: needs {len(watched)} unwatched pairs, one per rating, and the {users} users "
                f"x {items} movies of {self.ratings_file} leave {int(sizes)}; use data.negatives=per_user",
            )
        else:
            rated = torch.bincount(watched // items, minlength=users)
            sizes = items - rated
            counts = torch.minimum(rated, sizes)
            require(bool(counts.any()), f"{self.ratings_file}: every user has rated every movie, none is unwatched")
        rank = draw_distinct(sizes, counts, generator)
        # the free code of rank r is r plus the number of watched codes below it
        below = watched - torch.arange(len(watched))
        return rank + torch.searchsorted(below, rank, right=True)


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1


def read_ratings(file: Path, variant: Variant) -> dict[str, Tensor]:
    """Parse a ratings file; raise ``InputError`` that names the first damaged or repeated row."""
    try:
        text = file.read_bytes().decode("latin-1").rstrip("\r\n")
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    repair = f"Repair the file, or delete the folder {file.parent} to have it fetched again"
    require(bool(text), f"{file} is empty. {repair}")
    frame = pl.DataFrame({"line": pl.Series([text]).str.split("\n").explode()})
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
            f"{file}, line {damaged[0] + 1}: {_quote(frame['line'][damaged[0]])} is no rating; {len(damaged)} of "
            f"{len(frame)} rows are damaged. Expected {shown}, whole numbers, with user in 1..{variant.users}, "
            f"movie in 1..{variant.movies}, rating in 1..{STARS}. {repair}"
        )
    repeated = frame.select(pl.struct("user", "item").is_first_distinct().not_().arg_true()).to_series()
    if len(repeated):
        raise InputError(
            f"{file}, line {repeated[0] + 1}: {_quote(frame['line'][repeated[0]])} rates a movie that this user has "
            f"rated on a line before; {len(repeated)} of {len(frame)} rows are repeated. {repair}"
        )
    if len(frame) != variant.rows:
        logger.warning("%s holds %d ratings, the published file %d", file, len(frame), variant.rows)
    user, item, rating = (torch.from_numpy(frame[name].to_numpy(writable=True)) for name in columns.values())
    return {"user": user - 1, "item": item - 1, "rating": rating.float()}


def _quote(line: str, limit: int = 60) -> str:
    return repr(line if len(line) <= limit else line[:limit] + "...")
