"""Show what each column of a table is taken for, and warn of columns that may be something else."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import polars as pl

from mtl.checks import shown

from .columns import as_text, parse
from .encoder import listing
from .inferring import MANY, Column
from .labels import Labels

logger = logging.getLogger(__name__)

WIDTH = 100
LISTED = 40  # columns in the table
EXAMPLES, LENGTH = 3, 24  # values of a column, and the length of a text
TAKEN: Mapping[str | None, str] = {"categorical": "category", "numeric": "number", None: "?"}
ROWS_PER_VALUE = 10  # a column with fewer rows for each value predicts any label perfectly, by chance
FEWEST = 5  # rows of a class
EQUAL = 0.9999  # the rank correlation of a copy, perhaps rounded or in another unit


def overview(columns: Sequence[Column], labels: Sequence[Labels], sample: pl.DataFrame, title: str, rows: int) -> None:
    """Log a table of the columns of ``rows`` training rows, of which ``sample`` has some, and warnings."""
    style = {"tbl_formatting": "NOTHING", "tbl_hide_dataframe_shape": True, "tbl_hide_column_data_types": True}
    with pl.Config(**style, tbl_cols=-1, tbl_rows=LISTED, tbl_width_chars=WIDTH, fmt_str_lengths=LENGTH):
        table = pl.DataFrame([line_of(column, sample[column.name], rows) for column in columns])
        logger.info("%s\n%s", title, "\n".join(line.strip() for line in str(table).splitlines()))
    for kind, reason in (("identifier", "identifiers (nearly all cells are distinct)"), ("free text", "free text")):
        names = [column.name for column in columns if column.varies and column.kind == kind]
        if names:
            logger.warning(
                "left out, like %s: %s. 'data.categorical=[%s]' uses a column as categories, and data.formats reads "
                "numbers and dates",
                reason, listing(names), names[0],
            )  # fmt: skip
    for column in columns:
        tasks = [task.name for task in labels if column.used and copies(column, task, sample)]
        if tasks:
            logger.warning(
                "%s predicts %s perfectly: if it is known only after the label, leave it out with 'data.ignore=[%s]'",
                column.name, listing(tasks), column.name,
            )  # fmt: skip


def line_of(column: Column, cells: pl.Series, rows: int) -> dict[str, str]:
    """Return the line of the table about a column, of which ``cells`` are some."""
    distinct = f"> {MANY:,}" if column.counts is None else f"{len(column.counts.table().drop_nulls('value')):,}"
    return {
        "column": column.name,
        "taken for": TAKEN.get(column.kind, str(column.kind)) if column.used else "left out",
        "distinct": "" if column.kind == "list" else distinct,
        "missing": f"{column.missing / rows:.1%}" if column.missing else "",
        "examples": examples(cells),
        "why": column.why or ("" if column.varies else "constant"),
    }


def examples(cells: pl.Series) -> str:
    """Return some values of a column, as many as there is room for."""
    values = cells.drop_nulls().head(100).unique(maintain_order=True).head(EXAMPLES).to_list()
    texts = [text if (text := str(value)).isprintable() else shown(value) for value in values]
    while len(texts) > 1 and len(", ".join(texts)) > LENGTH:
        texts.pop()
    return ", ".join(texts)


def copies(column: Column, task: Labels, sample: pl.DataFrame) -> bool:
    """Return whether a column has few values, each with one label, or the ranks of a regression's labels."""
    if column.kind not in ("categorical", "numeric"):
        return False
    numeric, regression = column.kind == "numeric", task.kind == "regression"
    cells, labels = sample[column.name], sample[task.column]
    x = parse(cells, column.form) if numeric else as_text(cells)
    rows = pl.DataFrame({"x": x, "y": parse(labels) if regression else as_text(labels)}).drop_nulls("y")
    classes = rows["y"].value_counts()
    if len(classes) < (FEWEST if regression else 2) or (not regression and classes["count"].min() < FEWEST):
        return False
    if rows["x"].n_unique() * ROWS_PER_VALUE <= len(rows):
        return bool(rows.group_by("x").agg(pl.col("y").n_unique())["y"].max() == 1)
    there = rows.drop_nulls()
    return numeric and regression and abs(there.select(pl.corr("x", "y", method="spearman")).item() or 0.0) > EQUAL
