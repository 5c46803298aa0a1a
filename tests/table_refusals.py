"""A small table, and the messages that refuse it after it has been changed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from mtl.data_modules.table import TableDataModule

from mtl.checks import InputError
from tests.loaded import loaded

TASKS = {"y": {"kind": "binary"}}
GOOD = "a,b,y\n" + "".join(f"{i}.5,{'ST'[i % 2]},{i // 2 % 2}\n" for i in range(40))


def module(path: Path | str | None, tasks: Any = TASKS, streamed: bool = False, **options: Any) -> Any:
    options = {"batch_size": 8, "window_rows": 1 << 20 if streamed else None} | options
    return loaded(TableDataModule(None if path is None else str(path), tasks, **options))


def save(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def parquet(frame: pl.DataFrame) -> bytes:
    target = io.BytesIO()
    frame.write_parquet(target)
    return target.getvalue()


def refusal(path: Path | str | None, tasks: Any = TASKS, **options: Any) -> str:
    """Return the message that refuses a table."""
    with pytest.raises(InputError) as caught:
        module(path, tasks, **options)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1000
    return message


def with_lines(line: int, text: str) -> str:
    """Return the table with another line."""
    lines = GOOD.splitlines()
    lines[line - 1] = text
    return "\n".join(lines)
