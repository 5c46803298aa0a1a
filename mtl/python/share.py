"""Find out from Python which tasks should share: ``mtl.share(frame, tasks)``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hydra
import polars as pl
from omegaconf import OmegaConf

from mtl.checks import require
from mtl.config.compose import CONF, own_options, split_overrides
from mtl.files.cloud import path_of
from mtl.files.escaping import escape_interpolation
from mtl.files.writing import write_text, writing
from mtl.jobs.process import prepare
from mtl.jobs.setting import derived_seed
from mtl.options import FilePath, valid
from mtl.overrides import quote_text, to_plain, write_override
from mtl.python.fit import Rows, is_path, own_hydra
from mtl.python.keywords import options_of, with_options
from mtl.use.frames import to_polars

OWN = own_options("share.yaml")


def share(
    frame: Rows,
    tasks: Mapping[str, str | Mapping[str, Any]],
    *,
    folder: str | Path = "outputs",
    options: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> dict[str, Any]:
    """Train the tasks alone, together, with gates and in groups, and return the answers: the content of share.json.

    More than 64 tasks are answered from joint runs, see ``mtl.sharing.many``.

    ``frame``, ``tasks`` and ``options``: as for ``mtl.fit``. ``keywords``: options of ``conf/share.yaml``, such as
    ``seeds=5`` and ``budget=30``, and options by their last names, as in ``mtl.fit``. The runs and ``report.html`` are
    in ``<folder>/share/<name>``; the same call goes on if it was interrupted. Raises InputError for wrong input, also
    for other rows under the same ``name``.
    """
    folder = valid(FilePath, folder, "folder")
    options = valid(Mapping[str, Any] | None, options, "options")
    share_options = {name: keywords.pop(name) for name in OWN if name in keywords}
    name = f"{share_options.get('name', 'table')}.parquet"
    path = path_of(str(frame)) if is_path(frame) else Path(folder) / "share" / name
    if not is_path(frame):
        rows = to_polars(frame)
        if path.exists():
            same = pl.read_parquet(path).equals(rows)
            require(same, f"{path} holds other rows, on which networks have been trained: give another name=")
        with writing(path) as file:
            rows.write_parquet(file)
    values = with_options({"data": "table"} | options_of(keywords, CONF), options)
    values |= {"data.path": str(path.absolute()), "data.tasks": {str(name): kind for name, kind in tasks.items()}}
    values |= {"paths.output_dir": str(folder), **share_options}
    values = escape_interpolation(to_plain(values))
    overrides = {key: write_override(key, value, os.path.isdir(CONF / key)) for key, value in values.items()}
    odd = {option: values[option] for option, text in overrides.items() if text is None}  # no override can hold these
    names = f"not possible with these names in {', '.join(odd)}; give its options in options="
    require(not odd or "experiment" not in values, f"experiment={values.get('experiment')}: {names}")
    texts = [text for text in overrides.values() if text] + (_as_file(odd, Path(folder) / "share") if odd else [])
    share_overrides, run_overrides = split_overrides(texts, OWN)
    if not share_options.get("show"):
        prepare()
    from mtl.sharing.command import share as find_sharing  # slow
    from mtl.sharing.page import write

    with own_hydra():
        return write(find_sharing(hydra.compose("share", share_overrides), run_overrides), texts)


def _as_file(values: Mapping[str, Any], folder: Path) -> list[str]:
    """Write options that no override can hold, such as a task named "é", to a file; return overrides that choose it."""
    options = OmegaConf.create()
    for option, value in values.items():
        OmegaConf.update(options, option, value)
    text = f"# @package _global_\n{OmegaConf.to_yaml(options)}"
    name = f"options_{derived_seed(0, text):08x}"  # other options are other runs
    write_text(folder / "experiment" / f"{name}.yaml", text)
    return [f"hydra.searchpath=[{quote_text(f'file://{folder.absolute()}')}]", f"experiment={name}"]
