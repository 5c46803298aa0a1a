"""Save and print the results of a run: results.json, and the table at the end of the console output."""

from __future__ import annotations

import math
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from mtl import __version__
from mtl.records import RESULTS
from mtl.training.metrics import higher_is_better

MOST_TASKS = 20  # tasks in the table of a run
MOST_COLUMNS = 6  # metrics side by side; they fit into 80 characters


def count_parameters(network: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)


def versions() -> dict[str, str | None]:
    """Return the versions of the software that results may depend on, and the commit of mtl's own checkout."""
    return {
        "mtl": __version__,
        "commit": commit(Path(__file__).parents[2]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pytorch_lightning": metadata.version("pytorch-lightning"),
    }


def commit(checkout: Path) -> str | None:
    """Return the Git commit of a folder, followed by "-dirty" if files differ; None if it is not a checkout."""
    if not (checkout / ".git").exists():  # such as where a wheel is installed
        return None
    describe = ["describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    try:
        command = ["git", "--no-optional-locks", "-C", str(checkout), *describe]
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def collect(
    label: str,
    seed: int,
    checkpoint: str,
    test: Mapping[str, float],
    fit: Mapping[str, Any],
    network: nn.Module,
    epochs: int,
    best: float | None,
    software: Mapping[str, str | None],
    monitor: str = "val/loss",
    main_metrics: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the record of a run, the content of results.json.

    ``test`` and ``fit`` are the metrics logged while testing and training; from ``fit``, the record takes the seconds
    per epoch and all values named ``training/NAME``. ``best`` is the best value of ``monitor``; ``software`` is the
    result of ``versions`` at the start of the run. A metric that is undefined (NaN) on the test rows becomes None. The
    entry ``main_metrics`` names the main metric of each task. The entry ``higher_is_better`` gives the direction of
    each metric where it is known.
    """
    seconds = fit.get("train/seconds_per_epoch")
    metrics = dict.fromkeys(name.rpartition("/")[2] for name in test)
    return {
        "label": label,
        "seed": seed,
        "test": _of("test/", test),
        "training": _of("training/", fit),
        "main_metrics": dict(main_metrics or {}),
        "higher_is_better": {name: better for name in metrics if (better := higher_is_better(name)) is not None},
        f"best_{monitor.replace('/', '_')}": best,
        "epochs": epochs,
        "seconds_per_epoch": None if seconds is None else float(seconds),
        "parameters": count_parameters(network),
        "checkpoint": checkpoint,
        "command": " ".join(sys.argv),
        "versions": dict(software),
    }


def _of(prefix: str, metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the metrics whose names start with ``prefix``, with the prefix removed; an undefined one is None."""
    own = {name.removeprefix(prefix): float(value) for name, value in metrics.items() if name.startswith(prefix)}
    return {name: None if math.isnan(value) else value for name, value in own.items()}


def number(value: float | None) -> str:
    """Return ``value`` with four decimals, or with none if it is 1000 or more; "-" if it is undefined (None)."""
    return "-" if value is None else f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"


def print_results(record: Mapping[str, Any], run_dir: Path) -> None:
    """Print the record of one run: a row for each task, then the metrics of the whole network."""
    test = {name: value for name, value in record["test"].items() if not name.startswith("expert_share/")}
    tasks: dict[str, dict[str, float | None]] = {}
    overall: dict[str, float | None] = {}
    for name, value in test.items():
        if name.startswith("experts_per_sample/"):
            tasks.setdefault(name.split("/", 1)[1], {})["experts"] = value
        elif "/" in name:
            task, metric = name.rsplit("/", 1)
            tasks.setdefault(task, {})[metric] = value
        else:
            overall[name] = value
    columns = list(dict.fromkeys(metric for row in tasks.values() for metric in row))
    table = Table(title=f"{record['label']}: test of {Path(record['checkpoint']).name}", title_justify="left")
    shown = list(tasks.items())[:MOST_TASKS]
    rows = {task: [number(row[column]) if column in row else "" for column in columns] for task, row in shown}
    first = "task"
    if len(columns) > max(MOST_COLUMNS, len(shown)):  # too many to stand side by side: a row for each metric
        turned = {name: list(row) for name, *row in zip(columns, *rows.values(), strict=True)}
        first, columns, rows = "metric", list(rows), turned
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    for name, row in rows.items():
        table.add_row(name, *row)
    console = Console()
    console.print(table)
    if len(tasks) > len(shown):
        console.print(f"... and {len(tasks) - len(shown)} more tasks")
    for name, value in overall.items():
        console.print(f"test {name.replace('_', ' ')}: [bold]{number(value)}[/bold]")
    for name, value in record.get("training", {}).items():
        console.print(f"training {name.replace('_', ' ')}: {number(value)}")
    timing = "" if record["seconds_per_epoch"] is None else f"{record['seconds_per_epoch']:.1f} s per epoch, "
    epochs = "1 epoch" if record["epochs"] == 1 else f"{record['epochs']} epochs"
    console.print(f"{epochs}, {timing}{record['parameters']:,} parameters, seed {record['seed']}")
    console.print(Text(str(run_dir / RESULTS), style="dim"), soft_wrap=True, highlight=False)
