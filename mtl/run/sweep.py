"""Collect the results of a multirun in one table."""

from __future__ import annotations

import csv
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

_MANY_COLUMNS = 16
_DETAILS = ("test active_connections_", "test idle_tasks", "test pattern_jaccard")  # in summary.csv only
_PLAIN = ("parameters", "epochs", "seconds_per_epoch")


class SweepTable(Callback):
    """Print a row per setting of a multirun, with mean and standard error over its seeds, and write ``summary.csv``.

    The file has a row per job. It is rewritten after each job, so that an interrupted sweep keeps its results.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        hydra_cfg = job_return.hydra_cfg
        if hydra_cfg is None or str(hydra_cfg.hydra.mode) not in ("RunMode.MULTIRUN", "MULTIRUN"):
            return
        results = Path(hydra_cfg.hydra.runtime.output_dir) / "results.json"
        if not results.is_file():  # the job failed; Hydra reports it
            return
        record = json.loads(results.read_text())
        words = [word for word in job_return.overrides or [] if not word.startswith(("seed=", "+seed="))]
        test = {k: v for k, v in record["test"].items() if not k.startswith(("expert_share/", "experts_per_sample/"))}
        row = {"setting": " ".join(words) or record["label"], "seed": record["seed"]}
        self.rows.append(row | {f"test {k}": v for k, v in test.items()} | {k: record[k] for k in _PLAIN})
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        path = results.parent.parent / "summary.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self.rows)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if not self.rows:
            return
        words = [set(row["setting"].split(" ")) for row in self.rows]
        common = set.intersection(*words)  # show only what distinguishes the jobs
        for row in self.rows:
            row["setting"] = " ".join(word for word in row["setting"].split(" ") if word not in common) or "all"
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        columns = [name for name in names if name not in ("setting", "seed") and not name.startswith(_DETAILS)]
        if len(columns) > _MANY_COLUMNS:  # many tasks: only metrics of the whole network
            columns = [name for name in columns if "/" not in name]
        table = Table(title="mean over seeds ± standard error", title_justify="left")
        table.add_column("setting", overflow="fold")
        for column in ("seeds", *columns):
            table.add_column(column.removeprefix("test ").replace("_", " "), justify="right", overflow="fold")
        for setting in dict.fromkeys(row["setting"] for row in self.rows):
            rows = [row for row in self.rows if row["setting"] == setting]
            cells = [summarise([row.get(column) for row in rows]) for column in columns]
            table.add_row(setting, str(len(rows)), *cells)
        Console(width=None if sys.stdout.isatty() else 220).print(table)


def summarise(values: list[float | None]) -> str:
    """Return ``mean ± standard error`` of the values that are not None; only the mean if they are all equal."""
    numbers = [float(value) for value in values if value is not None]
    if not numbers:
        return "-"
    mean = statistics.fmean(numbers)
    text = (
        f"{mean:,.0f}" if mean.is_integer() and abs(mean) > 100 else f"{mean:.4g}" if abs(mean) >= 10 else f"{mean:.4f}"
    )
    if len(numbers) == 1 or max(numbers) == min(numbers):
        return text
    return f"{text} ± {statistics.stdev(numbers) / math.sqrt(len(numbers)):.2g}"
