"""Book-Crossing as two tasks on (user, book) pairs: was the book read, and how was it rated?"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor

from mtl.checks import require
from mtl.options import Address, FilePath, Fraction, LargeCount, validated

from .files.reading import quote, read_lines, repair
from .interactions import InteractionsDataModule, to_tensors
from .tables.options import Fractions

logger = logging.getLogger(__name__)

PUBLISHED_ROWS = 1_149_780  # number of rows of the published file
MAX_MALFORMED_FRACTION = 0.001  # the largest share of malformed rows
HEADER = '"User-ID";"ISBN";"Book-Rating"'
# a quote inside an ISBN is escaped by a backslash, as in the other files of the release
RECORD = r'^"([0-9]{1,9})";"((?:[^"\\]|\\.)*)";"(10|[0-9])"$'


class BooksDataModule(InteractionsDataModule):
    """Serve the records of Book-Crossing (Ziegler et al. 2005) and as many unread pairs.

    Tasks: ``read`` (binary, weight ``alpha``) and ``rating`` (regression on the 1-10 scale, weight 1 - ``alpha``).
    A record with rating 0 only says that the book was read: its rating is NaN, like that of unread pairs.
    Inputs: ``user`` and ``book``, int64 ids from 0, sorted by user number and by ISBN; ISBNs are not normalized.
    Users and books with fewer than ``min_records`` records are dropped repeatedly until all have enough. If a pair has
    several records, the last one with a rating counts, or else the last one. Malformed rows, at most one in
    a thousand, are skipped. The archive has no published checksum and comes over plain HTTP, so it is
    fetched only if ``unverified``; every row is checked.
    """

    task, input, item = "read", "book", "book"

    @validated
    def __init__(
        self,
        data_dir: FilePath,
        min_records: LargeCount = 5,
        alpha: Fraction = 0.5,
        split: Fractions = (0.8, 0.1, 0.1),
        download: bool = True,
        unverified: bool = False,
        base_url: Address = "http://www2.informatik.uni-freiburg.de/~cziegler/BX",
        **common: Any,
    ) -> None:
        super().__init__(data_dir, alpha, split, download, base_url, **common)
        self.min_records, self.unverified = min_records, unverified
        self.folder = self.data_dir / "bookcrossing"
        self.source = self.folder / "BX-Book-Ratings.csv"
        self._names: tuple[list[str], list[str]] = [], []

    def fetch_files(self) -> None:
        self.fetch_archive(self.source, self.folder / "BX-CSV-Dump.zip", None, self.unverified)

    def parse(self) -> dict[str, Tensor]:
        return read_records(self.source)

    def records(self) -> dict[str, Tensor]:
        records = self.parsed()
        total = len(records["user"])
        kept = drop_rare_ids(records["user"], records["item"], self.min_records)
        require(
            len(kept) > 0,
            f"data.min_records={self.min_records}: none of the {total} records of {self.source} is left if every user "
            f"and every book must have {self.min_records}; lower data.min_records",
        )
        users, user = torch.unique(records["user"][kept], return_inverse=True)
        books, item = torch.unique(records["item"][kept], return_inverse=True)
        logger.info("%d of %d records kept: %d users, %d books", len(kept), total, len(users), len(books))
        isbns = bytes(records["isbns"].tolist()).decode().split("\n")
        self._names = [str(n) for n in records["users"][users].tolist()], [isbns[n] for n in books.tolist()]
        return {"user": user, "item": item, "rating": records["rating"][kept]}

    def names(self) -> tuple[list[str], list[str]]:
        return self._names


def drop_rare_ids(user: Tensor, item: Tensor, min_records: int) -> Tensor:
    """Return the indices of the records that remain after repeatedly dropping users and items with too few records.

    ``user [R]`` and ``item [R]`` are ids; each remaining user and item has at least ``min_records`` records.
    """
    kept = torch.arange(len(user))
    while True:
        users, books = user[kept], item[kept]
        has_enough = (torch.bincount(users)[users] >= min_records) & (torch.bincount(books)[books] >= min_records)
        if bool(has_enough.all()):
            return kept
        kept = kept[has_enough]


def read_records(file: Path) -> dict[str, Tensor]:
    """Parse the file to ``user``, ``item`` (ranks of user and ISBN) and ``rating``, each ``[R]``, one row per pair.

    ``users`` are the numbers of the users by rank, ``isbns`` the UTF-8 bytes of the ISBNs by rank, one per line. Raises
    InputError if more than a thousandth of the rows is malformed.
    """
    lines = read_lines(file)
    fields = pl.col("line").str.extract_groups(RECORD).struct
    lines = lines[1:].with_columns(
        fields.field("1").cast(pl.Int64).alias("user"),
        fields.field("2").alias("isbn"),
        fields.field("3").cast(pl.Float32).alias("rating"),
    )
    if len(lines) != PUBLISHED_ROWS:
        logger.warning("%s has %d records, the published file %d", file, len(lines), PUBLISHED_ROWS)
    is_valid = (pl.col("user").is_not_null() & (pl.col("isbn").str.strip_chars() != "")).fill_null(False)
    malformed = lines.filter(~is_valid)
    if len(malformed):
        example = f"{file}, line {malformed['number'][0]}: {quote(malformed['line'][0])}"
        message = f"{example} is damaged, like {len(malformed)} of {len(lines)} lines"
        require(len(malformed) <= MAX_MALFORMED_FRACTION * len(lines), f"{message}. Expected {HEADER}. {repair(file)}")
        logger.warning("%s; they are skipped", message)
    lines = lines.filter(is_valid)
    require(len(lines) > 0, f"{file} contains no record")
    users, isbns = (lines[name].unique().sort() for name in ("user", "isbn"))
    lines = lines.with_columns(
        item=pl.col("isbn").rank("dense").cast(pl.Int64) - 1, user=pl.col("user").rank("dense").cast(pl.Int64) - 1
    )
    ordered = lines.sort("user", "item", pl.col("rating") > 0, "number")
    pairs = ordered.unique(["user", "item"], keep="last", maintain_order=True)
    if len(pairs) < len(lines):
        logger.warning("%s: %d records repeat a pair; ratings take precedence", file, len(lines) - len(pairs))
    tensors = to_tensors(pairs, "user", "item", "rating")
    return tensors | {
        "rating": tensors["rating"].masked_fill(tensors["rating"] == 0, torch.nan),
        "users": torch.from_numpy(users.to_numpy(writable=True)),
        "isbns": torch.frombuffer(bytearray("\n".join(isbns).encode()), dtype=torch.uint8).clone(),
    }
