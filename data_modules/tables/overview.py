"""Show what each column of a table is taken for, and warn of columns that may be something else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import polars as pl

from mtl.checks import shown

from .columns import as_text, parse
from .dates import parse_dates
from .encoder import listing
from .inferring import MANY, Column
from .labels import Labels
from .leaks import Ordered, classes_of

logger = logging.getLogger(__name__)

WIDTH = 100
LISTED = 40  # columns in the table
EXAMPLES, LENGTH = 3, 24  # values of a column, and the length of a text
TAKEN: Mapping[str | None, str] = {"categorical": "category", "numeric": "number", None: "?"}


def overview(columns: Sequence[Column], labels: Sequence[Labels], sample: pl.DataFrame, title: str, rows: int) -> None:
    """Log a table of the columns of ``rows`` training rows, of which ``sample`` has some, and warnings."""
    perfect = leaks(columns, labels, sample)
    style = {"tbl_formatting": "NOTHING", "tbl_hide_dataframe_shape": True, "tbl_hide_column_data_types": True}
    with pl.Config(**style, tbl_cols=-1, tbl_rows=LISTED, tbl_width_chars=WIDTH, fmt_str_lengths=LENGTH):
        lines = [line_of(column, perfect.get(column.name, ()), sample[column.name], rows) for column in columns]
        logger.info("%s\n%s", title, "\n".join(line.strip() for line in str(pl.DataFrame(lines)).splitlines()))
    for kind, reason in (("identifier", "identifiers (nearly all cells are distinct)"), ("free text", "free text")):
        names = [column.name for column in columns if column.varies and column.kind == kind]
        if names:
            logger.warning(
                "left out, like %s: %s. 'data.categorical=[%s]' uses a column as categories",
                reason, listing(names), names[0],
            )  # fmt: skip
    for name, tasks in perfect.items():
        logger.warning(
            "%s predicts %s perfectly: if it is known only after the label, leave it out with 'data.ignore=[%s]'",
            name, listing(tasks), name,
        )  # fmt: skip


def line_of(column: Column, perfect: Sequence[str], cells: pl.Series, rows: int) -> dict[str, str]:
    """Return the line of the table about a column, which predicts the tasks ``perfect``; ``cells`` are some of it."""
    why = [
        column.why or ("see below" if column.problem else "" if column.varies else "constant"),
        f"as in {column.form}" if column.form else "",
        *(f"predicts {task}" for task in perfect),
    ]
    distinct = f"> {MANY:,}" if column.counts is None else f"{len(column.counts.table().drop_nulls('value')):,}"
    return {
        "column": column.name,
        "taken for": TAKEN.get(column.kind, str(column.kind)) if column.used else "left out",
        "distinct": "" if column.kind == "list" else distinct,
        "missing": f"{column.missing / rows:.1%}" if column.missing else "",
        "examples": examples(cells),
        "why": "; ".join(filter(None, why)),
    }


def examples(cells: pl.Series) -> str:
    """Return some values of a column, as many as there is room for."""
    values = cells.drop_nulls().head(100).unique(maintain_order=True).head(EXAMPLES).to_list()
    texts = [text if (text := str(value)).isprintable() else shown(value) for value in values]
    while len(texts) > 1 and len(", ".join(texts)) > LENGTH:
        texts.pop()
    return ", ".join(texts)


def leaks(columns: Sequence[Column], labels: Sequence[Labels], sample: pl.DataFrame) -> dict[str, list[str]]:
    """Return the tasks that a column predicts perfectly in the sample, by column, if there are any."""
    targets = {
        task.name: parse(sample[task.column]).fill_null(float("nan")).to_numpy()
        if task.kind == "regression"
        else classes_of(sample[task.column])
        for task in labels
    }
    read: Mapping[str | None, Callable[[pl.Series, str], pl.Series]] = {"numeric": parse, "date": parse_dates}
    found: dict[str, list[str]] = {}
    for column in columns if labels else ():
        if not column.used or column.kind in ("list", None):
            continue
        cells = read.get(column.kind, lambda cells, _: as_text(cells))(sample[column.name], column.form)
        ordered = Ordered(cells, column.kind in read)
        tasks = [
            task.name
            for task in labels
            if (ordered.predicts_number if task.kind == "regression" else ordered.predicts_class)(targets[task.name])
        ]
        found |= {column.name: tasks} if tasks else {}
    return found
