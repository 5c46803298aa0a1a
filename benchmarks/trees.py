"""Compare a network for all tasks of a table with gradient-boosted trees for each: ``python benchmarks/trees.py``.

The table is that of ``tests/messy.py``. For each seed, ``train.py`` trains a network with the given words, and
scikit-learn's HistGradientBoosting trains once per task on the same split and the same parsed columns: a category with
up to 255 values as a category, others by its TargetEncoder. Trees stop early on a tenth of the training rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT
from mtl.data_modules.table import TableDataModule
from mtl.data_modules.tables.encoder import NUMERIC
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.metrics import accuracy_score, average_precision_score, mean_squared_error, r2_score, roc_auc_score
from sklearn.preprocessing import TargetEncoder

from mtl.writing import write_csv
from tests.messy import TASKS, messy

METRICS = {"churned": ["auroc"], "fraud": ["auroc", "auprc"], "plan": ["accuracy"], "spend": ["mse", "r2"]}
LARGEST = 255  # categories of HistGradientBoosting


def words(path: Path) -> list[str]:
    """Return the words that train a network on the table."""
    tasks = (f"{name}: {{kind: {task['kind']}, metrics: [{', '.join(METRICS[name])}]}}" for name, task in TASKS.items())
    return ["data=table", f"data.path={path}", f"data.tasks={{{', '.join(tasks)}}}"]


def network(path: Path, seed: int, folder: Path, more: list[str]) -> dict[str, float]:
    """Train a network; return its test metrics by task and name."""
    command = [sys.executable, str(ROOT / "train.py"), *words(path), f"seed={seed}", f"hydra.run.dir={folder}", *more]
    if not (folder / "results.json").exists():
        subprocess.run(command, check=True, cwd=ROOT)
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())["test"]
    return {f"{task}/{name}": found[f"{task}/{name}"] for task, names in METRICS.items() for name in names}


def features(data: TableDataModule, split: str) -> tuple[Any, Any, Any]:
    """Return the numbers, the categories with up to ``LARGEST`` values and the others of a split, each ``[N, D]``."""
    inputs, sizes = data.splits[split].inputs, {name: getattr(one, "size", 0) for name, one in data.spec.inputs.items()}
    few = [inputs[name].numpy() for name in inputs if 0 < sizes[name] <= LARGEST]
    many = [inputs[name].numpy() for name in inputs if sizes[name] > LARGEST]
    return inputs[NUMERIC].numpy(), np.column_stack(few), np.column_stack(many)


def trees(data: TableDataModule, seed: int) -> dict[str, float]:
    """Train trees for each task; return their test metrics by task and name."""
    (x, few, many), (x_new, few_new, many_new), found = features(data, "train"), features(data, "test"), {}
    kinds = np.r_[np.ones(few.shape[1]), np.zeros(x.shape[1])].astype(bool)
    for task in data.spec.tasks:
        y, truth = (data.splits[split].targets[task.name].double().numpy() for split in ("train", "test"))
        known, there = (np.isfinite(labels) & (labels > -100) for labels in (y, truth))
        kind = HistGradientBoostingRegressor if task.kind == "regression" else HistGradientBoostingClassifier
        np.random.seed(seed)
        encoder = TargetEncoder()
        encoded = encoder.fit_transform(many[known], y[known])  # cross-fitted
        mask = np.r_[kinds, np.zeros(encoded.shape[1], bool)]
        model = kind(categorical_features=mask, early_stopping=True, random_state=seed)
        model.fit(np.hstack([few[known], x[known], encoded]), y[known])
        rows, truth = np.hstack([few_new, x_new, encoder.transform(many_new)])[there], truth[there]
        values = model.predict(rows)
        scores = model.predict_proba(rows)[:, 1] if task.kind == "binary" else values
        compute = {
            "auroc": lambda truth=truth, scores=scores: roc_auc_score(truth, scores),
            "auprc": lambda truth=truth, scores=scores: average_precision_score(truth, scores),
            "accuracy": lambda truth=truth, values=values: accuracy_score(truth, values),
            "mse": lambda truth=truth, values=values: mean_squared_error(truth, values),
            "r2": lambda truth=truth, values=values: r2_score(truth, values),
        }
        found |= {f"{task.name}/{name}": compute[name]() for name in METRICS[task.name]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "outputs" / "benchmarks" / "trees", help="folder of the runs"
    )
    given, more = parser.parse_known_args()  # more words of train.py
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out.absolute() / "messy.csv"
    messy().write_csv(path)
    data = TableDataModule(str(path), TASKS, batch_size=512)
    data.setup()
    seeds = range(1, given.seeds + 1)
    found = {
        "network": [network(path, seed, given.out.absolute() / f"seed_{seed}", more) for seed in seeds],
        "trees": [trees(data, seed) for seed in seeds],
    }
    write_csv(given.out / "trees.csv", ["model", "seed", *found["trees"][0]], (
        [model, seed, *row.values()] for model, rows in found.items() for seed, row in zip(seeds, rows, strict=True)
    ))  # fmt: skip
    print(f"| model | {' | '.join(found['trees'][0])} |\n|---|{'---|' * len(found['trees'][0])}")
    for model, rows in found.items():
        columns = [[row[name] for row in rows] for name in rows[0]]
        cells = (f"{statistics.mean(c):.4f} ± {statistics.stdev(c) / len(c) ** 0.5:.4f}" for c in columns)
        print(f"| {model} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
