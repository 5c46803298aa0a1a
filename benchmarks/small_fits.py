"""CPU seconds of ``mtl.fit`` on small tables, after the imports: ``python benchmarks/small_fits.py``.

One table has 1,000 rows, 20 columns and 6 targets, the other 600 rows, 400 columns and 6 targets; both are made up.
Each is trained by default, with the blend; beside it stand, as ratios, the network alone and ``recipe=table``, a wide
mixture. The first fits, which import what is slow, are not counted. One thread; CPU seconds grow if other programs run.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import polars as pl

import mtl

TABLES = {"1,000 rows, 20 columns": (1000, 20), "600 rows, 400 columns": (600, 400)}
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "network alone": {"blend": "none"},
    "recipe=table": {"blend": "none", "recipe": "table"},
}


def draw(rows: int, columns: int) -> tuple[pl.DataFrame, dict[str, str]]:
    """Return a table of numbers and categories, and three binary targets and three regressions that they determine."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, columns))
    frame = {f"x{i}": x[:, i] if i % 4 else np.digitize(x[:, i], [-1, 0, 1]).astype(str) for i in range(columns)}
    tasks = {f"y{i}": "binary" if i % 2 else "regression" for i in range(6)}
    for i, (name, kind) in enumerate(tasks.items()):
        signal = x[:, i : i + 5].sum(1) + x[:, 0] * x[:, 1] + generator.normal(size=rows)
        frame[name] = (signal > 0).astype(int) if kind == "binary" else signal
    return pl.DataFrame(frame), tasks


def seconds(frame: pl.DataFrame, tasks: dict[str, str], **options: Any) -> float:
    """Return the CPU seconds of a fit, and of the processes that it starts."""
    began = sum(os.times()[:4])
    mtl.fit(frame, tasks, progress=False, threads=1, **options)
    return sum(os.times()[:4]) - began


def main() -> None:
    for rows, columns in TABLES.values():  # imports
        frame, tasks = draw(rows // 10, columns)
        seconds(frame, tasks, max_epochs=1)
    for name, (rows, columns) in TABLES.items():
        frame, tasks = draw(rows, columns)
        times = {way: seconds(frame, tasks, **options) for way, options in WAYS.items()}
        ratios = ", ".join(f"{way} {time / times['default']:.2f}" for way, time in times.items() if way != "default")
        print(f"{name}, 6 targets: {times['default']:.1f} CPU s by default; of that: {ratios}")


if __name__ == "__main__":
    main()
