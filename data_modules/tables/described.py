"""Write what the columns of a table are taken for as options of a run, for the user to edit."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from mtl.checks import join_names, require
from mtl.files.literals import escape_interpolation

from .encoder import check_columns
from .inference import is_named
from .labels import TargetOptions
from .learning import infer
from .options import TableOptions
from .overview import overview
from .profile import Profile
from .row_source import RowSource

logger = logging.getLogger(__name__)

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
    kinds = {column.name: kind for column in candidates if (kind := task_kind(column))}
    unfit = [label for label in labels if label not in kinds] or ([] if kinds else columns)
    message = f"{where}: {join_names(unfit)}: constants, dates, lists, identifiers and free text are no labels"
    require(not unfit, "; ".join([message, *(one.problem for one in candidates if one.name in unfit and one.problem)]))
    tasks = {column: kinds[column] for column in labels or [list(kinds)[-1]]}
    task_options = {task_name(column): {"column": column, "kind": kind} for column, kind in tasks.items()}
    forms = {one.name: one.form for one in candidates if one.form and tasks.get(one.name) == "regression"}
    targets = [
        task.model_copy(update={"form": forms.get(task.column, "")}) for task in TargetOptions.each(task_options)
    ]
    inputs = [column for column in columns if column not in tasks]
    require(bool(inputs), f"{where}: no column is left as input")
    found, _, sample = infer(blocks, rows, inputs, targets, where, options)
    overview(found, targets, sample, f"{where}, {rows:,} rows", rows)
    for column in found:
        if column.problem:
            logger.warning("%s", column.problem)
    for advice in split_advice(found, rows):
        logger.info("%s", advice)
    return HEAD.format(path=flow(where), folder=folder, name=name) + "".join(lines_of(found, task_options, forms))


def split_advice(columns: Sequence[Profile], rows: int) -> list[str]:
    """Return how to split rows that have dates or that belong to users: random rows would be like the training rows."""
    found = []
    dates = [column.name for column in columns if column.used and column.kind == "date"]
    if dates:
        words = f"data.split.by=time 'data.split.column={dates[0]}'"
        found.append(f"rows have dates: to test on later rows than those of the training, set {words}")
    owners = [one for one in columns if one.used and one.kind == "category" and is_named(one.name)]
    if owners and owners[0].counts is not None:
        each = rows / max(1, len(owners[0].counts.table()))
        words = f"data.split.by=group 'data.split.column={owners[0].name}'"
        found.append(f"{owners[0].name} has {each:.1f} rows each: to test on new ones, set {words}")
    return found


def task_kind(column: Profile) -> str | None:
    """Return the kind of task that predicts a column, None if it cannot be predicted."""
    if not column.varies or column.kind not in ("category", "number"):
        return None
    values = 0 if column.counts is None else len(column.counts.table().drop_nulls("value"))
    return "binary" if values == 2 else "multiclass" if column.kind == "category" else "regression"


def task_name(column: str) -> str:
    """Return a name of a task that is accepted everywhere."""
    return re.sub(r"[^\w -]+", "_", column).strip() or "task"


def lines_of(columns: Sequence[Profile], tasks: dict[str, Any], forms: dict[str, str]) -> list[str]:
    """Return the options as lines of YAML; ``forms``: the formats of labels."""
    described = {one.name: column_options(one) for one in columns if one.used and one.kind in DESCRIBED}
    described |= {name: {"format": form} for name, form in forms.items()}
    # Identifiers and free text are left out anyway, until data.columns names their kind, as is advised
    constant = [one.name for one in columns if not one.varies]
    lines = ["  tasks:\n", *(f"    {flow(name)}: {flow(options)}\n" for name, options in tasks.items())]
    lines += ["  columns:\n"] * bool(described)
    lines += [f"    {flow(name)}: {flow(options)}\n" for name, options in described.items()]
    lines += [f"  ignore: {flow(constant)}\n"] * bool(constant)
    return lines + [f"  # {column.problem}\n" for column in columns if column.problem]


def column_options(column: Profile) -> str | dict[str, Any]:
    """Return the kind of a column, or its options if there are more, as ``data.columns`` takes them."""
    more: dict[str, Any] = {"ids": True} if column.repeats else {}
    more |= {"format": column.form} if column.form and column.is_parsed else {}
    kind = "number" if column.repeats else str(column.kind)
    return {"kind": kind, **more} if more else kind


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    """Put texts in quotes that do not begin with a letter: Hydra's YAML takes more of them for numbers, such as 1e3."""

    def represent_str(self, text: str) -> Any:
        style = '"' if not text.isprintable() else None if text[:1].isalpha() else "'"
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_str)


def flow(value: Any) -> str:
    """Return a value as one line of YAML, whose texts are no interpolations."""
    options = {"default_flow_style": True, "width": 10**9, "allow_unicode": True, "sort_keys": False}
    text: str = yaml.dump(escape_interpolation(value), Dumper=_Dumper, **options)
    return text.removesuffix("...\n").strip()
