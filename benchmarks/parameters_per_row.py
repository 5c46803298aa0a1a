"""Train networks of several sizes on small simulated tables: above which parameters per row does size not help?

``python benchmarks/parameters_per_row.py`` prints, for each number of rows and width, the parameters per training row
besides embeddings, the mean test metrics of the network alone over two seeds, and the seconds of both runs.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import polars as pl

import mtl

ROWS, WIDTHS, TEST_ROWS = (200, 1000), (16, 64, 256, 1024), 4000
TASKS = {"a": "binary", "b": "regression"}


def simulated(rows: int) -> pl.DataFrame:
    """Return rows of eight numbers and a category, with two labels that depend on them in a related, noisy way."""
    draw = np.random.default_rng(rows)
    x, city = draw.normal(size=(rows, 8)), draw.integers(0, 6, size=rows)
    curved = np.stack([np.sin(2 * x[:, 0]) * x[:, 1], np.abs(x[:, 2])], axis=1)
    score = x @ draw.normal(size=(8, 2)) / 2 + draw.normal(size=(6, 2))[city] + curved + draw.normal(size=(rows, 2))
    inputs = {f"x{index}": x[:, index] for index in range(8)} | {"city": [f"city {index}" for index in city]}
    return pl.DataFrame(inputs | {"a": (score[:, 0] > 0).astype(int), "b": score[:, 1]})


def main() -> None:
    for rows in ROWS:
        table = simulated(rows + TEST_ROWS)
        for width in WIDTHS:
            options = {"recipe.expert_units": [width], "recipe.head_units": [min(width, 256)]}
            keywords = {"network": "mmoe", "gate": "softmax", "recipe": "table", "blend": "none", "max_epochs": 60}
            began = time.monotonic()
            models = [
                mtl.fit(table[:rows], TASKS, test=table[rows:], valid=0.2, seed=seed, options=options, **keywords)
                for seed in (0, 1)
            ]
            weights = {n: p.numel() for n, p in models[0].core.named_parameters() if not n.startswith("bottom.")}
            auroc, r2 = (statistics.fmean(model.metrics[name] for model in models) for name in ("a/auroc", "b/r2"))
            per_row = sum(weights.values()) / (0.8 * rows)
            print(
                f"{rows} rows, width {width}: {per_row:,.0f} parameters a row, auroc {auroc:.3f}, r2 {r2:.3f}, "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
