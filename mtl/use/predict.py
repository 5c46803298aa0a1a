"""Predict the rows of a file, for ``mtl predict RUN rows.csv -o predictions.parquet``."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from mtl.checks import InputError, join_names, require
from mtl.files.escaping import escape_control
from mtl.files.formatting import cell
from mtl.files.tables import Table
from mtl.files.writing import SEPARATORS, check_out, reported, writing
from mtl.types import ROW
from mtl.use import drift
from mtl.use.trained import TrainedModel, load

log = logging.getLogger(__name__)

DRIFT_SAMPLE_ROWS = 1 << 16  # rows of a file, from its start, in which changes are noticed
Write = Callable[[pl.DataFrame], None]


def predicted(
    model: TrainedModel,
    rows: Path,
    tasks: Sequence[str] | None = None,
    keep: Sequence[str] | None = None,
    experts: bool = False,
    batch_size: int = 4096,
    interval: float | None = None,
) -> Iterator[tuple[pl.DataFrame, float]]:
    """Yield blocks of the rows of a file with their predictions, each with the fraction of the file read so far.

    Memory does not depend on the number of rows, except for text files, which are read as a whole. ``keep``: the
    columns of the file to keep (None: all). For the other arguments see ``TrainedModel.predict``. Raises InputError,
    which names file, column and row, if the file or a cell cannot be read, or if a column is missing.
    """
    if model.encoder is None:
        no_table = "the data of this network have no rows that a table could hold"
        raise InputError(f"{no_table}: mtl.load(CHECKPOINT).predict takes tensors")
    for number, (block, fraction) in enumerate(model.encoder.blocks(rows)):
        columns = [name for name in block.columns if name != ROW]
        missing = [name for name in keep or () if name not in columns]
        require(not missing, f"--keep: {rows} has no column {', '.join(missing)}; it has {', '.join(columns)}")
        predictions = model.predict(block, tasks, experts, batch_size, str(rows), interval)
        if number == 0 and len(block) >= drift.MIN_ROWS:
            _warn_of_drift(model, block[:DRIFT_SAMPLE_ROWS], rows, interval)
        kept = block.select(columns if keep is None else list(keep))
        twice = [name for name in predictions.columns if name in kept.columns]
        message = f"{rows} has a column {', '.join(twice)}, as the predictions do: name the columns to keep with --keep"
        require(not twice, message)
        yield kept.hstack(predictions.get_columns()) if kept.width else predictions, fraction


def _warn_of_drift(model: TrainedModel, block: pl.DataFrame, rows: Path, interval: float | None) -> None:
    """Warn if columns of a block of rows have changed since the training, so that intervals are not of that level."""
    assert model.encoder is not None
    if model.encoder.histograms_of(block[:0], str(rows)):
        changed = drift.judge(drift.compare_columns(model, block, str(rows))).filter("drifted")["column"].to_list()
        if changed:
            level = f"; the intervals may not hold {interval:.4g} of the labels" if interval else ""
            log.warning("%s, changed since the training: %s; mtl drift says how%s", rows, join_names(changed), level)


def read_rows(model: TrainedModel, rows: Path) -> pl.DataFrame:
    """Return the rows of a file. Raises InputError."""
    if model.encoder is None:
        raise InputError("the data of this network are no table")
    return pl.concat([block.drop(ROW, strict=False) for block, _ in model.encoder.blocks(rows)])


def predict_file(
    checkpoint: str | Path,
    rows: Path,
    out: Path,
    force: bool = False,
    trust: Sequence[str] = (),
    device: str | None = None,
    model: str | None = None,
    **options: Any,
) -> int:
    """Write the predictions for the rows of a file to ``out``; return the number of rows.

    ``out`` (.csv, .tsv or .parquet) is written completely or not at all. ``model``: as in ``mtl.load``. ``options``: as
    in ``predicted``. Raises InputError, also if ``out`` exists, unless ``force``.
    """
    check_out(out, rows, force)
    loaded, count = load(checkpoint, trust, device, model=model), 0
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(rows.name, total=1.0)
        with table_file(out) as write:
            for block, share in predicted(loaded, rows, **options):
                write(block)
                count += len(block)
                progress.update(bar, completed=share)
    return count


@contextmanager
def table_file(out: Path) -> Iterator[Write]:
    """Provide a function that appends rows to a temporary file, which is renamed to ``out`` in the end."""
    with reported(out), TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder, writing(out) as file:
        parts: list[Path] = []

        def write_part(frame: pl.DataFrame) -> None:
            parts.append(Path(folder) / f"{len(parts)}.parquet")
            frame.write_parquet(parts[-1])

        def write_lines(frame: pl.DataFrame) -> None:
            nested = [name for name, kind in frame.schema.items() if kind.is_nested()]
            lists = f"column {', '.join(nested)} holds lists"
            require(not nested, f"-o {out}: {lists}: write .parquet, or leave it out of --keep")
            frame.write_csv(file, include_header=file.tell() == 0, separator=SEPARATORS[out.suffix])

        yield write_part if out.suffix == ".parquet" else write_lines
        if parts:
            pl.scan_parquet(parts, glob=False).sink_parquet(file)


def show(table: pl.DataFrame, width: int | None = None, wrap: bool = False) -> None:
    """Print a table of predictions; if it is wider than ``width``, one row after the other.

    ``width``: None is the terminal's, or 200 if the output is none. ``wrap``: let long cells take several lines
    instead.
    """
    table = table.rename(escape_control)
    rows = [["" if value is None else escape_control(cell(value)) for value in row] for row in table.iter_rows()]
    width = width or (shutil.get_terminal_size().columns if sys.stdout.isatty() else 200)
    columns = [max(map(len, cells)) for cells in zip(table.columns, *rows, strict=True)]
    if not wrap and sum(columns) + 3 * len(columns) + 1 > width:
        longest = max(map(len, table.columns))
        for number, row in enumerate(rows, start=1):
            print(f"row {number}")
            for name, text in zip(table.columns, row, strict=True):
                print(f"  {name:{longest}}  {text}")
        return
    Console(width=width).print(Table(table.columns, rows))
