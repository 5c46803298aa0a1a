"""Base of data sets of (user, item) pairs with two tasks: was the item seen (rated, read), and how was it rated?"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import polars as pl
import torch
from torch import Tensor

from mtl.checks import format_value, require
from mtl.options import Address, FilePath, Fraction, LargeCount, Names, validated
from mtl.types import RANKING, Batch, Categorical, DataSpec, TaskKind, TaskSpec, check_metrics, metric_family

from .base import TensorDataModule
from .files.cache import cached
from .files.download import fetch_archive
from .files.identity import stamp
from .splits import by_split, random_split, require_rows, sample_rows
from .tables.id_encoder import IdEncoder, KnownIds
from .tables.options import Fractions

logger = logging.getLogger(__name__)

CACHE_VERSION = 3  # of the cache; increase it when the content changes
CLASSES = ("no", "yes")  # has the user seen the item?


class InteractionsDataModule(TensorDataModule):
    """Base class of data sets of (user, item) pairs.

    A subclass names the binary ``task``, the ``input`` of its items and one ``item``, fetches its files
    (``fetch_files``) and reads them (``parse``). ``load`` adds as many unseen pairs as there are records. The binary
    task has weight ``alpha``, the regression task ``rating`` 1 - ``alpha``. Unseen pairs are drawn among the users and
    items that occur: ``negatives="uniform"`` draws from all such pairs, ``"per_user"`` draws as many per user as the
    user has records (or all unseen pairs of the user, if those are fewer). ``split`` applies to each stratum: each
    rating value, records without a rating, unseen pairs. Both draws depend on ``seed`` only.

    ``metrics`` names the metrics of a task, the main one first; by default they follow from its kind. ``ndcg@K``,
    ``hit_rate@K`` and ``mrr`` of the binary task rank each user's rows of the split, which are seen items and the
    unseen items drawn for the user; see ``mtl.training.metrics.ranking``. Users without a seen item there are left out.
    """

    encoder_kind = IdEncoder
    random_split = True
    task: ClassVar[str]
    input: ClassVar[str]
    item: ClassVar[str]
    folder: Path  # the folder of the files
    source: Path  # the file that messages name

    @validated
    def __init__(
        self,
        data_dir: FilePath,
        alpha: Fraction,
        split: Fractions,
        download: bool,
        base_url: Address,
        negatives: Literal["uniform", "per_user"] = "uniform",
        metrics: dict[str, Names | None] | None = None,
        max_rows: LargeCount | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.data_dir, self.download, self.base_url = data_dir, download, base_url
        self.alpha, self.fractions, self.negatives = alpha, by_split(split), negatives
        self.metrics, self.max_rows = self._checked(metrics or {}), max_rows

    def _checked(self, metrics: Mapping[str, Sequence[str] | None]) -> dict[str, tuple[str, ...]]:
        """Return the metrics of each task; raise InputError for an unknown task or a metric of another kind."""
        kinds: dict[str, TaskKind] = {self.task: "binary", "rating": "regression"}
        wrong = f"data.metrics={format_value(metrics)}: must be lists of metrics for {' and '.join(kinds)}"
        require(metrics.keys() <= kinds.keys(), wrong)
        metrics_by_task = dict.fromkeys(kinds, ()) | {task: tuple(names or ()) for task, names in metrics.items()}
        for task, names in metrics_by_task.items():
            check_metrics(f"data.metrics.{task}", kinds[task], names)
        return metrics_by_task

    def prepare_data(self) -> None:
        self.fetch_files()
        self.parsed()

    def fetch_files(self) -> None:
        """Fetch and unpack what is missing."""
        raise NotImplementedError

    def fetch_archive(self, file: Path, archive: Path, known_hash: str | None, unverified: bool = False) -> None:
        """Fetch ``archive`` and unpack it into its own folder, unless ``file`` exists. Raises InputError."""
        fetch_archive(file, archive, self.base_url, known_hash, self.download, unverified)

    def parse(self) -> dict[str, Tensor]:
        """Return the content of the files; by default it is also the result of ``records()``."""
        raise NotImplementedError

    def parsed(self) -> dict[str, Tensor]:
        """Return the result of ``parse`` for these files, from the cache if possible."""
        files = self.source_files()
        require(bool(files), f"{self.source} is missing; prepare_data() fetches it")
        key: list[str | int] = [CACHE_VERSION, *files, *stamp(*files.values())]
        return cached(self.data_dir / "cache" / f"{self.folder.name}.pt", self.parse, key)

    def records(self) -> dict[str, Tensor]:
        """Return ``user``, ``item`` (int64 ids from 0) and ``rating`` (float32, NaN if missing), each ``[R]``."""
        return self.parsed()

    def source_files(self) -> dict[str, Path]:
        return {f"{self.folder.name}/{self.source.name}": self.source} if self.source.is_file() else {}

    def names(self) -> tuple[list[str] | None, list[str] | None]:
        """Return the names of users and items in the files, by id; None: the names are numbers from 1."""
        return None, None

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        start = time.perf_counter()
        generator = self.generator()
        rows, stratum, users, items = self.pairs(generator)
        splits = self.divide(rows, stratum, generator)
        counts = ", ".join(f"{len(batch)} {name}" for name, batch in splits.items())
        logger.info("%s: %s rows in %.1f s", self.folder.name, counts, time.perf_counter() - start)
        return self.describe(users, items), splits

    def pairs(self, generator: torch.Generator) -> tuple[Batch, Tensor, int, int]:
        """Return all rows, the stratum of each ``[N]``, and the numbers of ids of users and items."""
        records = self.records()
        users, user = torch.unique(records["user"], return_inverse=True)
        items, item = torch.unique(records["item"], return_inverse=True)
        seen = (user * len(items) + item).sort().values
        unseen = self._draw_unseen(seen, len(users), len(items), generator)
        rows = Batch(
            {
                "user": torch.cat([records["user"], users[unseen // len(items)]]),
                self.input: torch.cat([records["item"], items[unseen % len(items)]]),
            },
            {
                self.task: torch.cat([torch.ones(len(seen)), torch.zeros(len(unseen))]),
                "rating": torch.cat([records["rating"], torch.full((len(unseen),), torch.nan)]),
            },
        )
        # strata: 0 for unseen pairs, then the rating values, then seen pairs without a rating
        stratum = rows.targets["rating"].nan_to_num(nan=0.0).long()
        unrated = (rows.targets[self.task] == 1) & rows.targets["rating"].isnan()
        stratum[unrated] = stratum.max() + 1
        return rows, stratum, int(users[-1]) + 1, int(items[-1]) + 1

    def describe(self, users: int, items: int) -> DataSpec:
        """Return the DataSpec for ids below ``users`` and ``items``, or that of a checkpoint if they fit it."""
        names = self.names()
        ids_by_column = {"user": KnownIds("user", users, names[0]), self.item: KnownIds(self.input, items, names[1])}
        if isinstance(self.row_encoder, IdEncoder):
            for column, ids in self.row_encoder.ids.items():
                require(
                    ids_by_column[column].size <= ids.size and ids_by_column[column].names == ids.names,
                    f"{self.source}: it has other {column}s than the {ids.size} that the network was trained on; "
                    "mtl.load and mtl predict take pairs of those that it knows",
                )
            return self.spec
        self.row_encoder = IdEncoder(ids_by_column)
        return DataSpec(
            {"user": Categorical(users), self.input: Categorical(items)},
            [
                TaskSpec(self.task, "binary", weight=self.alpha, metrics=self.metrics[self.task], classes=CLASSES),
                TaskSpec("rating", "regression", weight=1.0 - self.alpha, metrics=self.metrics["rating"]),
            ],
        )

    def divide(self, rows: Batch, stratum: Tensor, generator: torch.Generator) -> dict[str, Batch]:
        """Split ``rows``, or ``max_rows`` of them, stratified by ``stratum [N]``."""
        if self.max_rows is not None and self.max_rows < len(rows):
            kept = sample_rows(len(rows), self.max_rows, generator)
            rows, stratum = rows.select(kept), stratum[kept]
        parts = random_split(stratum, self.fractions, generator)
        require_rows(parts, f"{self.source}: of its {len(rows)} rows, data.split leaves none for")
        splits = {name: rows.select(part) for name, part in parts.items()}
        if any(metric_family(name) in RANKING for name in self.metrics[self.task]):
            for name in ("val", "test"):
                splits[name].groups = splits[name].inputs["user"]
        return splits

    def _draw_unseen(self, seen: Tensor, users: int, items: int, generator: torch.Generator) -> Tensor:
        """Draw distinct unseen pairs; ``seen [R]`` are the sorted seen ones. A pair is the code user * items + item."""
        if self.negatives == "uniform":
            counts, sizes = torch.tensor([len(seen)]), torch.tensor([users * items - len(seen)])
            require(
                bool(counts <= sizes),
                f"data.negatives=uniform: needs {len(seen)} unseen pairs, one for each record, but the {users} users x "
                f"{items} {self.item}s of {self.source} leave only {int(sizes)}; use data.negatives=per_user",
            )
        else:
            seen_per_user = torch.bincount(seen // items, minlength=users)
            sizes = items - seen_per_user
            counts = torch.minimum(seen_per_user, sizes)
            require(bool(counts.any()), f"{self.source}: every user has seen every {self.item}, so none is unseen")
        rank = draw_distinct(sizes, counts, generator)
        # The unseen code of rank r is r + (number of seen codes below it). seen[i] - i counts the unseen codes below
        # seen[i], so seen[i] lies below that code if and only if seen[i] - i <= r.
        unseen_below = seen - torch.arange(len(seen))
        return rank + torch.searchsorted(unseen_below, rank, right=True)


def to_tensors(frame: pl.DataFrame, *names: str) -> dict[str, Tensor]:
    """Return columns of numbers as tensors ``[N]``."""
    return {name: torch.from_numpy(frame[name].to_numpy(writable=True)) for name in names}


def draw_distinct(sizes: Tensor, counts: Tensor, generator: torch.Generator) -> Tensor:
    """Draw ``counts[s]`` distinct numbers from each block ``s`` of ``sizes[s]`` numbers.

    Every subset of a block is equally likely. The blocks are consecutive: block ``s`` starts at ``sizes[:s].sum()``.
    Both arguments are ``[S]`` int64, with counts <= sizes. Returns ``[counts.sum()]``: the blocks in order, the numbers
    of a block in random order.
    """
    starts = sizes.cumsum(0) - sizes
    dense = counts * 4 > sizes  # random draws would repeat often here: listing all numbers of the block is cheaper
    pool = _list_blocks(starts[dense], sizes[dense])
    short = counts.masked_fill(dense, 0)
    while bool(short.any()):
        block = torch.repeat_interleave(torch.where(short > 0, short + short // 4 + 8, 0))
        offset = torch.rand(len(block), generator=generator, dtype=torch.float64) * sizes[block]
        offset = torch.minimum(offset.long(), sizes[block] - 1)  # the product can round up to the size
        pool = torch.cat([pool, starts[block] + offset]).unique()
        owner = torch.searchsorted(starts, pool, right=True) - 1
        have = torch.bincount(owner, minlength=len(sizes))
        short = (counts - have).clamp(min=0)
    owner = torch.searchsorted(starts, pool, right=True) - 1
    # The pool of a block is a random subset, but may be too large: shuffle each block and keep its first counts[s]
    order = (owner + torch.rand(len(pool), generator=generator, dtype=torch.float64)).argsort(stable=True)
    owner = owner[order]
    have = torch.bincount(owner, minlength=len(sizes))
    rank = torch.arange(len(pool)) - (have.cumsum(0) - have)[owner]
    return pool[order[rank < counts[owner]]]


def _list_blocks(starts: Tensor, sizes: Tensor) -> Tensor:
    owner = torch.repeat_interleave(sizes)
    return torch.arange(len(owner)) - (sizes.cumsum(0) - sizes)[owner] + starts[owner]
