"""Base of data sets of (user, item) pairs with two tasks: was the item seen (rated, read), and how was it rated?"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import polars as pl
import torch
from torch import Tensor

from mtl.checks import InputError, require
from mtl.types import RANKING, Batch, Categorical, DataSpec, TaskKind, TaskSpec, check_metrics, metric_family

from .base import TensorDataModule
from .files.archive import extract_zip
from .files.cache import locked
from .files.download import fetch
from .files.reading import read_bytes
from .options import address, choice, flag, names, number, path, refused, whole
from .sampling import draw_distinct, unique
from .splits import SPLITS, check_shares, stratified_split
from .tables.pairs import Ids, PairEncoder

logger = logging.getLogger(__name__)

NEGATIVES = ("uniform", "per_user")
CLASSES = ("no", "yes")  # has the user seen the item?


@dataclass(frozen=True)
class Words:
    """Names of the binary task and of the item input, and the nouns and verbs that messages use."""

    task: str
    input: str
    item: str
    record: str  # a row of the file
    seen: str  # what a user has done with an item: rated, read
    unseen: str


class InteractionsDataModule(TensorDataModule):
    """Base class of data sets of (user, item) pairs.

    A subclass sets ``words``, ``folder`` (of its files) and ``source`` (the path that messages name), and implements
    ``records()``. ``load`` adds as many unseen pairs as there are records. The binary task has weight ``alpha``, the
    regression task ``rating`` 1 - ``alpha``. Unseen pairs are drawn among the users and items that occur:
    ``negatives="uniform"`` draws from all such pairs, ``"per_user"`` draws as many per user as the user has records (or
    all unseen pairs of the user, if those are fewer). ``split`` applies to each stratum: each rating value, records
    without a rating, unseen pairs. Both draws depend on ``seed`` only.

    ``metrics`` names the metrics of a task, the main one first; none: those that fit its kind. ``ndcg@K``,
    ``hit_rate@K`` and ``mrr`` of the binary task rank the rows that a user has in the split: the items that it has seen
    among the unseen ones that were drawn for it, see ``Ranking``. Users without a seen item there are left out.
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
        negatives: Literal["uniform", "per_user"] = "uniform",
        metrics: Mapping[str, Sequence[str]] | None = None,
        max_rows: int | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.data_dir = path("data_dir", data_dir, "a folder")
        self.alpha, self.shares = number("alpha", alpha), check_shares(split)
        self.negatives = choice("negatives", negatives, NEGATIVES)
        self.metrics = self._checked({} if metrics is None else metrics)
        self.max_rows = None if max_rows is None else whole("max_rows", max_rows, low=1)
        self.download, self.base_url = flag("download", download), address("base_url", base_url)

    def _checked(self, metrics: Any) -> dict[str, tuple[str, ...]]:
        """Return the metrics of each task; raise InputError if they are not of this kind, or of no task."""
        kinds: dict[str, TaskKind] = {self.words.task: "binary", "rating": "regression"}
        if not isinstance(metrics, Mapping) or not metrics.keys() <= kinds.keys():
            raise refused("metrics", metrics, f"lists of metrics for {' and '.join(kinds)}")
        found = {task: tuple(names(f"metrics.{task}", given or [], "[accuracy,f1]")) for task, given in metrics.items()}
        for task, given in found.items():
            check_metrics(f"data.metrics.{task}", kinds[task], given)
        return dict.fromkeys(kinds, ()) | found

    def obtain(self, file: Path, archive: Path, **checksums: str) -> None:
        """Fetch ``archive`` and unpack it into its own folder, unless ``file`` exists; ``checksums`` go to ``fetch``.

        Safe to kill, and to run in several processes at once. Raises InputError.
        """
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
            require(file.exists(), f"{archive} contains no {file.relative_to(archive.parent)}")

    def records(self) -> dict[str, Tensor]:
        """Return ``user``, ``item`` (int64 ids from 0) and ``rating`` (float32, NaN if missing), each ``[R]``."""
        raise NotImplementedError

    def source_files(self) -> dict[str, Path]:
        """Return the file of the records, by its folder and name."""
        return {f"{self.folder.name}/{self.source.name}": self.source} if self.source.is_file() else {}

    def names(self) -> tuple[list[str] | None, list[str] | None]:
        """Return the names of users and items as the files have them, by id; None: their numbers, from 1."""
        return None, None

    def encoder_of(self, state: Mapping[str, Any]) -> PairEncoder:
        return PairEncoder.from_state(state)

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        """Return the DataSpec and the splits; each row is in exactly one split."""
        start = time.perf_counter()
        records = self.records()
        users, user = unique(records["user"])
        items, item = unique(records["item"])
        generator = torch.Generator().manual_seed(self.seed)
        seen = (user * len(items) + item).sort().values
        unseen = self._draw_unseen(seen, len(users), len(items), generator)
        rows = Batch(
            {
                "user": torch.cat([records["user"], users[unseen // len(items)]]),
                self.words.input: torch.cat([records["item"], items[unseen % len(items)]]),
            },
            {
                self.words.task: torch.cat([torch.ones(len(seen)), torch.zeros(len(unseen))]),
                "rating": torch.cat([records["rating"], torch.full((len(unseen),), torch.nan)]),
            },
        )
        # strata: 0 for unseen pairs, then the rating values, then seen pairs without a rating
        stratum = rows.targets["rating"].nan_to_num(nan=0.0).long()
        unrated = (rows.targets[self.words.task] == 1) & rows.targets["rating"].isnan()
        stratum[unrated] = stratum.max() + 1
        splits = self.divide(rows, stratum, generator, start)
        return self.describe(int(users[-1]) + 1, int(items[-1]) + 1), splits

    def describe(self, users: int, items: int) -> DataSpec:
        """Return the DataSpec for ids below ``users`` and ``items``, or that of a checkpoint if they fit it."""
        words, names = self.words, self.names()
        own = {"user": Ids("user", users, names[0]), words.item: Ids(words.input, items, names[1])}
        if isinstance(self.row_encoder, PairEncoder):
            for column, ids in self.row_encoder.ids.items():
                require(
                    own[column].size <= ids.size and own[column].names == ids.names,
                    f"{self.source}: it has other {column}s than the {ids.size} that the network was trained on; "
                    "mtl.load and mtl predict take pairs of those that it knows",
                )
            return self.spec
        self.row_encoder = PairEncoder(own)
        return DataSpec(
            {"user": Categorical(users), words.input: Categorical(items)},
            [
                TaskSpec(words.task, "binary", weight=self.alpha, metrics=self.metrics[words.task], classes=CLASSES),
                TaskSpec("rating", "regression", weight=1.0 - self.alpha, metrics=self.metrics["rating"]),
            ],
        )

    def divide(self, rows: Batch, stratum: Tensor, generator: torch.Generator, start: float) -> dict[str, Batch]:
        """Split ``rows``, or ``max_rows`` of them, stratified by ``stratum [N]``.

        ``start`` is the time at which loading began, for the log.
        """
        if self.max_rows is not None and self.max_rows < len(rows):
            kept = torch.randperm(len(rows), generator=generator)[: self.max_rows].sort().values
            rows, stratum = rows.select(kept), stratum[kept]
        parts = stratified_split(stratum, self.shares, generator)
        splits = {name: rows.select(part) for name, part in zip(SPLITS, parts, strict=True)}
        for name, batch in splits.items():
            require(len(batch) > 0, f"{self.source}: too few {self.words.record}s for the {name} share of data.split")
        if any(metric_family(name) in RANKING for name in self.metrics[self.words.task]):
            for name in ("val", "test"):
                splits[name].groups = splits[name].inputs["user"]
        counts = ", ".join(f"{len(batch)} {name}" for name, batch in splits.items())
        logger.info("%s: %s rows in %.1f s", self.folder.name, counts, time.perf_counter() - start)
        return splits

    def _draw_unseen(self, seen: Tensor, users: int, items: int, generator: torch.Generator) -> Tensor:
        """Draw distinct unseen pairs; ``seen [R]`` are the sorted seen ones. A pair is the code user * items + item."""
        words = self.words
        if self.negatives == "uniform":
            counts, sizes = torch.tensor([len(seen)]), torch.tensor([users * items - len(seen)])
            require(
                bool(counts <= sizes),
                f"data.negatives=uniform: needs {len(seen)} {words.unseen} pairs, one per {words.record}, but the "
                f"{users} users x {items} {words.item}s of {self.source} leave only {int(sizes)}; use "
                "data.negatives=per_user",
            )
        else:
            own = torch.bincount(seen // items, minlength=users)
            sizes = items - own
            counts = torch.minimum(own, sizes)
            require(
                bool(counts.any()),
                f"{self.source}: every user has {words.seen} every {words.item}, so no pair is {words.unseen}",
            )
        rank = draw_distinct(sizes, counts, generator)
        # The unseen code of rank r is r + (number of seen codes below it). seen[i] - i counts the unseen codes below
        # seen[i], so seen[i] lies below that code if and only if seen[i] - i <= r.
        unseen_below = seen - torch.arange(len(seen))
        return rank + torch.searchsorted(unseen_below, rank, right=True)


def versions(*files: Path) -> list[int]:
    """Return size and modification time of each file, for a cache key: a changed file is parsed again."""
    try:
        stats = [file.stat() for file in files]
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}; prepare_data() fetches it") from error
    return [number for stat in stats for number in (stat.st_size, stat.st_mtime_ns)]


def repair(file: Path) -> str:
    """Return the advice that ends a message about a damaged file."""
    return f"Repair the file, or delete the folder {file.parent} to have it fetched again"


def read_lines(file: Path) -> pl.DataFrame:
    """Return the lines of a latin-1 file as the column ``line``, without empty lines at the end."""
    text = read_bytes(file).decode("latin-1").rstrip("\r\n")
    require(bool(text), f"{file} is empty. {repair(file)}")
    return pl.DataFrame({"line": pl.Series([text]).str.split("\n").explode()})
