"""Pairs of a user and an item as two tasks: has the user seen (rated, read) the item, and which rating did it get."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import polars as pl
import torch
from torch import Tensor

from data_modules.base import TensorDataModule
from data_modules.files.archive import extract_zip
from data_modules.files.cache import locked
from data_modules.files.download import fetch
from data_modules.sampling import draw_distinct, unique
from data_modules.splits import SPLITS, check_shares, is_share, stratified_split
from mtl.types import Batch, Categorical, DataSpec, InputError, TaskSpec, require

logger = logging.getLogger(__name__)

NEGATIVES = ("uniform", "per_user")


@dataclass(frozen=True)
class Words:
    """Name the binary task and the item's input, and say how messages speak of what a file holds."""

    task: str
    input: str
    item: str
    record: str  # one row of the file
    seen: str  # what a user has done with an item of the file
    unseen: str


class InteractionsDataModule(TensorDataModule):
    """Base of data sets of (user, item) pairs.

    A subclass sets ``words``, ``folder`` (of its files) and ``source`` (what messages name), and implements
    ``records()``; ``load`` adds as many unseen pairs. ``alpha`` is the weight of the binary task, the regression
    ``rating`` has 1 - ``alpha``. ``negatives`` draws the unseen pairs among the users and items that occur:
    ``uniform`` over all such pairs, or ``per_user`` as many for each user as that user has records (at most what the
    user has not seen). ``split`` holds for each rating value, for records without one and for unseen pairs. Both
    draws depend on ``seed`` alone.
    """

    words: ClassVar[Words]
    folder: Path
    source: Path

    def __init__(
        self,
        data_dir: str,
        alpha: float,
        split: Sequence[float],
        download: bool,
        base_url: str,
        negatives: str = "uniform",
        **common: Any,
    ) -> None:
        super().__init__(**common)
        require(bool(data_dir), f"data.data_dir={data_dir!r}: must name a folder")
        require(negatives in NEGATIVES, f"data.negatives={negatives}: must be one of {', '.join(NEGATIVES)}")
        require(is_share(alpha), f"data.alpha={alpha}: must lie in [0, 1]")
        shares = check_shares(split)
        require(0 <= self.seed < 2**63, f"data.seed={self.seed}: must lie in [0, 2**63)")
        self.data_dir = Path(data_dir).expanduser()
        self.alpha, self.negatives, self.shares = float(alpha), negatives, shares
        self.download, self.base_url = download, base_url.rstrip("/")

    def obtain(self, file: Path, archive: Path, **checksums: str) -> None:
        """Have ``file``: fetch ``archive`` and unpack it beside itself; safe in several processes and to kill."""
        if file.exists():
            return
        with locked(archive.with_name(f".{archive.name}.lock"), f"fetching {archive}"):
            if file.exists():
                return
            url = f"{self.base_url}/{archive.name}"
            by_hand = f"get {url} elsewhere and put it at {archive}, or unzip it so that {file} exists"
            if self.download:
                fetch(url, archive, by_hand=by_hand, **checksums)
            elif not archive.exists():
                raise InputError(f"{file} is missing and data.download=false: set it to true, or {by_hand}")
            extract_zip(archive, archive.parent)
            require(file.exists(), f"{archive} holds no {file.relative_to(archive.parent)}")

    def records(self) -> dict[str, Tensor]:
        """Return ``user``, ``item`` (int64 from 0) and ``rating`` (float32, NaN where there is none), each ``[R]``."""
        raise NotImplementedError

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        """Return the description and the splits; every row is in exactly one of them."""
        start = time.perf_counter()
        records = self.records()
        users, user = unique(records["user"])
        items, item = unique(records["item"])
        generator = torch.Generator().manual_seed(self.seed)
        seen = (user * len(items) + item).sort().values
        free = self._draw_unseen(seen, len(users), len(items), generator)
        rows = Batch(
            {
                "user": torch.cat([records["user"], users[free // len(items)]]),
                self.words.input: torch.cat([records["item"], items[free % len(items)]]),
            },
            {
                self.words.task: torch.cat([torch.ones(len(seen)), torch.zeros(len(free))]),
                "rating": torch.cat([records["rating"], torch.full((len(free),), torch.nan)]),
            },
        )
        stratum = rows.targets["rating"].nan_to_num(nan=0.0).long()
        silent = (rows.targets[self.words.task] == 1) & rows.targets["rating"].isnan()
        stratum[silent] = stratum.max() + 1
        splits = self.divide(rows, stratum, generator, start)
        return self.describe(int(users[-1]) + 1, int(items[-1]) + 1), splits

    def describe(self, users: int, items: int) -> DataSpec:
        """Return the description of ids below ``users`` and ``items``."""
        return DataSpec(
            {"user": Categorical(users), self.words.input: Categorical(items)},
            [
                TaskSpec(self.words.task, "binary", weight=self.alpha),
                TaskSpec("rating", "regression", weight=1.0 - self.alpha),
            ],
        )

    def divide(self, rows: Batch, stratum: Tensor, generator: torch.Generator, start: float) -> dict[str, Batch]:
        """Split ``rows`` so that each value of ``stratum [rows]`` is split alike; ``start`` is when loading began."""
        parts = stratified_split(stratum, self.shares, generator)
        splits = {name: rows.select(part) for name, part in zip(SPLITS, parts, strict=True)}
        for name, batch in splits.items():
            require(len(batch) > 0, f"{self.source}: too few {self.words.record}s for the {name} share of data.split")
        counts = ", ".join(f"{len(batch)} {name}" for name, batch in splits.items())
        logger.info("%s: %s rows in %.1f s", self.folder.name, counts, time.perf_counter() - start)
        return splits

    def _draw_unseen(self, seen: Tensor, users: int, items: int, generator: torch.Generator) -> Tensor:
        """Return distinct codes user * items + item that are not in the sorted codes ``seen [R]``."""
        words = self.words
        if self.negatives == "uniform":
            counts, sizes = torch.tensor([len(seen)]), torch.tensor([users * items - len(seen)])
            require(
                bool(counts <= sizes),
                f"data.negatives=uniform: needs {len(seen)} {words.unseen} pairs, one per {words.record}, and the "
                f"{users} users x {items} {words.item}s of {self.source} leave {int(sizes)}; use "
                "data.negatives=per_user",
            )
        else:
            own = torch.bincount(seen // items, minlength=users)
            sizes = items - own
            counts = torch.minimum(own, sizes)
            require(
                bool(counts.any()),
                f"{self.source}: every user has {words.seen} every {words.item}, none is {words.unseen}",
            )
        rank = draw_distinct(sizes, counts, generator)
        # the free code of rank r is r plus the number of seen codes below it
        below = seen - torch.arange(len(seen))
        return rank + torch.searchsorted(below, rank, right=True)


def versions(*files: Path) -> list[int]:
    """Return size and time of each file, for the key of a cache: a repaired file is read again."""
    try:
        stats = [file.stat() for file in files]
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}; prepare_data() fetches it") from error
    return [number for stat in stats for number in (stat.st_size, stat.st_mtime_ns)]


def repair(file: Path) -> str:
    return f"Repair the file, or delete the folder {file.parent} to have it fetched again"


def read_lines(file: Path) -> pl.DataFrame:
    """Return the column ``line`` of a latin-1 file, without the empty lines at its end."""
    try:
        text = file.read_bytes().decode("latin-1").rstrip("\r\n")
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    require(bool(text), f"{file} is empty. {repair(file)}")
    return pl.DataFrame({"line": pl.Series([text]).str.split("\n").explode()})


def quote(line: str, limit: int = 60) -> str:
    return repr(line if len(line) <= limit else line[:limit] + "...")
