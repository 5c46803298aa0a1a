"""Convert between DataFrames of polars and of pandas, which need not be installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from mtl.checks import InputError, first_line, require


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
        rows = {str(name): _values(column) for name, column in rows.items()}
    require(
        isinstance(rows, Mapping),
        f"rows are a {type(rows).__name__}: give a DataFrame of polars or pandas, a dict of columns, or a dict of "
        "tensors",
    )
    try:
        try:
            return _without_nan(pl.DataFrame(dict(rows)))
        except TypeError:  # a column with numbers and texts becomes one of texts
            return _without_nan(pl.DataFrame(dict(rows), strict=False))
    except (TypeError, ValueError, pl.exceptions.PolarsError) as error:
        raise InputError(f"the given columns are no table: {first_line(error)}") from None


def _without_nan(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(pl.selectors.float().fill_nan(None))


def _values(column: Any) -> Any:
    """Return the values of a column of pandas for polars, with None for missing ones."""
    if column.dtype.kind in "bif" and column.dtype == column.to_numpy().dtype:
        return pl.Series(column.to_numpy(), nan_to_null=True)
    return [None if empty else value for value, empty in zip(column.tolist(), column.isna(), strict=True)]


def like_pandas(table: pl.DataFrame, rows: Any) -> Any:
    """Return ``table`` as a DataFrame of the same class and index as ``rows``."""
    return type(rows)(table.to_dict(as_series=False), index=rows.index)


def is_pandas(rows: Any) -> bool:
    """Return whether ``rows`` is a DataFrame of pandas, which need not be installed."""
    return type(rows).__module__.split(".")[0] == "pandas" and hasattr(rows, "iloc") and hasattr(rows, "items")
