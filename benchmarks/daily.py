"""Go on with yesterday's network, or train anew each day: ``python benchmarks/daily.py``.

The ratings of MovieLens 100K, or 1M (``--data data/ml-1m``), in the order of their times. The first 60 % train the
first network. Then eight steps of 4 % each: "anew" trains on all ratings before the step, "continued" on the latest 4 %
from the weights of the step before (``start_from``), "careful" too, but with a tenth of the learning rate and for 3
epochs at most, and "first" stays as it is. Each predicts the 4 % that follow; a random tenth of the rows of a training
chooses its epoch and calibrates its probabilities, and "before" is without the calibration. The means at the end are of
the last four steps, since the options of "careful" were chosen on the first four.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import torch
from new_users import ratings

import mtl

STEPS, CHOSEN, FIRST, SHARE = 8, 4, 0.6, 0.04
LIKED = ["logloss", "auroc", "gauc", "normalized_entropy", "calibration_ratio"]
TASKS = {"liked": {"kind": "binary", "metrics": LIKED}, "rating": "regression"}
CAREFUL = {"lr": 1e-4, "max_epochs": 3}
CALIBRATED = ("logloss", "normalized_entropy", "calibration_ratio")


def trained(way: str, rows: pl.DataFrame, ends: list[int], step: int, folder: Path, seed: int) -> Any:
    """Return the network that predicts the rows after ``step``; ``folder`` has the runs of earlier steps."""
    options: dict[str, Any] = {"data.group_column": "user", "blend": "none"}
    options["data.columns"] = {"user": "category", "item": "category"}
    options["calibrate"] = True
    common = {"seed": seed, "accelerator": "cpu", "progress": False, "options": options}
    if step == 0:
        return mtl.fit(rows[: ends[0]], TASKS, folder=folder / "0", **common)
    if way == "first":
        return mtl.load(folder / "0")
    if way == "anew":
        return mtl.fit(rows[: ends[step]], TASKS, **common)
    before = folder / ("0" if step == 1 else f"{step - 1} {way}")
    options = common | {"folder": folder / f"{step} {way}", "start_from": str(before)}
    return mtl.fit(rows[ends[step - 1] : ends[step]], TASKS, **options, **(CAREFUL if way == "careful" else {}))


def tested(model: Any, rows: pl.DataFrame) -> dict[str, float]:
    """Return the metrics of ``rows``, and those without calibration."""
    raw = replace(model, spec=replace(model.spec, tasks=[replace(task, calibration=None) for task in model.spec.tasks]))
    metrics, before = model.evaluate(rows), raw.evaluate(rows)
    values = {name: metrics[f"liked/{name}"] for name in LIKED} | {"mse": metrics["rating/mse"]}
    return values | {f"{name} before": before[f"liked/{name}"] for name in CALIBRATED}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data/ml-100k"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = ratings(args.data)
    ends = [round((FIRST + SHARE * step) * len(rows)) for step in range(STEPS + 2)]
    metrics_by_way: dict[str, list[dict[str, float]]] = {"first": [], "continued": [], "careful": [], "anew": []}
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            trained("first", rows, ends, 0, Path(folder), seed)
            for step, way in itertools.product(range(1, STEPS + 1), metrics_by_way):
                start = time.process_time()
                model = trained(way, rows, ends, step, Path(folder), seed)
                seconds = time.process_time() - start
                values = tested(model, rows[ends[step] : ends[step + 1]]) | {"CPU seconds": seconds}
                print(f"seed {seed}, step {step}, {way}: {shown(values)}", flush=True)
                metrics_by_way[way] += [values] if step > CHOSEN else []
    for way, runs in metrics_by_way.items():
        print(f"{way}: {shown({name: statistics.fmean(run[name] for run in runs) for name in runs[0]})}")


def shown(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items())


if __name__ == "__main__":
    main()
