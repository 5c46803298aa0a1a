"""Save and print the results of a run: results.json, and the table at the end of the console output."""

from __future__ import annotations

import itertools
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.text import Text
from torch import nn

from mtl import __version__, compat
from mtl.files.formatting import number
from mtl.files.literals import printable
from mtl.files.records import RESULTS, read_json
from mtl.files.tables import Table
from mtl.runs import commands
from mtl.training.metrics import higher_is_better

MOST_TASKS = 8  # up to this many tasks, each has a row
MOST_ROWS = 20  # up to this many rows, each metric of a task has one
USED = 0.01  # a task uses the experts with at least this mean weight
AVERAGES = ("average", "small_average")
ERROR = "baseline_error/"  # begins the names of the standard errors of the differences to them
BASELINE = "baseline/"  # begins the names of the metrics of other models than the network


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


def collect(cfg: Any, module: Any, data: Any, logged: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """Return the record of a run, the content of results.json: its ``own`` entries, and what was measured.

    ``logged``: the metrics of training and test, and those of the validation of the tested checkpoint. A metric that is
    undefined (NaN) on the rows becomes None. The entry ``baselines`` has the metrics of the test by model, a constant
    prediction and perhaps a quick model, and ``baseline_errors`` the standard errors of the differences of the main
    metrics to theirs; ``main_metrics`` names the main metric of each task, ``higher_is_better``
    gives the direction of each metric where it is known, and ``task_groups`` the true groups of simulated data and
    4-MNISTs.
    """
    seconds, test = logged.get("train/seconds_per_epoch"), _of("test/", logged)
    models = dict.fromkeys(name.split("/")[1] for name in logged if name.startswith(BASELINE))
    group = data.spec.extras.get("task_group")
    metrics = dict.fromkeys(name.rpartition("/")[2] for name in test)
    files = [each["name"] for each in (data.file_digests or {}).values()]
    return {
        "label": cfg.label,
        "seed": cfg.seed,
        "test": test,
        "baselines": {model: _of(f"{BASELINE}{model}/", logged) for model in models},
        "baseline_errors": {model: _of(f"{ERROR}{model}/", logged) for model in models},
        "validation": _of("val/", logged),
        "training": _of("training/", logged),
        "main_metrics": module.evaluation.main_metrics(),
        "higher_is_better": {name: better for name in metrics if (better := higher_is_better(name)) is not None},
        **own,
        "seconds_per_epoch": None if seconds is None else float(seconds),
        "threads": {"number": torch.get_num_threads()} | {n: v for n, v in os.environ.items() if n in compat.WAITING},
        "parameters": count_parameters(module.network),
        "command": shlex.join([*commands.program(), *given]) if (given := commands.LINE.given) else " ".join(sys.argv),
        "finished": datetime.now().astimezone().isoformat(timespec="seconds"),
        "data": {"rows": data.row_counts(), "files": files, "random_split": data.random_split},
        **({} if group is None else {"task_groups": dict(zip(module.tasks, group.tolist(), strict=True))}),
    }


def with_training(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return ``record`` with times and FLOPs of the training, if it had ended before the run was resumed."""
    earlier = read_json(folder / RESULTS)
    if record["seconds_per_epoch"] is not None or earlier.get("epochs") != record["epochs"]:
        return record
    kept = ("seconds_per_epoch", "training", "validation")
    return record | {name: earlier[name] for name in kept if name in earlier}


def _of(prefix: str, metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the metrics whose names start with ``prefix``, with the prefix removed; an undefined one is None."""
    own = {name.removeprefix(prefix): float(value) for name, value in metrics.items() if name.startswith(prefix)}
    return {name: None if math.isnan(value) else value for name, value in own.items()}


def print_results(
    record: Mapping[str, Any], folder: Path, advice: Sequence[str] = (), further: Sequence[str] = ()
) -> None:
    """Print the record of one run: its test loss, the metrics of each task, and where the files are.

    ``advice``: sentences. ``further``: commands that go on with the run.
    """
    console = Console(highlight=False, markup=False)
    test, checkpoint = record["test"], Path(record["checkpoint"]).name
    title = f"{record['label']}: test loss {number(test['loss'])}"
    console.print(Text.assemble("\n", (title, "bold"), f" ({checkpoint})"))
    for name in AVERAGES:
        if name in test:
            console.print(f"{name.replace('_', ' ')} of the tasks' main metrics: {number(test[name])}")
    console.print(by_task(record))
    known = any(name.startswith("expert_share/") for name in test)
    if known and len(set(record.get("task_groups", {}).values())) > 1:
        console.print(_sharing(record))
    timing = "" if record["seconds_per_epoch"] is None else f" of {number(record['seconds_per_epoch'], 2)} s"
    epochs = "1 epoch" if record["epochs"] == 1 else f"{record['epochs']} epochs"
    trained = f"{epochs}{timing}, " if record["epochs"] else ""  # none of mtl evaluate
    console.print(f"{trained}{_experts(test)}{record['parameters']:,} parameters, seed {record['seed']}")
    console.print(f"{folder}/", soft_wrap=True)
    console.print(f"  {RESULTS:<12}  all numbers of the test", style="dim")
    if any(folder.glob("routing/*.png")):
        console.print(f"  {'routing/':<12}  pictures of the experts that the tasks use", style="dim")
    for sentence in advice:
        console.print(printable(sentence))
    if further:
        console.print("next:")
    for command in further:
        console.print(f"  {command}", soft_wrap=True)


def _experts(test: Mapping[str, Any]) -> str:
    """Return how many experts a task uses, of how many if that is known; nothing without a single mixture."""
    used = test.get("experts_per_sample")
    if used is None:
        return ""
    known = {name.rpartition("/")[2] for name in test if name.startswith("expert_share/")}
    of, mean = f" of {len(known)}" if known else "", "" if used == round(used) else " on average"
    return f"each task uses {number(used, 3)}{of} experts{mean}, "


def by_task(record: Mapping[str, Any]) -> Table | str:
    """Return a table of the metrics of the tasks, beside those of the baselines; with many tasks, lines on their means.

    If it were long, it has the main metrics only.
    """
    models, mains = {"network": record["test"], **record.get("baselines", {})}, record["main_metrics"]
    if len(mains) > MOST_TASKS:
        return "\n".join(_extremes(record, metric) for metric in dict.fromkeys(mains.values()))
    metrics = {task: list(dict.fromkeys([main, *metrics_of(record["test"], task)])) for task, main in mains.items()}
    if sum(map(len, metrics.values())) > MOST_ROWS:
        metrics = {task: names[:1] for task, names in metrics.items()}
    rows = [
        ["" if place else task, metric, *(number(values.get(f"{task}/{metric}")) for values in models.values())]
        for task, names in metrics.items()
        for place, metric in enumerate(names)
    ]
    epochs = {task: each["epoch"] for task, each in record.get("best_epochs", {}).items()}
    if len(set(epochs.values())) < 2:
        return Table(["task", "metric", *models], rows)
    rows = [[*row, f"{epochs[row[0]]:.0f}" if row[0] in epochs else ""] for row in rows]
    return Table(["task", "metric", *models, "best epoch"], rows)


def metrics_of(values: Iterable[str], task: str) -> list[str]:
    """Return the metrics of a task, without its loss, among names such as ``TASK/METRIC``."""
    pairs = (name.rpartition("/")[::2] for name in values)
    return [metric for owner, metric in pairs if owner == task and metric != "loss"]


def _extremes(record: Mapping[str, Any], metric: str) -> str:
    """Return a line on a main metric: its mean over the tasks that have it, the best task and the worst; baselines."""
    tasks = [task for task, main in record["main_metrics"].items() if main == metric]
    known = {task: value for task in tasks if (value := record["test"].get(f"{task}/{metric}")) is not None}
    if not known:
        return f"{metric}: undefined for all tasks that have it"
    ranked = sorted(known, key=known.__getitem__, reverse=bool(higher_is_better(metric)))
    best, worst = (f"{number(known[task])} ({task})" for task in (ranked[0], ranked[-1]))
    count = f"{len(known)}" if len(known) == len(tasks) else f"{len(known)} of {len(tasks)}"
    line = f"{metric}: mean {number(statistics.fmean(known.values()))} of {count} tasks; best {best}, worst {worst}"
    means = []
    for model, values in record.get("baselines", {}).items():
        theirs = [values.get(f"{task}/{metric}") for task in known]
        if None not in theirs:
            means.append(f"{model} {number(statistics.fmean(theirs))}")
    return f"{line}\n  mean of other models: {', '.join(means)}" if means else line


def _sharing(record: Mapping[str, Any]) -> Group:
    """Return a table of the tasks that use each expert, beside the groups from which simulated data drew the tasks."""
    groups: dict[str, int] = record["task_groups"]
    numbers = sorted(set(groups.values()))
    used: dict[int, list[str]] = {}
    for name, share in record["test"].items():
        if name.startswith("expert_share/") and (share or 0.0) >= USED:
            _, task, expert = name.split("/")
            used.setdefault(int(expert), []).append(task)
    rows = []
    for expert in sorted(used):
        names = [[task for task in used[expert] if groups[task] == group] for group in numbers]
        rows.append([str(expert), *(" ".join(name.removeprefix("task_") for name in each) or "-" for each in names)])
    table = Table(["expert", *(f"true group {n}" for n in numbers)], rows, "\ntasks that use each expert")
    pairs = list(itertools.combinations(groups, 2))
    together = {pair for tasks in used.values() for pair in itertools.combinations(tasks, 2)}
    counted = []
    for same, where in ((True, "of one group"), (False, "of different groups")):
        kind = [pair for pair in pairs if (groups[pair[0]] == groups[pair[1]]) == same]
        counted += [f"{len(together.intersection(kind))} of {len(kind)} pairs {where}"] if kind else []
    return Group(table, f"share an expert: {', '.join(counted)}")
