"""The same table becomes the same tensors from a CSV or Parquet file, polars, pandas, a dict, and a request in JSON."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Mapping
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mtl.data_modules.table import TableDataModule
from torch import Tensor

from mtl.checks import InputError
from mtl.use.frames import to_polars
from mtl.use.serve import table as served
from tests.property.test_gates import seeds

ROWS = 40
ZONE = timezone(timedelta(hours=2))
BIG = 1 << 53
Table = Mapping[str, list[Any]]

days = st.dates(date(1990, 1, 1), date(2030, 1, 1))
times = st.datetimes(datetime(1990, 1, 1), datetime(2030, 1, 1)).map(lambda time: time.replace(microsecond=0))
CELLS: dict[str, st.SearchStrategy[Any]] = {
    "text": st.sampled_from(["Lyon", "Oslo", "x y", "é", "a.b", "True North", "1a", "7e", "-"]),
    "padded": st.integers(0, 99).map(lambda number: f"{number:03}"),
    "whole": st.integers(-3, 30),
    "large": st.integers(BIG - 9, BIG + 9),
    "number": st.floats(-1e3, 1e3, allow_subnormal=False).map(lambda number: round(number, 3)),
    "mixed": st.one_of(st.integers(-9, 9), st.sampled_from([0.5, 2.25, -1.5])),
    "decimal": st.decimals(-9, 9, places=2),
    "boolean": st.booleans(),
    "date": days,
    "time": times,
    "zoned": times.map(lambda time: time.replace(tzinfo=ZONE)),
    "comment": st.sampled_from(["Very good!", "Très bon, 3 jours après", "not nice\tat all", "no", "5.0", "GOOD"]),
    "list": st.lists(st.sampled_from(["a", "b", "c"]), max_size=3),
}


@st.composite
def tables(draw: st.DrawFn) -> tuple[Table, list[str]]:
    """Return columns of some kinds with labels, and the names of those that are categories by the user's word."""
    random = np.random.default_rng(draw(seeds))
    kinds = draw(st.lists(st.sampled_from(sorted(CELLS)), min_size=1, max_size=3))
    found: dict[str, list[Any]] = {}
    for number, kind in enumerate(kinds):
        unique = None if kind == "list" else str
        values = draw(st.lists(CELLS[kind], min_size=2, max_size=5, unique_by=unique))
        values += [None] * (kind != "large" and draw(st.booleans()))  # pandas would round large numbers
        found[f"{kind}_{number}"] = [values[index] for index in random.integers(len(values), size=ROWS)]
    label = draw(st.sampled_from([(False, True), (0, 1), ("no", "yes"), ("00", "01"), (0.0, 1.0)]))
    found["label"] = [label[index] for index in random.permutation(ROWS) % 2]
    chosen = [name for name in found if name.partition("_")[0] in ("padded", "whole", "large", "mixed", "boolean")]
    return found, [name for name in chosen if draw(st.booleans())]


def text_of(cell: Any) -> Any:
    """Return a cell that polars and JSON have no type for as text."""
    return cell.isoformat() if isinstance(cell, date) else str(cell) if isinstance(cell, Decimal) else cell


def as_polars(table: Table) -> pl.DataFrame:
    cells = {name: [text_of(one) if name[:5] == "zoned" else one for one in cells] for name, cells in table.items()}
    return pl.DataFrame(cells, schema_overrides={name: pl.Float64 for name in table if name[:5] == "mixed"})


def as_csv(table: Table) -> io.BytesIO:
    file = io.BytesIO()
    as_polars(table).write_csv(file)
    file.seek(0)
    return file


def as_numpy(table: Table) -> dict[str, np.ndarray[Any, Any]]:
    found = {}
    for name, cells in table.items():
        found[name] = np.empty(len(cells), dtype=object)
        found[name][:] = [np.array([one])[0] if isinstance(one, bool | int | float) else one for one in cells]
    return found


READERS: dict[str, Callable[[Table], Any]] = {
    "csv": as_csv,
    "parquet": lambda table: as_polars(table),
    "polars": lambda table: to_polars(as_polars(table)),
    "pandas": lambda table: to_polars(pd.DataFrame(table)),
    "nullable": lambda table: to_polars(pd.DataFrame(table).convert_dtypes()),
    "objects": lambda table: to_polars(pd.DataFrame({name: pd.Series(c, dtype=object) for name, c in table.items()})),
    "dict": to_polars,
    "numpy": lambda table: to_polars(as_numpy(table)),
}
FILES = ("csv", "parquet")
USED: dict[str, Callable[[Table, Any], pl.DataFrame]] = {  # of rows to predict
    **{name: lambda table, _, read=read: read(table) for name, read in READERS.items() if name not in FILES},
    "polars.read_csv": lambda table, _: to_polars(pl.read_csv(as_csv(table))),
    "pandas.read_csv": lambda table, _: to_polars(pd.read_csv(as_csv(table))),
    "server": lambda table, encoder: served(json.loads(json.dumps(rows_of(table), default=text_of)), encoder),
}


def rows_of(table: Table) -> list[dict[str, Any]]:
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]


def learnt(table: Table, reader: str, categorical: list[str], folder: Path) -> TableDataModule:
    """Return the data module of a table that ``reader`` read; the rows are split in one way."""
    path, read = folder / f"rows.{reader}", READERS[reader](table)
    if reader == "csv":
        path.write_bytes(read.getvalue())
    elif reader == "parquet":
        read.write_parquet(path)
    columns = dict.fromkeys(categorical, "category") | {n: "text" for n in table if n.startswith("comment")}
    data = TableDataModule(path, {"label": "binary"}, columns=columns, batch_size=8)
    if reader not in FILES:
        data.frames = {"train": read}
    data.setup()
    return data


def assert_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor], reader: str) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():  # means of the same numbers may differ in the last digit
        torch.testing.assert_close(value, other[name], rtol=1e-6, atol=1e-6, equal_nan=True, msg=f"{reader}: {name}")


@settings(max_examples=int(os.environ.get("EXAMPLES", "15")))
@given(tables(), st.permutations(sorted(READERS)))
def test_cells_mean_the_same_to_all_readers(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[Table, list[str]], readers: list[str]
) -> None:
    """Two readers learn the same from a table, and the encoder of the first reads all others' rows alike."""
    (table, categorical), folder = drawn, tmp_path_factory.mktemp("rows")
    flat = not any(name.startswith("list") for name in table)  # a CSV file has no lists
    first, second = [reader for reader in readers if flat or reader != "csv"][:2]
    try:
        data = learnt(table, first, categorical, folder)
    except InputError as error:
        with pytest.raises(InputError, match=re.escape(str(error).partition(" ")[2])):
            learnt(table, second, categorical, folder)
        return
    again = learnt(table, second, categorical, folder)
    for name in ("inputs", "targets"):
        assert_equal(*(getattr(one.splits["train"], name) for one in (data, again)), f"{first}, {second}")
    encoder: Any = data.row_encoder
    expected = encoder.encode(to_polars(dict(table)), "rows")
    for reader, read in USED.items():
        if flat or "csv" not in reader:
            assert_equal(encoder.encode(read(table, encoder), reader), expected, reader)
