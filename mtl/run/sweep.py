"""Collect the results of a multirun in tables."""

from __future__ import annotations

import csv
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

_MOST_TASKS = 12  # that the closing table shows
_WIDE = 160  # columns of a console that has room for all of the first table
_NARROW = ("test loss", "test average", "test experts_per_sample", "parameters", "epochs", "seconds_per_epoch")
_DETAILS = ("test active_connections_", "test idle_tasks", "test pattern_jaccard")  # in summary.csv only
_PLAIN = ("parameters", "epochs", "seconds_per_epoch")
_Row = dict[str, Any]


class SweepTable(Callback):
    """Print tables of a multirun, and write ``summary.csv`` with a row per job.

    The first table has a row for each setting, with mean and standard error over its seeds of what concerns the whole
    network. The second one has a row for each task and setting: the main metric of the task on the test rows, and the
    difference to the first setting, the mean and standard error of the differences between runs of the same seed. The
    file is rewritten after each job, so that an interrupted sweep keeps its results.
    """

    def __init__(self) -> None:
        self.rows: list[_Row] = []
        self.main: dict[str, str] = {}  # the main metric of each task

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
        self.main |= {task: metric for task, metric in record["main_metrics"].items() if task not in self.main}
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
        names = [[word for word in row["setting"].split(" ") if word not in common] or ["all"] for row in self.rows]
        keys = {word.partition("=")[0] for name in names for word in name}
        header = "setting"
        if len(keys) == 1 and len(words) > 1 and all(len(name) == 1 and "=" in name[0] for name in names):
            header = keys.pop()  # this option alone distinguishes the jobs: show its values
            names = [[name[0].partition("=")[2]] for name in names]
        settings: dict[str, list[_Row]] = {}
        for name, row in zip(names, self.rows, strict=True):
            settings.setdefault(" ".join(name), []).append(row)
        console = Console(width=None if sys.stdout.isatty() else 220)
        console.print(network_table(settings, header, console.width))
        console.print(task_table(settings, header, dict(list(self.main.items())[:_MOST_TASKS])))
        if len(self.main) > _MOST_TASKS:
            console.print(f"... and {len(self.main) - _MOST_TASKS} more tasks, in summary.csv")


def network_table(settings: dict[str, list[_Row]], header: str, width: int) -> Table:
    """Return a table with a row for each setting, and the columns that concern no single task, as far as they fit."""
    names = dict.fromkeys(name for rows in settings.values() for row in rows for name in row)
    columns = [name for name in names if name not in ("setting", "seed") and not name.startswith(_DETAILS)]
    columns = [name for name in columns if "/" not in name and (width >= _WIDE or name in _NARROW)]
    table = Table(title="mean over seeds ± standard error", title_justify="left")
    table.add_column(header, overflow="fold")
    for column in ("seeds", *columns):
        table.add_column(column.removeprefix("test ").replace("_", " "), justify="right", overflow="fold")
    for setting, rows in settings.items():
        cells = [summarise([row.get(column) for row in rows]) for column in columns]
        table.add_row(setting, str(len(rows)), *cells)
    return table


def task_table(settings: dict[str, list[_Row]], header: str, main: dict[str, str]) -> Table:
    """Return a table with a row for each task and setting: its main metric, and the difference to the first setting.

    ``main``: the main metric of each task; an arrow says whether higher or lower is better.
    """
    from mtl.training.metrics import higher_is_better  # imports torch: not before the first job

    first = next(iter(settings))
    table = Table(title="main metric of each task on the test rows", title_justify="left")
    table.add_column("task", overflow="fold")
    table.add_column(header, overflow="fold")
    table.add_column("test", justify="right")
    table.add_column(f"minus {first}" if len(settings) > 1 else "", justify="right")
    for task, metric in main.items():
        column = f"test {task}/{metric}"
        arrow = {True: " ↑", False: " ↓", None: ""}[higher_is_better(metric)]
        for setting, rows in settings.items():
            title = f"{task} {metric}{arrow}" if setting == first else ""
            difference = "" if setting == first else summarise(differences(rows, settings[first], column), sign="+")
            table.add_row(title, setting, summarise([row.get(column) for row in rows]), difference)
        table.add_section()
    return table


def differences(rows: Sequence[_Row], others: Sequence[_Row], column: str) -> list[float | None]:
    """Return ``column`` in ``rows`` minus that in the row of ``others`` with the same seed, where both have a value."""
    theirs = {row["seed"]: row.get(column) for row in others}
    pairs = [(row.get(column), theirs.get(row["seed"])) for row in rows]
    return [None if one is None or other is None else one - other for one, other in pairs]


def summarise(values: Sequence[float | None], sign: str = "") -> str:
    """Return ``mean ± standard error`` of the values that are not None; only the mean if they are all equal.

    ``sign="+"``: a positive mean has a plus sign.
    """
    numbers = [float(value) for value in values if value is not None]
    if not numbers:
        return "-"
    mean = statistics.fmean(numbers)
    whole = mean.is_integer() and abs(mean) > 100
    text = f"{mean:{sign},.0f}" if whole else f"{mean:{sign}.4g}" if abs(mean) >= 10 else f"{mean:{sign}.4f}"
    if len(numbers) == 1 or max(numbers) == min(numbers):
        return text
    return f"{text} ± {statistics.stdev(numbers) / math.sqrt(len(numbers)):.2g}"
