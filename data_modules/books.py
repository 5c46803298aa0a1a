"""Book-Crossing as two tasks on (user, book) pairs: was the book read, and how was it rated?"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import polars as pl
import torch
from torch import Tensor

from mtl.checks import InputError, require

from .files.cache import cached
from .files.reading import quote
from .interactions import InteractionsDataModule, Words, read_lines, repair, versions
from .options import flag, number, whole
from .sampling import unique

logger = logging.getLogger(__name__)

FORMAT = 2  # of the cache; increase it when the content changes
ROWS = 1_149_780  # of the published file
HEADER = '"User-ID";"ISBN";"Book-Rating"'
# a quote inside an ISBN is escaped by a backslash, as in the other files of the release
RECORD = r'^"([0-9]{1,9})";"((?:[^"\\]|\\.)*)";"(10|[0-9])"\r?$'


class BooksDataModule(InteractionsDataModule):
    """Serve the records of Book-Crossing (Ziegler et al. 2005) and as many unread pairs.

    Tasks: ``read`` (binary, weight ``alpha``) and ``rating`` (regression on the 1-10 scale, weight 1 - ``alpha``).
    A record with rating 0 only says that the book was read: its rating is NaN, like that of unread pairs.
    Inputs: ``user`` and ``book``, int64 ids from 0, sorted by user number and by ISBN; ISBNs are not normalised.
    Users and books with fewer than ``min_records`` records are dropped repeatedly until none is left. If a pair has
    several records, the last one with a rating counts, or else the last one. Broken rows are skipped as long as their
    share is at most ``max_broken``. The archive has no published checksum and comes over plain HTTP, so it is fetched
    only if ``unverified``; every row is checked.
    """

    words = Words("read", "book", item="book", record="record", seen="read", unseen="unread")

    def __init__(
        self,
        data_dir: str,
        min_records: int = 5,
        max_broken: float = 0.001,
        alpha: float = 0.5,
        negatives: Literal["uniform", "per_user"] = "uniform",
        split: Sequence[float] = (0.8, 0.1, 0.1),
        download: bool = True,
        unverified: bool = False,
        base_url: str = "http://www2.informatik.uni-freiburg.de/~cziegler/BX",
        **common: Any,
    ) -> None:
        super().__init__(data_dir, alpha, split, download, base_url, negatives, **common)
        self.min_records, self.max_broken = whole("min_records", min_records, 1), number("max_broken", max_broken)
        self.unverified = flag("unverified", unverified)
        self.folder = self.data_dir / "bookcrossing"
        self.source = self.folder / "BX-Book-Ratings.csv"

    def prepare_data(self) -> None:
        """Fetch, unpack and parse what is missing. Safe to kill, and to run in several processes at once."""
        archive = self.folder / "BX-CSV-Dump.zip"
        if self.download and not self.unverified:
            require(
                self.source.exists() or archive.exists(),
                f"{self.source} is missing. It has no published checksum, so that a download cannot be verified: "
                f"get {self.base_url}/{archive.name} in a way that you trust and put it at {archive}, or set "
                "data.unverified=true to download it all the same",
            )
        self.obtain(self.source, archive)
        self._read()

    def _read(self) -> dict[str, Tensor]:
        path, key = self.data_dir / "cache" / "books.pt", (FORMAT, self.max_broken, *versions(self.source))
        return cached(path, lambda: read_records(self.source, self.max_broken), key)

    def records(self) -> dict[str, Tensor]:
        """Return ``user``, ``item`` (int64 ids from 0) and ``rating`` (float32, NaN if missing), each ``[R]``."""
        records = self._read()
        total = len(records["user"])
        kept = core(records["user"], records["item"], self.min_records)
        require(
            len(kept) > 0,
            f"data.min_records={self.min_records}: none of the {total} records of {self.source} is left if every user "
            f"and every book must have {self.min_records}; lower data.min_records",
        )
        users, user = unique(records["user"][kept])
        books, item = unique(records["item"][kept])
        logger.info("%d of %d records kept: %d users, %d books", len(kept), total, len(users), len(books))
        isbns = bytes(records["isbns"].tolist()).decode().split("\n")
        self._names = [str(n) for n in records["users"][users].tolist()], [isbns[n] for n in books.tolist()]
        return {"user": user, "item": item, "rating": records["rating"][kept]}

    def names(self) -> tuple[list[str], list[str]]:
        """Return the numbers of the users and the ISBNs of the books, by id."""
        return self._names


def core(user: Tensor, item: Tensor, least: int) -> Tensor:
    """Return the indices of the records left after dropping users and items with fewer than ``least``, repeatedly."""
    kept = torch.arange(len(user))
    while True:
        own, others = user[kept], item[kept]
        enough = (torch.bincount(own)[own] >= least) & (torch.bincount(others)[others] >= least)
        if bool(enough.all()):
            return kept
        kept = kept[enough]


def read_records(file: Path, max_broken: float) -> dict[str, Tensor]:
    """Parse the file to ``user``, ``item`` (ranks of user and ISBN) and ``rating``, each ``[R]``, one row per pair.

    ``users`` are the numbers of the users by rank, ``isbns`` the UTF-8 bytes of the ISBNs by rank, a line each. Raises
    InputError if the share of broken rows exceeds ``max_broken``.
    """
    frame = read_lines(file)
    header = frame["line"][0].rstrip("\r")
    require(header == HEADER, f"{file}, line 1: {quote(header)} is not the header {HEADER}. {repair(file)}")
    groups = pl.col("line").str.extract_groups(RECORD).struct
    frame = frame.with_row_index("number", 1)[1:].with_columns(
        user=groups.field("1").cast(pl.Int64), isbn=groups.field("2"), rating=groups.field("3").cast(pl.Int64)
    )
    require(len(frame) > 0, f"{file} contains no record. {repair(file)}")
    if len(frame) != ROWS:
        logger.warning("%s has %d records, the published file %d", file, len(frame), ROWS)

    good = (pl.col("user").is_not_null() & (pl.col("isbn").str.strip_chars() != "")).fill_null(False)
    broken = frame.filter(good.not_())
    if len(broken):
        first = f"line {broken['number'][0]}: {quote(broken['line'][0].rstrip())}"
        if len(broken) / len(frame) > max_broken:
            raise InputError(
                f"{file}, {first} is not a record; {len(broken)} of {len(frame)} rows are broken, more than the share "
                f"data.max_broken={max_broken:g}. Expected {HEADER}: a whole number, an ISBN and a whole number in "
                f"0..10, each in quotes. {repair(file)}, or raise data.max_broken to skip such rows"
            )
        logger.warning("%s: skipped %d broken rows, the first is %s", file, len(broken), first)

    frame = frame.filter(good)
    users, isbns = (frame[name].unique().sort() for name in ("user", "isbn"))
    frame = frame.with_columns(
        item=pl.col("isbn").rank("dense").cast(pl.Int64) - 1, user=pl.col("user").rank("dense").cast(pl.Int64) - 1
    )
    pairs = frame.sort("user", "item", pl.col("rating") > 0, "number").unique(
        ["user", "item"], keep="last", maintain_order=True
    )
    if len(pairs) < len(frame):
        logger.warning(
            "%s: %d records repeat a pair; ratings take precedence",
            file,
            len(frame) - len(pairs),
        )
    user, item, rating = (torch.from_numpy(pairs[name].to_numpy(writable=True)) for name in ("user", "item", "rating"))
    return {
        "user": user,
        "item": item,
        "rating": rating.float().masked_fill(rating == 0, torch.nan),
        "users": torch.from_numpy(users.to_numpy(writable=True)),
        "isbns": torch.frombuffer(bytearray("\n".join(isbns).encode()), dtype=torch.uint8).clone(),
    }
