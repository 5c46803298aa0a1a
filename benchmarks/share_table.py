"""Write a table of eight tasks of mixed kinds whose groups are known: ``python benchmarks/share_table.py FILE [SEED]``.

Tasks a0 to a2 weigh the same three tanh units of the inputs, tasks b0 to b2 three others, with a correlation of 0.8
between the weights of two tasks; c0 and c1 have units of their own. Of regression are a0, b0 and c0, of three classes
b1 and c1, binary the others. Each label is missing in half of the rows.
Prints the words of ``mtl share``.
"""

from __future__ import annotations

import sys

import numpy as np
import polars as pl

ROWS, INPUTS, UNITS, NOISE, MISSING, CORRELATION = 6000, 24, 3, 1.0, 0.5, 0.8
KINDS = {"a0": "regression", "a1": "binary", "a2": "binary", "b0": "regression", "b1": "multiclass", "b2": "binary"}
KINDS |= {"c0": "regression", "c1": "multiclass"}


def main() -> None:
    """Write the table."""
    path, seed = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
    random = np.random.default_rng(seed)
    x = random.normal(size=(ROWS, INPUTS))
    units = {group: np.tanh(x @ random.normal(size=(INPUTS, UNITS)) / 3) for group in ("a", "b", "c0", "c1")}
    common = {group: random.normal(size=UNITS) for group in units}
    columns: dict[str, np.ndarray] = {f"x{column}": x[:, column] for column in range(INPUTS)}
    for task, kind in KINDS.items():
        group = task if task[0] == "c" else task[0]
        y = units[group] @ (CORRELATION**0.5 * common[group] + (1 - CORRELATION) ** 0.5 * random.normal(size=UNITS))
        y = y / y.std() + NOISE * random.normal(size=ROWS)
        if kind != "regression":
            y = np.digitize(y, [0.0] if kind == "binary" else [-0.5, 0.5]).astype(float)
        columns[task] = np.where(random.random(ROWS) < MISSING, np.nan, y)
    pl.DataFrame(columns).fill_nan(None).write_parquet(path)
    print("data=table", f"data.path={path}", *(f"data.tasks.{task}={{kind: {kind}}}" for task, kind in KINDS.items()))


if __name__ == "__main__":
    main()
