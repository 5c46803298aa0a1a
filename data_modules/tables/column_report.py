"""Show what each column of a table is taken for, and warn of columns that may be something else.

A column that predicts a label perfectly is mostly the label itself in other words, known only afterwards.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mtl.checks import format_value, join_names

from .cells import as_text, parse_dates, parse_numbers
from .labels import TargetOptions
from .options import ELEMENT_KINDS
from .profile import MAX_DISTINCT_COUNTED, Profile
from .vocabulary import fold_spelling

logger = logging.getLogger(__name__)

WIDTH = 80
MAX_COLUMNS_LISTED = 40  # columns in the table, besides those with a warning
MAX_EXAMPLES, MAX_EXAMPLE_LETTERS = 3, 20  # values of a column, and their length in all
CONSTANT = "constant"
MAX_LEAKS_LISTED = 5  # columns that predict a task perfectly, each with a warning of its own
MIN_ROWS_PER_VALUE = 10  # a column with fewer rows for each value predicts any label perfectly, by chance
MIN_ROWS_OR_VALUES = 5  # rows of each class, or distinct numbers, by which a leak is judged
MIN_RANK_CORRELATION = 0.9999  # the rank correlation of a copy, perhaps rounded or in another unit


def log_overview(
    columns: Sequence[Profile], labels: Sequence[TargetOptions], sample: pl.DataFrame, title: str, rows: int
) -> None:
    """Log a table of columns and warnings; ``rows``: number of training rows; ``sample``: some of them."""
    perfect = find_leaks(columns, labels, sample)
    logger.info("%s\n%s", title, to_text(build_table(columns, perfect, sample, rows)))
    for kind, reason, use, option in (
        ("identifier", "nearly every value is unique", "use a column as a category", "category"),
        ("free text", "free text", "use the words", "text"),
    ):
        names = [column.name for column in columns if column.varies and column.kind == kind]
        if names:
            kinds = ", ".join(f"{name}: {option}" for name in (names if kind == "free text" else names[:1]))
            logger.warning("ignored: %s (%s); to %s, set 'data.columns={%s}'", join_names(names), reason, use, kinds)
    categories = [column for column in columns if column.kind == "category"]
    unfolded = [column for column in categories if column.counts and not column.options.vocabulary.fold]
    texts = {column.name: column.counts.table()["value"] for column in unfolded if column.counts}
    ends = dict.fromkeys(texts, "; data.vocabulary.fold=true makes them one")  # labels keep their spelling
    texts |= {label.column: sample[label.column] for label in labels if label.kind != "regression"}
    for name, values in texts.items():
        if groups := find_similar_spellings(values):
            logger.warning(
                "%s: %s differ only in case or spaces, but are different categories%s%s",
                format_value(name), join_names(groups[0]), f"; so do {len(groups) - 1} more" if groups[1:] else "",
                ends.get(name, ""),
            )  # fmt: skip
    for name, tasks in perfect.items() if len(perfect) <= MAX_LEAKS_LISTED else ():
        logger.warning(
            "%s predicts %s perfectly: if it is known only after the label, leave it out with 'data.ignore=[%s]'",
            name, join_names(tasks), name,
        )  # fmt: skip
    if len(perfect) > MAX_LEAKS_LISTED:
        logger.warning(
            "%d columns predict a task perfectly; leave those known only after the label out with data.ignore: %s",
            len(perfect), join_names(perfect),
        )  # fmt: skip


def find_similar_spellings(values: pl.Series) -> list[list[str]]:
    """Return the groups of texts that differ only in case or spaces."""
    if values.dtype != pl.String:
        return []
    plain = fold_spelling(pl.col("text"))
    groups = values.drop_nulls().unique().sort().alias("text").to_frame().group_by(plain.alias("plain")).all()
    return sorted(groups.filter(pl.col("text").list.len() > 1)["text"].to_list())


def build_table(
    columns: Sequence[Profile], perfect: Mapping[str, Sequence[str]], sample: pl.DataFrame, rows: int
) -> Table:
    """Return the table of the columns; of very many, the first ones and those with a warning."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("column", max_width=20, overflow="fold")
    table.add_column("taken for")
    table.add_column("distinct", justify="right")
    table.add_column("missing", justify="right")
    table.add_column("examples", no_wrap=True, max_width=MAX_EXAMPLE_LETTERS)
    table.add_column("why", min_width=14)
    hidden = 0
    for number, column in enumerate(columns):
        both = column.kind == "date" and parse_dates(sample[column.name]).count()
        why = [
            column.why or ("see below" if column.problem else "" if column.varies else CONSTANT),
            f"also a {'number' if column.kind == 'category' else 'category'}" if column.repeats else "",
            f"as in {column.format}{' and yyyy-mm-dd' if both else ''}" if column.format else "",
            *(f"predicts {task}" for task in perfect.get(column.name, ())),
        ]
        if number >= MAX_COLUMNS_LISTED and not (column.name in perfect or column.problem or not column.used):
            hidden += 1
            continue
        distinct = f"> {MAX_DISTINCT_COUNTED:,}"
        if column.counts is not None:
            values = column.counts.table()["value"].drop_nulls()
            is_folded = column.kind == "category" and column.options.vocabulary.fold
            distinct = f"{len(fold_spelling(as_text(values)).unique() if is_folded else values):,}"
        table.add_row(
            escape(column.name),
            column.kind or "?" if column.used else "left out",
            "" if column.kind in ELEMENT_KINDS else distinct,
            f"{column.missing / rows:.1%}" if column.missing else "",
            format_examples(sample[column.name]),
            "; ".join(filter(None, why)),
        )
    if hidden:
        table.add_row(f"... {hidden:,} more")
    return table


