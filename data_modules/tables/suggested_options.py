"""Write what the columns of a table are taken for as options of a run, for the user to edit."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import yaml

from mtl.checks import join_names, require
from mtl.files.escaping import escape_interpolation

from .cells import Cells
from .column_report import log_overview
from .columns.list import distinct_elements, split_lists
from .encoder import check_columns
from .inference import has_id_name
from .labels import TargetOptions
from .learning import infer
from .options import TableOptions
from .profile import Profile
from .row_source import RowSource

logger = logging.getLogger(__name__)

MANY_IDS, LONG_LIST = 200, 10  # a list with more ids, and more of them in a row, is a layer rather than a mean
DESCRIBED = ("category", "number", "date")  # lists are recognised by their type

HEAD = """# @package _global_
# The columns of {path}, to be edited. Example: mtl train --config-dir {folder} data={name}
defaults: [table]
data:
  path: {path}
"""


def suggest_column_options(path: Path, labels: Sequence[str], name: str, folder: Path) -> str:
    """Log what each column of a table is taken for, and return ``data/NAME.yaml`` in ``folder`` with these options.

    ``labels``: the columns to predict; by default the last one that may be a label. Raises InputError.
    """
    source = RowSource.open(path, "FILE")
    blocks, rows, columns = source.frames, source.count, source.columns
    check_columns(columns, labels, str(path), "")
    where, options = str(path), TableOptions()
    candidates, _, _ = infer(blocks, rows, labels or columns, [], where, options)
    kinds = {profile.name: kind for profile in candidates if (kind := infer_task_kind(profile))}
    unfit = [label for label in labels if label not in kinds] or ([] if kinds else columns)
    problems = [profile.problem for profile in candidates if profile.name in unfit and profile.problem]
    message = f"{where}: {join_names(unfit)}: constants, dates, lists, identifiers and free text are no labels"
    require(not unfit, "; ".join([message, *problems]))
    tasks = {column: kinds[column] for column in labels or [list(kinds)[-1]]}
    names = {column: re.sub(r"[^\w -]+", "_", column).strip() or "task" for column in tasks}  # accepted everywhere
    task_options = {names[column]: {"column": column, "kind": kind} for column, kind in tasks.items()}
    numbers = [column for column in candidates if tasks.get(column.name) == "regression"]
    formats = {column.name: column.format for column in numbers if column.format}
    targets = TargetOptions.from_tasks(task_options)
    targets = [task.model_copy(update={"format": formats.get(task.column, "")}) for task in targets]
    inputs = [column for column in columns if column not in tasks]
    require(bool(inputs), f"{where}: no column is left as input")
    profiles, _, sample = infer(blocks, rows, inputs, targets, where, options)
    log_overview(profiles, targets, sample, f"{where}, {rows:,} rows", rows)
    for profile in profiles:
        if profile.problem:
            logger.warning("%s", profile.problem)
    for advice in [*split_advice(profiles, rows), *list_advice(profiles, sample)]:
        logger.info("%s", advice)
    head = HEAD.format(path=to_flow_yaml(where), folder=folder, name=name)
    return "".join([head, *yaml_lines(profiles, task_options, formats)])


def split_advice(columns: Sequence[Profile], rows: int) -> list[str]:
    """Return how to split rows that have dates or that belong to users: random rows would be like the training rows."""
    advice = []
    dates = [column.name for column in columns if column.used and column.kind == "date"]
    if dates:
        options = f"data.split.by=time 'data.split.column={dates[0]}'"
        advice.append(f"rows have dates: to test on later rows than those of the training, set {options}")
    owners = [column for column in columns if column.used and column.kind == "category" and has_id_name(column.name)]
    if owners and owners[0].counts is not None:
        rows_per_owner = rows / max(1, len(owners[0].counts.table()))
        options = f"data.split.by=group 'data.split.column={owners[0].name}'"
        advice.append(f"{owners[0].name} has {rows_per_owner:.1f} rows each: to test on new ones, set {options}")
    return advice


def list_advice(columns: Sequence[Profile], sample: pl.DataFrame) -> list[str]:
    """Return what to do with long lists and with molecules; ``sample``: some of the rows."""
    advice = []
    for column in columns:
        if column.used and column.kind == "list":
            lists = split_lists(Cells(sample, column.name, ""), "list", "")
            ids, length = distinct_elements(lists).n_unique(), float(lists.list.len().fill_null(0).to_numpy().mean())
            if ids > MANY_IDS and length > LONG_LIST:
                advice.append(f"{column.name}: a list of {ids:,} ids, {length:.0f} per row: recipe=fingerprints")
        elif column.varies and column.name.lower() == "smiles":
            option = f"'data.columns.{column.name}=molecule' recipe=fingerprints"
            advice.append(f"{column.name}: if these are molecules, set {option} (needs rdkit)")
    return advice


def infer_task_kind(column: Profile) -> str | None:
    """Return the kind of task that predicts a column, None if it cannot be predicted."""
    if not column.varies or column.kind not in ("category", "number"):
        return None
    values = 0 if column.counts is None else len(column.counts.table().drop_nulls("value"))
    return "binary" if values == 2 else "multiclass" if column.kind == "category" else "regression"


def yaml_lines(columns: Sequence[Profile], tasks: dict[str, Any], formats: dict[str, str]) -> list[str]:
    """Return the options as lines of YAML; ``formats``: those of labels."""
    described = {column.name: column_options(column) for column in columns if column.used and column.kind in DESCRIBED}
    described |= {name: {"format": label_format} for name, label_format in formats.items()}
    # Identifiers and free text are left out anyway, until data.columns names their kind, as is advised
    constant = [column.name for column in columns if not column.varies]
    lines = ["  tasks:\n", *(f"    {to_flow_yaml(name)}: {to_flow_yaml(options)}\n" for name, options in tasks.items())]
    lines += ["  columns:\n"] * bool(described)
    lines += [f"    {to_flow_yaml(name)}: {to_flow_yaml(options)}\n" for name, options in described.items()]
    lines += [f"  ignore: {to_flow_yaml(constant)}\n"] * bool(constant)
    return lines + [f"  # {column.problem}\n" for column in columns if column.problem]


def column_options(column: Profile) -> str | dict[str, Any]:
    """Return the kind of a column, or its options if there are more, as ``data.columns`` takes them."""
    more: dict[str, Any] = {"ids": True} if column.repeats else {}
    more |= {"format": column.format} if column.format and column.is_parsed else {}
    kind = "number" if column.repeats else str(column.kind)
    return {"kind": kind, **more} if more else kind


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    """Put texts in quotes that do not begin with a letter: Hydra's YAML takes more of them for numbers, such as 1e3."""

    def represent_str(self, text: str) -> Any:
        style = '"' if not text.isprintable() else None if text[:1].isalpha() else "'"
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_str)


def to_flow_yaml(value: Any) -> str:
    """Return a value as one line of YAML, whose texts are no interpolations."""
    options = {"default_flow_style": True, "width": 10**9, "allow_unicode": True, "sort_keys": False}
    text: str = yaml.dump(escape_interpolation(value), Dumper=_Dumper, **options)
    return text.removesuffix("...\n").strip()
