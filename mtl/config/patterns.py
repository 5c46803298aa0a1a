"""Tasks of many columns at once: ``data.tasks`` may name patterns of columns, such as ``genre_*``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from mtl.data_modules.tables.patterns import expand_patterns
from mtl.data_modules.tables.row_source import RowSource
from mtl.files.cloud import path_of


def with_columns(cfg: DictConfig, columns: Sequence[str] | None = None) -> None:
    """Replace each pattern in ``cfg.data.tasks`` by the columns that it fits, see ``expand_patterns``.

    Columns that are inputs, weights, groups or slices, or split the rows, or are ignored, are left out. ``columns``:
    those of rows in memory; None: the columns of ``cfg.data.path``. Raises InputError.
    """
    data: Any = cfg.get("data") or {}
    tasks: Any = OmegaConf.to_container(data.get("tasks") or OmegaConf.create({}))
    if not isinstance(tasks, dict) or not any("*" in str(name) for name in tasks) or not data.get("path"):
        return
    if columns is None:
        separator = (data.get("csv") or {}).get("separator")
        columns = RowSource.open(path_of(data.path), "data.path", separator=separator).columns
    options = data.get("columns") or {}  # a column with no more than a format may be a label
    reserved = [name for name in options if not isinstance(options[name], Mapping) or options[name].get("kind")]
    reserved += [*(data.get("ignore") or ()), *(data.get("slices") or ()), (data.get("split") or {}).get("column")]
    reserved += [data.get("weight_column"), data.get("group_column")]
    with open_dict(cfg):
        cfg.data.tasks = expand_patterns(tasks, columns, reserved, data.path)
