"""Find out from Python which tasks should share: ``mtl.share(frame, tasks)``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from mtl.checks import require
from mtl.cli.explain import CONF
from mtl.cli.share import OWN, run
from mtl.config.words import options_of, plain, word
from mtl.literals import escaped
from mtl.python.fit import Rows, is_path, own_hydra
from mtl.use.frames import to_polars
from mtl.writing import writing


def share(
    frame: Rows,
    tasks: Mapping[str, str | Mapping[str, Any]],
    *,
    folder: str | Path = "outputs",
    options: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> dict[str, Any]:
    """Train the tasks alone, together, with gates and in groups, and return the answers: the content of share.json.

    ``frame``, ``tasks`` and ``options``: as for ``mtl.fit``. ``keywords``: options of ``conf/share.yaml``, such as
    ``seeds=5`` and ``budget=30``, and options by their last names, as in ``mtl.fit``. The runs and ``report.html`` are
    in ``<folder>/share/<name>``; the same call goes on if it was interrupted. Raises InputError for wrong input, also
    for other rows under the same ``name``.
    """
    own = {name: keywords.pop(name) for name in OWN if name in keywords}
    path = Path(str(frame)) if is_path(frame) else Path(folder) / "share" / f"{own.get('name', 'table')}.parquet"
    if not is_path(frame):
        rows = to_polars(frame)
        if path.exists():
            same = pl.read_parquet(path).equals(rows)
            require(same, f"{path} holds other rows, on which networks have been trained: give another name=")
        with writing(path) as file:
            rows.write_parquet(file)
    values = {"data": "table", **options_of(keywords, CONF), **(options or {}), "data.path": str(path.absolute())}
    values |= {"data.tasks": {str(name): kind for name, kind in tasks.items()}, "paths.output_dir": str(folder), **own}
    values = escaped(plain(values))
    with own_hydra():
        return run([str(word(option, value, (CONF / option).is_dir())) for option, value in values.items()])
