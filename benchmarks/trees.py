"""Train gradient-boosted trees for each task of a table: ``python benchmarks/trees.py``.

The table is that of ``tests/messy.py``. For each seed, scikit-learn's HistGradientBoosting trains once per task on the
split and the parsed columns of a network: a category with up to 255 values as a category, others by its TargetEncoder.
Trees stop early on a tenth of the training rows. Prints the command that trains networks on the table.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from common import ROOT
from mtl.data_modules.table import TableDataModule
from mtl.data_modules.tables.encoder import NUMERIC
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.metrics import accuracy_score, average_precision_score, mean_squared_error, r2_score, roc_auc_score
from sklearn.preprocessing import TargetEncoder

from tests.messy import TASKS, messy

METRICS = {"churned": ["auroc"], "fraud": ["auroc", "auprc"], "plan": ["accuracy"], "spend": ["mse", "r2"]}
LARGEST = 255  # categories of HistGradientBoosting


def overrides(path: Path) -> list[str]:
    """Return the overrides that train a network on the table."""
    tasks = (f"{name}: {{kind: {task['kind']}, metrics: [{', '.join(METRICS[name])}]}}" for name, task in TASKS.items())
    return ["data=table", f"data.path={path}", f"data.tasks={{{', '.join(tasks)}}}"]


def features(data: TableDataModule, split: str) -> tuple[Any, Any, Any]:
    """Return the numbers, the categories with up to ``LARGEST`` values and the others of a split, each ``[N, D]``."""
    inputs, sizes = (
        data.splits[split].inputs,
        {name: getattr(column, "size", 0) for name, column in data.spec.inputs.items()},
    )
    few = [inputs[name].numpy() for name in inputs if 0 < sizes[name] <= LARGEST]
    many = [inputs[name].numpy() for name in inputs if sizes[name] > LARGEST]
    return inputs[NUMERIC].numpy(), np.column_stack(few), np.column_stack(many)


def trees(data: TableDataModule, seed: int) -> dict[str, float]:
    """Train trees for each task; return their test metrics by task and name."""
    (x, few, many), (x_new, few_new, many_new), metrics = features(data, "train"), features(data, "test"), {}
    kinds = np.r_[np.ones(few.shape[1]), np.zeros(x.shape[1])].astype(bool)
    for task in data.spec.tasks:
        y, truth = (data.splits[split].targets[task.name].double().numpy() for split in ("train", "test"))
        labelled, there = (np.isfinite(labels) & (labels > -100) for labels in (y, truth))
        kind = HistGradientBoostingRegressor if task.kind == "regression" else HistGradientBoostingClassifier
        np.random.seed(seed)
        encoder = TargetEncoder()
        encoded = encoder.fit_transform(many[labelled], y[labelled])  # cross-fitted
        mask = np.r_[kinds, np.zeros(encoded.shape[1], bool)]
        model = kind(categorical_features=mask, early_stopping=True, random_state=seed)
        model.fit(np.hstack([few[labelled], x[labelled], encoded]), y[labelled])
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
        metrics |= {f"{task.name}/{name}": compute[name]() for name in METRICS[task.name]}
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "benchmarks" / "trees")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path, seeds = args.out.absolute() / "messy.csv", range(1, args.seeds + 1)
    messy().write_csv(path)
    print(shlex.join(["mtl", "train", "-m", "gate=softmax", *overrides(path), f"seed={','.join(map(str, seeds))}"]))
    data = TableDataModule(str(path), TASKS, batch_size=512)
    data.setup()
    table = pl.DataFrame([{"seed": seed} | trees(data, seed) for seed in seeds])
    print(table.write_csv())
    for name in table.columns[1:]:
        print(f"{name}: {table[name].mean():.4f} ± {table[name].std() / args.seeds**0.5:.4f}")


if __name__ == "__main__":
    main()
