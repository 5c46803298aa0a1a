"""Tasks of many columns at once: ``data.tasks`` may name patterns of columns, such as ``genre_*``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from mtl.checks import join_names, require
from mtl.data_modules.tables.row_source import RowSource
from mtl.files.cloud import path_of


def with_columns(cfg: DictConfig, columns: Sequence[str] | None = None) -> None:
    """Replace each pattern in ``cfg.data.tasks`` by the columns that it fits, each with the pattern and its options.

    Columns that are named otherwise, as tasks, inputs, or those that split the rows or are ignored, are left out.
    ``columns``: those of rows in memory; None: the columns of ``cfg.data.path``. Raises InputError for a pattern
    without a column, and for a column of two patterns.
    """
    tasks: Any = OmegaConf.to_container((cfg.get("data") or {}).get("tasks") or OmegaConf.create({}))
    if not isinstance(tasks, dict) or not any("*" in str(name) for name in tasks) or not cfg.data.get("path"):
        return
    if columns is None:
        separator = (cfg.data.get("csv") or {}).get("separator")
        columns = RowSource.open(path_of(cfg.data.path), "data.path", separator=separator).columns
    split: Any = cfg.data.get("split") or {}
    named = {*tasks, *(cfg.data.get("columns") or ()), *(cfg.data.get("ignore") or ()), split.get("column")}
    named |= {options.get("column") for options in tasks.values() if isinstance(options, dict)}
    expanded: dict[str, Any] = {}
    for name, options in tasks.items():
        if "*" not in str(name) or name in columns:
            expanded[name] = options
            continue
        fitting = [column for column in columns if fnmatchcase(column, name) and column not in named]
        message = f"data.tasks.{name}: no column has such a name; {cfg.data.path} has {join_names(columns)}"
        require(bool(fitting), message)
        options = options if isinstance(options, dict) else {"kind": options}
        for column in fitting:
            task = re.sub(r"[./\\]", "_", column)  # which the name of a task may not have
            another = "another pattern names it too, or a column of a similar name"
            require(
                task not in {*expanded, *tasks}, f"data.tasks.{name}: column {column!r}: {another}; name it by itself"
            )
            expanded[task] = {**options, "column": column, "pattern": name}
    with open_dict(cfg):
        cfg.data.tasks = expanded
