"""Jester as two tasks on all (user, joke) pairs: was the joke rated, and how?"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from mtl.checks import InputError, require
from mtl.types import Batch, DataSpec

from .files.cache import cached
from .files.reading import quote, read_bytes, read_gzip, regular_size
from .interactions import InteractionsDataModule, Words, repair, versions

logger = logging.getLogger(__name__)

FORMAT = 1  # of the cache; increase it when the content changes
JOKES = 100
HIGHEST = 10.0
NOT_RATED = 99.0
MAX_BYTES = 1_000_000_000  # of a file; the published ones have 8 MB
SUFFIXES = (".csv", ".csv.gz", ".xls")  # of a part that exists in several formats, the first one is read
EXPECTED = (
    f"Expected {1 + JOKES} columns without a header: how many jokes the user has rated, then {JOKES} ratings in "
    f"[-{HIGHEST:g}, {HIGHEST:g}] or {NOT_RATED:g} for none"
)


@dataclass(frozen=True)
class Part:
    """A published part of dataset 1: its archive and its number of users."""

    archive: str
    sha256: str
    users: int


# The authors publish no checksums; these are the ones that several public loaders use
PARTS = {
    "jester-data-1": Part(
        "jester_dataset_1_1.zip", "cb7841756ded125b15f3d95c9f8241224065e96354c132a46ae4214deeab7615", 24_983
    ),
    "jester-data-2": Part(
        "jester_dataset_1_2.zip", "4d312fd824d8c8cb2c9c952a7b1fb7c00d1f5fd3ece370f7285aa701d371748b", 23_500
    ),
    "jester-data-3": Part(
        "jester_dataset_1_3.zip", "7f548d3762d3506cf7cd37d8cb9e3adb67984a7da7aa2d2096d5e0b1b884758d", 24_938
    ),
}


class JesterDataModule(InteractionsDataModule):
    """Serve all pairs of Jester dataset 1 (Goldberg et al. 2001), 73,421 users x 100 jokes.

    Tasks: ``rated`` (binary, weight ``alpha``) and ``rating`` (regression in [-10, 10], weight 1 - ``alpha``, NaN if
    missing). Inputs: ``user`` and ``joke``, int64 ids from 0. The split is stratified by ``rated`` and depends on
    ``seed`` only. All files ``jester/jester-data-*`` with the suffix .csv, .csv.gz or .xls are read, sorted by name; of
    a part that exists with several suffixes, the first in this list is read. Missing published parts are fetched,
    unless there is a file that is not a published part. Archives are checked by sha256, and every row is checked; a
    part with an unexpected number of users gives a warning.
    """

    words = Words("rated", "joke", item="joke", record="pair", seen="rated", unseen="unrated")

    def __init__(
        self,
        data_dir: str,
        alpha: float = 0.5,
        split: Sequence[float] = (0.7, 0.15, 0.15),
        download: bool = True,
        base_url: str = "https://eigentaste.berkeley.edu/dataset",
        **common: Any,
    ) -> None:
        super().__init__(data_dir, alpha, split, download, base_url, **common)
        self.folder = self.source = self.data_dir / "jester"

    def prepare_data(self) -> None:
        """Fetch, unpack and parse what is missing. Safe to kill, and to run in several processes at once."""
        names = set(self.files())
        if names <= PARTS.keys():  # otherwise the user chose the files
            for name, part in PARTS.items():
                archive = self.folder / part.archive
                if name not in names and (self.download or archive.exists() or not names):
                    self.obtain(self.folder / f"{name}.xls", archive, sha256=part.sha256)
        self.ratings()

    def files(self) -> dict[str, Path]:
        """Return the file of each part, sorted by name."""
        found = {}
        for suffix in reversed(SUFFIXES):
            for path in self.folder.glob(f"jester-data-*{suffix}"):
                found[path.name.removesuffix(suffix)] = path
        return dict(sorted(found.items()))

    def source_files(self) -> dict[str, Path]:
        """Return the files of ratings, by their names."""
        return {file.name: file for file in self.files().values()}

    def ratings(self) -> Tensor:
        """Return the ratings ``[users, 100]`` (float32, NaN if missing). Raises InputError."""
        files = self.files()
        require(bool(files), f"{self.folder} contains no jester-data-* file; prepare_data() fetches them")
        key = (FORMAT, *(file.name for file in files.values()), *versions(*files.values()))

        def parse() -> dict[str, Tensor]:
            return {"ratings": torch.cat([read_part(file, PARTS.get(name)) for name, file in files.items()])}

        return cached(self.data_dir / "cache" / "jester.pt", parse, key)["ratings"]

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        """Return the DataSpec and the splits; each pair is in exactly one split."""
        start = time.perf_counter()
        ratings = self.ratings()
        users, jokes = ratings.shape
        rated = ratings.isnan().logical_not().flatten()
        rows = Batch(
            {
                "user": torch.arange(users).repeat_interleave(jokes),
                "joke": torch.arange(jokes).repeat(users),
            },
            {"rated": rated.float(), "rating": ratings.flatten()},
        )
        splits = self.divide(rows, rated.long(), torch.Generator().manual_seed(self.seed), start)
        return self.describe(users, jokes), splits


def read_part(file: Path, part: Part | None) -> Tensor:
    """Parse a file to ratings ``[users, 100]``; raise InputError, which names the first damaged row."""
    fields = _read_excel(file) if file.suffix == ".xls" else _read_csv(file)
    width = fields.list.len().to_numpy()
    _refuse(file, width != 1 + JOKES, lambda row: f": {width[row]} columns")
    texts = fields.list.explode().str.strip_chars()
    values = texts.cast(pl.Float64, strict=False).to_numpy().reshape(-1, 1 + JOKES)
    text = texts.fill_null("").to_numpy().reshape(-1, 1 + JOKES)

    def shown(wrong: np.ndarray, row: int) -> str:
        column = int(wrong[row].argmax())
        return f", column {column + 1}: {quote(text[row, column])}"

    odd = ~np.isfinite(values)
    _refuse(file, odd.any(1), lambda row: f"{shown(odd, row)} is not a number")
    rated = values != NOT_RATED
    rated[:, 0] = False
    outside = rated & (np.abs(values) > HIGHEST)
    _refuse(file, outside.any(1), lambda row: f"{shown(outside, row)} is not a rating")
    count = rated.sum(1)
    wrong = values[:, 0] != count
    _refuse(file, wrong, lambda row: f", column 1: {text[row, 0]} rated jokes, but the row has {count[row]} ratings")
    if part is not None and len(values) != part.users:
        logger.warning("%s has %d users, the published file %d", file, len(values), part.users)
    ratings = np.where(rated, values, np.nan)[:, 1:].astype(np.float32)
    return torch.from_numpy(ratings)


def _refuse(file: Path, damaged: np.ndarray, tell: Callable[[int], str]) -> None:
    """Raise InputError if any of ``damaged [rows]`` is True; ``tell(row)`` says what is wrong with the first one."""
    if damaged.any():
        row = int(damaged.argmax())
        raise InputError(
            f"{file}, row {row + 1}{tell(row)}; {int(damaged.sum())} of {len(damaged)} rows are damaged. "
            f"{EXPECTED}. {repair(file)}"
        )


def _read_csv(file: Path) -> pl.Series:
    """Return the fields of each line: a series of lists of strings."""
    raw = read_gzip(file, MAX_BYTES) if file.suffix == ".gz" else read_bytes(file, MAX_BYTES)
    text = raw.decode("latin-1").rstrip("\r\n")
    require(bool(text), f"{file} is empty. {repair(file)}")
    return pl.Series([text]).str.split("\n").explode().str.split(",")


def _read_excel(file: Path) -> pl.Series:
    """Return the cells of each row of the first sheet: a series of lists of strings."""
    regular_size(file)
    try:
        frame = pl.read_excel(
            file, has_header=False, drop_empty_rows=False, drop_empty_cols=False, read_options={"dtypes": "string"}
        )
    except ModuleNotFoundError as error:
        raise InputError(
            f"{file}: reading it needs the package fastexcel: pip install fastexcel, or save the sheet as "
            f"{file.with_suffix('.csv')}"
        ) from error
    except Exception as error:  # the reader's errors have no common base class
        why = str(error).partition("\n")[0]
        raise InputError(f"{file} is not a readable xls file ({why}). {repair(file)}") from error
    require(len(frame) > 0, f"{file} has no rows. {repair(file)}")
    return frame.select(pl.concat_list(pl.all()).alias("fields"))["fields"]
