"""Convert between DataFrames of polars and of pandas, which need not be installed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import polars as pl

from mtl.checks import InputError, first_line, require

WRITTEN = {str, int, float, bool, date, datetime, Decimal}  # types of cells that a CSV file can hold


def to_polars(rows: Any) -> pl.DataFrame:
    """Return a DataFrame or Series of polars or pandas, or a dict of columns, in polars without NaN.

    Raises InputError.
    """
    if not isinstance(rows, Mapping) and hasattr(rows, "to_frame"):  # a Series
        rows = rows.to_frame()
    if isinstance(rows, pl.DataFrame):
        return _without_nan(rows)
    if is_pandas(rows):
        names = [str(name) for name in rows.columns]
        twice = sorted({name for name in names if names.count(name) > 1})
        require(not twice, f"several columns are called {', '.join(map(repr, twice))}: give each a name of its own")
        rows = {str(name): column for name, column in rows.items()}
    accepted = "a DataFrame of polars or pandas, a dict of columns, or a dict of tensors"
    require(isinstance(rows, Mapping), f"rows are a {type(rows).__name__}: give {accepted}")
    try:
        return _without_nan(pl.DataFrame({name: _cells(values) for name, values in rows.items()}))
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError) as error:
        raise InputError(f"the given columns are no table: {first_line(error)}") from None


def _without_nan(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(pl.selectors.float().fill_nan(None))


def _cells(values: Any) -> Any:
    """Return a column for polars in which each cell keeps its value; missing ones are None or NaN.

    A column that mixes texts, numbers, booleans or dates becomes one of texts, as it would be in a CSV file.
    """
    if isinstance(values, pl.Series | str) or not isinstance(values, Iterable):  # polars repeats a single cell
        return values
    dtype = getattr(values, "dtype", None)
    if hasattr(values, "isna"):  # pandas
        if getattr(dtype, "tz", None) is not None:  # polars would turn a fixed offset into UTC
            values = values.dt.tz_localize(None)  # type: ignore[attr-defined]  # pandas need not be there
        if values.dtype == values.to_numpy().dtype and values.dtype.kind in "biufM":
            return pl.Series(values.to_numpy())
        values = [None if empty else cell for cell, empty in zip(values.tolist(), values.isna(), strict=True)]
    elif dtype is not None and np.asarray(values).dtype.kind in "biufMU":  # also torch
        return pl.Series(np.asarray(values))
    cells = [_plain(cell) for cell in values]
    leaves = [leaf for cell in cells for leaf in (cell if isinstance(cell, list) else [cell]) if leaf is not None]
    kinds = set(map(type, leaves))
    exact = 1 << (53 if float in kinds else 63)
    large = int in kinds and any(abs(leaf) >= exact for leaf in leaves if type(leaf) is int)
    if not kinds <= WRITTEN or (len(kinds) <= 1 and not large):
        return cells  # polars refuses other mixtures
    read = _datetime if kinds == {date, datetime} else float if kinds == {int, float} and not large else _text
    return [_read_nested(read, cell) for cell in cells]


def _read_nested(read: Callable[[Any], Any], cell: Any) -> Any:
    if isinstance(cell, list):
        return [_read_nested(read, element) for element in cell]
    return None if cell is None else read(cell)


def _plain(cell: Any) -> Any:
    """Return a cell without numpy's and pandas' types and without its time zone, so that times are local."""
    if isinstance(cell, np.datetime64):
        cell = cell.astype("datetime64[us]")
    if isinstance(cell, np.generic):
        cell = cell.item()
    if isinstance(cell, list | tuple | np.ndarray):
        return [_plain(element) for element in cell]
    if type(cell).__name__ in ("NAType", "NaTType") or (isinstance(cell, float) and math.isnan(cell)):
        return None
    return _datetime(cell) if isinstance(cell, datetime) else cell


def _datetime(day: date) -> datetime:
    return datetime(*day.timetuple()[:6], getattr(day, "microsecond", 0))


def _text(cell: Any) -> str:
    return f"{cell:f}" if isinstance(cell, Decimal) else str(cell)


def like(rows: Any, table: pl.DataFrame, indexed: bool = False) -> Any:
    """Return ``table``, in pandas if ``rows`` are; ``indexed``: with the same index."""
    return to_pandas(table, rows.index if indexed else None) if is_pandas(rows) else table


def to_pandas(table: pl.DataFrame, index: Any = None) -> Any:
    """Return ``table`` as a DataFrame of pandas; polars' own method needs pyarrow."""
    import pandas

    return pandas.DataFrame(table.to_dict(as_series=False), index=index)


def is_pandas(rows: Any) -> bool:
    """Return whether ``rows`` is a DataFrame or Series of pandas, which need not be installed."""
    return type(rows).__module__.split(".")[0] == "pandas" and hasattr(rows, "iloc") and hasattr(rows, "items")