def format_examples(cells: pl.Series) -> str:
    """Return some values of a column, as many as there is room for."""
    values = cells.drop_nulls().head(100).unique(maintain_order=True).head(MAX_EXAMPLES).to_list()
    texts = [text if (text := str(value)).isprintable() else format_value(value) for value in values]
    while len(texts) > 1 and len(", ".join(texts)) > MAX_EXAMPLE_LETTERS:
        texts.pop()
    return escape(", ".join(texts))


def find_leaks(
    columns: Sequence[Profile], labels: Sequence[TargetOptions], sample: pl.DataFrame
) -> dict[str, list[str]]:
    """Return the tasks that a column predicts perfectly in the sample, by column, if there are any."""
    compared = [column for column in columns if column.used and column.kind not in (*ELEMENT_KINDS, None)]
    targets = {
        task.name: parse_numbers(sample[task.column], task.format).fill_null(float("nan")).to_numpy()
        if task.kind == "regression"
        else number_classes(sample[task.column])
        for task in (labels if compared else ())
    }
    read: Mapping[str | None, Callable[[pl.Series, str], pl.Series]] = {"number": parse_numbers, "date": parse_dates}
    leaks: dict[str, list[str]] = {}
    for column in compared if labels else ():
        parse_cells = read.get(column.kind)
        cells = parse_cells(sample[column.name], column.format) if parse_cells else as_text(sample[column.name])
        ordered = LeakCheck(cells, column.kind in read)
        tasks = []
        for task in labels:
            predicts = ordered.predicts_number if task.kind == "regression" else ordered.predicts_class
            tasks += [task.name] if predicts(targets[task.name]) else []
        leaks |= {column.name: tasks} if tasks else {}
    return leaks


class LeakCheck:
    """Rows in the order of a column: ``order [N]``, and whether each has the value of the one before ``[N - 1]``."""

    def __init__(self, column: pl.Series, is_number: bool) -> None:
        rank = column.rank("dense").fill_null(0).to_numpy().astype(np.int64)
        self.order = np.argsort(rank, kind="stable")
        self.rank, self.is_number = rank, is_number
        self.repeats = len(np.unique(rank)) * MIN_ROWS_PER_VALUE <= len(rank)

    def predicts_class(self, label: Any) -> bool:
        """Return whether the column determines the class ``label [N]`` of each row, negative for a missing one."""
        y, x = self._labelled(label, label >= 0)
        classes, counts = np.unique(y, return_counts=True)
        if len(classes) < 2 or counts.min() < MIN_ROWS_OR_VALUES:
            return False
        changes, ties = y[1:] != y[:-1], x[1:] == x[:-1]
        if (changes & ties).any():
            return False
        in_order = int((changes & (x[:-1] > 0)).sum()) < len(classes)  # an interval of numbers for each class
        return self.repeats or (self.is_number and in_order)

    def predicts_number(self, label: Any) -> bool:
        """Return whether the column determines the number ``label [N]`` of each row, NaN for a missing one."""
        y, x = self._labelled(label, ~np.isnan(label))
        if len(np.unique(y)) < MIN_ROWS_OR_VALUES:
            return False
        if self.repeats and not ((y[1:] != y[:-1]) & (x[1:] == x[:-1])).any():
            return True
        filled = x > 0
        if not self.is_number or len(np.unique(x[filled])) < MIN_ROWS_OR_VALUES:
            return False
        ranks = pl.Series(y[filled]).rank().to_numpy(), pl.Series(x[filled]).rank().to_numpy()
        return bool(abs(np.corrcoef(*ranks)[0, 1]) > MIN_RANK_CORRELATION)

    def _labelled(self, label: Any, has_label: Any) -> tuple[Any, Any]:
        order = self.order[has_label[self.order]]
        return label[order], self.rank[order]


def number_classes(column: pl.Series) -> Any:
    """Return the class of each row as a number from 0 ``[N]``, -1 for a missing label."""
    return (as_text(column).rank("dense").cast(pl.Int64) - 1).fill_null(-1).to_numpy()


def to_text(table: Table) -> str:
    """Return a table as text without colours, ``WIDTH`` wide."""
    target = io.StringIO()
    Console(file=target, width=WIDTH, force_jupyter=False).print(table)
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines())
