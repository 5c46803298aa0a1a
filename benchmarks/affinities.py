"""How well one joint run tells which tasks are related: ``python benchmarks/affinities.py FOLDER --pairs 2 4 10``.

Each problem has pairs of related simulated tasks, as in ``share_pairs.py``, with tasks and rows of its own
(``data.seed``). Prints, for TAG's affinities and for the cosines of the gradients, as means over a first part of the
training: the share of the tasks to which the other task of their pair is the nearest one. Runs that are there already
are not trained again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import polars as pl
import torch
from share_pairs import PROBLEM

from mtl.analysis.conflicts import matrix, read_table
from mtl.config.check import checked_run
from mtl.config.compose import CONF
from mtl.overrides import quote_path
from mtl.pipeline.run import run

PARTS = (0.1, 0.2, 0.3, 0.4, 0.5, 1.0)
JOINT = (
    *("network=shared_bottom", "heads=per_task", "callbacks.conflict.every_n_steps=10"),
    *("callbacks.routing.figures=false", "callbacks.progress=null"),
)


def measured(folder: Path, overrides: Sequence[str]) -> pl.DataFrame:
    """Train all tasks of a problem together in ``folder``; return norms, cosines and affinities by step."""
    if not (folder / "results.json").exists():
        cfg: Any = checked_run([*JOINT, *PROBLEM, *overrides, f"paths.run_dir={quote_path(folder)}"])
        cfg.paths.run_dir = str(folder)
        with contextlib.redirect_stdout(io.StringIO()):
            run(cfg)
    return read_table(folder / "conflict.csv")


def share_at(table: pl.DataFrame, quantity: str, part: float) -> float:
    """Return the share of the tasks, ordered in pairs, whose nearest task by the mean of ``quantity`` is their mate."""
    tasks = sorted(table["task"].unique())
    early = table.filter(pl.col("step") <= pl.max_horizontal(part * pl.max("step"), pl.min("step")))
    values = matrix(early, quantity, tasks)
    values = np.where(np.isnan(values), values.T, values)  # cosines are of i < j
    both = np.where(np.eye(len(tasks), dtype=bool), -np.inf, values + values.T)
    return float((both.argmax(1) == np.arange(len(tasks)) ^ 1).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", nargs="+", type=int, default=[2, 4, 10])
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--first", type=int, default=400, help="data.seed of the first problem")
    parser.add_argument("--rho", default="0.9", help="relatedness within a pair")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"tasks,problems,quantity,{','.join(f'first {part:.0%}' for part in PARTS)}")
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        for pairs in args.pairs:
            tables = []
            for seed in range(args.first, args.first + args.problems):
                overrides = [f"data.num_pairs={pairs}", f"data.rho={args.rho}", f"data.seed={seed}"]
                tables.append(measured(args.folder.absolute() / f"pairs{pairs}_rho{args.rho}_seed{seed}", overrides))
            for quantity in ("affinity", "cosine"):
                shares = [np.mean([share_at(table, quantity, part) for table in tables]) for part in PARTS]
                print(
                    f"{2 * pairs},{len(tables)},{quantity},{','.join(f'{share:.3f}' for share in shares)}", flush=True
                )


if __name__ == "__main__":
    main()
