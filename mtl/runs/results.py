"""Save and print the results of a run: results.json, and the table at the end of the console output."""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console, Group
from rich.text import Text
from torch import nn

from mtl import __version__, compat
from mtl.checks import join_names
from mtl.files.escaping import escape_control
from mtl.files.formatting import number
from mtl.files.run_files import RESULTS, read_json
from mtl.files.tables import Table
from mtl.loggers.base import MAX_LISTED_TASKS
from mtl.runs.test_rows import count_labels, describe_tested_epoch, labels_by_task, measured_by_task
from mtl.training.bootstrap import MIN_ROWS
from mtl.training.measurements import BLEND, NETWORK, Key, Measurements
from mtl.training.metrics import higher_is_better
from mtl.types.metrics import OF_FEW_POSITIVES, SHOWN_FIRST

MOST_TASKS = 8  # of more tasks, only the means are printed or shown
NUM_RANKED = 10  # best tasks, and worst ones
QUARTILES = {"least": 0.0, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "most": 1.0}
MOST_ROWS = 20  # a table that would have more rows has the main metrics only
USED = 0.01  # a task uses the experts with at least this mean weight
OF_TOP = (
    "recall@10%: the share of the positives among the 10 % of the rows with the highest predictions. lift@10%: how "
    "many times more frequent positives are there than in all rows."
)
AVERAGES = ("average", "small_average")


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


def collect(cfg: Any, module: Any, data: Any, measured: Measurements, **entries: Any) -> dict[str, Any]:
    """Return the record of a run, the content of results.json: further ``entries``, and what was ``measured``.

    ``numbers``: see ``Measurements.plain``. ``main_metrics`` names the main metric of each task, and ``task_groups``
    gives the true groups of simulated data and 4-MNISTs.
    """
    group = data.spec.ground_truth.get("task_group")
    labels = count_labels([*module.tasks.values()], module.predictions.get(("test", NETWORK), {}))
    files = [file["name"] for file in (data.file_digests or {}).values()]
    return {
        "run_name": cfg.run_name,
        "seed": cfg.seed,
        "numbers": measured.plain(),
        "main_metrics": module.evaluation.main_metrics(),
        **entries,
        "threads": {"number": torch.get_num_threads()} | {n: v for n, v in os.environ.items() if n in compat.WAITING},
        "parameters": count_parameters(module.network),
        "finished": datetime.now().astimezone().isoformat(timespec="seconds"),
        "data": {"rows": data.row_counts(), "files": files, "random_split": data.random_split, **labels},
        **({} if group is None else {"task_groups": dict(zip(module.tasks, group.tolist(), strict=True))}),
    }


def with_training(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return ``record`` with times and numbers of the training, if it had ended before the run was resumed."""
    earlier = read_json(folder / RESULTS)
    if record["seconds_per_epoch"] is not None or earlier.get("epochs") != record["epochs"]:
        return record
    kept = {split: earlier["numbers"][split] for split in ("training",) if split in earlier.get("numbers", {})}
    return record | {"seconds_per_epoch": earlier.get("seconds_per_epoch"), "numbers": record["numbers"] | kept}


def print_results(
    record: Mapping[str, Any], folder: Path, advice: Sequence[str] = (), further: Sequence[str] = ()
) -> None:
    """Print the record of one run: its test loss, the metrics of each task, and where the files are.

    ``advice``: sentences. ``further``: commands that go on with the run.
    """
    console = Console(highlight=False, markup=False)
    measured, checkpoint = Measurements.from_plain(record["numbers"]), Path(record["checkpoint"]).name
    in_use = measured.in_use
    loss = "test loss of the blend" if in_use == BLEND else "test loss"
    title = f"{record['run_name']}: {loss} {number(measured.value('', 'loss', model=in_use))}"
    console.print(Text.assemble("\n", (title, "bold"), f" ({checkpoint})"))
    for name in AVERAGES:
        if Key("test", "", name, in_use) in measured:
            value = number(measured.value("", name, model=in_use))
            console.print(f"{name.replace('_', ' ')} of the tasks' main metrics: {value}")
    table = by_task(measured, record["main_metrics"], record.get("best_epochs", {}))
    table = table.narrowed(console.width) if isinstance(table, Table) else table
    console.print(table, *(table.notes if isinstance(table, Table) else ()), sep="\n")
    for ranking in rankings(measured, record["main_metrics"], record.get("data", {}).get("test_labels", {})):
        console.print("", ranking, *ranking.notes, sep="\n")
    for part in (labels_by_task(record.get("data", {})), describe_tested_epoch(record), *measured_by_task(record)):
        if isinstance(part, Table):
            part = part.narrowed(console.width)
            console.print(part, *part.notes, sep="\n")
        elif part:
            console.print(part)
    named = {key: value for key, (value, _) in measured.items() if key.metric.startswith("expert_share_")}
    # Mean weights of the experts of a single mixture, by task and expert
    shares = {(key.task, int(key.metric.rpartition("_")[2])): value for key, value in named.items()}
    groups = record.get("task_groups", {})
    if shares and len(set(groups.values())) > 1:
        console.print(_sharing(shares, groups))
    timing = "" if record["seconds_per_epoch"] is None else f" of {number(record['seconds_per_epoch'], 2)} s"
    epochs = "1 epoch" if record["epochs"] == 1 else f"{record['epochs']} epochs"
    trained = f"{epochs}{timing}, " if record["epochs"] else ""  # none of mtl evaluate
    console.print(f"{trained}{_experts(measured, shares)}{record['parameters']:,} parameters, seed {record['seed']}")
    console.print(f"{folder}/", soft_wrap=True)
    console.print(f"  {RESULTS:<12}  all numbers of the test", style="dim")
    if any(folder.glob("routing/*.png")):
        console.print(f"  {'routing/':<12}  pictures of the experts that the tasks use", style="dim")
    for sentence in advice:
        console.print(escape_control(sentence))
    if further:
        console.print("next:")
    for command in further:
        console.print(f"  {command}", soft_wrap=True)


def _experts(measured: Measurements, shares: Mapping[tuple[str, int], float]) -> str:
    """Return how many experts a task uses, of how many if that is known; nothing without a single mixture."""
    used = measured.value("", "experts_per_sample")
    if used is None:
        return ""
    experts = {expert for _, expert in shares}
    of, mean = f" of {len(experts)}" if experts else "", "" if used == round(used) else " on average"
    return f"each task uses {number(used, 3)}{of} experts{mean}, "


def by_task(
    measured: Measurements,
    mains: Mapping[str, str],
    best_epochs: Mapping[str, Mapping[str, float]],
    most: int = MOST_TASKS,
) -> Table | str:
    """Return a table of the test metrics of the tasks and models; of more than ``most`` tasks, lines on their means.

    If it were long, it has the main metrics only. ``mains``: the main metric of each task. ``best_epochs``: of each
    task, the epoch in which it was best.
    """
    if len(mains) > most:
        return "\n".join(_extremes(measured, mains, metric) for metric in dict.fromkeys(mains.values()))
    models = list(dict.fromkeys([measured.in_use, *measured.models()]))
    metrics = {task: [main] for task, main in mains.items()}
    for task, metric in measured.by_model().select("task", "metric").rows():
        if task in mains and metric != mains[task]:
            metrics[task].append(metric)
    same = {task: names for task, names in metrics.items() if _accuracy_of_constant(measured, task, names)}
    metrics |= {task: [name for name in names if name != "accuracy"] for task, names in same.items()}
    rare = {task: names for task, names in metrics.items() if {*names, "accuracy"} == {*OF_FEW_POSITIVES}}
    metrics |= {task: list(dict.fromkeys([*SHOWN_FIRST, *names])) for task, names in rare.items()}
    notes = [f"Not shown: the accuracy of {join_names(same)}, which is that of a constant prediction."] if same else []
    notes += [OF_TOP] if rare else []
    if sum(map(len, metrics.values())) > MOST_ROWS:
        metrics, notes = {task: [main] for task, main in mains.items()}, []
    rows = list[list[str]]()
    for task, names in metrics.items():
        for metric in names:
            values = [number(measured.value(task, metric, model=model)) for model in models]
            rows.append([task if metric == names[0] else "", metric, *values])
    epochs = [f"{task} {best['epoch']:.0f}" for task, best in best_epochs.items()]
    differ = len({best["epoch"] for best in best_epochs.values()}) > 1
    note = f"Best epoch of each task, by its own loss on the validation rows, from 0: {', '.join(epochs)}."
    return Table(["task", "metric", *models], rows, notes=[*notes, *[note] * differ])


def _accuracy_of_constant(measured: Measurements, task: str, names: Sequence[str]) -> bool:
    """Return whether the accuracy of the model in use, which is no main metric, equals that of a constant."""
    values = [number(measured.value(task, "accuracy", model=model)) for model in (measured.in_use, "constant")]
    return "accuracy" in names[1:] and values[0] == values[1] != number(None)


def _extremes(measured: Measurements, mains: Mapping[str, str], metric: str) -> str:
    """Return a line on a main metric: its mean over the tasks that have it, the best task, the worst; other models."""
    tasks = [task for task, main in mains.items() if main == metric]
    in_use = measured.in_use
    defined = _values(measured, tasks, metric, in_use)
    if not defined:
        return f"{metric}: undefined for all tasks that have it"
    ranked = sorted(defined, key=defined.__getitem__, reverse=bool(higher_is_better(metric)))
    best, worst = (f"{number(defined[task])} ({task})" for task in (ranked[0], ranked[-1]))
    count = f"{len(defined)}" if len(defined) == len(tasks) else f"{len(defined)} of {len(tasks)}"
    line = f"{metric}: mean {number(statistics.fmean(defined.values()))} of {count} tasks; best {best}, worst {worst}"
    means = []
    for model in [model for model in measured.models() if model != in_use]:
        theirs = [value for task in defined if (value := measured.value(task, metric, model=model)) is not None]
        if len(theirs) == len(defined):
            means.append(f"{model} {number(statistics.fmean(theirs))}")
    return f"{line}\n  mean of other models: {', '.join(means)}" if means else line


def _values(measured: Measurements, tasks: Iterable[str], metric: str, model: str) -> dict[str, float]:
    """Return the defined values of the ``tasks``, by task."""
    return {task: value for task in tasks if (value := measured.value(task, metric, model=model)) is not None}


def best_and_worst(
    measured: Measurements, mains: Mapping[str, str], metric: str, labels: Mapping[str, int], count: int = NUM_RANKED
) -> tuple[list[str], list[str]]:
    """Return the ``count`` best tasks with this main metric, the best first, and as many worst, the worst first.

    Those with fewer than ``MIN_ROWS`` of the ``labels`` of the test are left out: chance alone makes them extreme.
    """
    tasks = [task for task, main in mains.items() if main == metric and labels.get(task, MIN_ROWS) >= MIN_ROWS]
    values = _values(measured, tasks, metric, measured.in_use)
    ranked = sorted(values, key=values.__getitem__, reverse=bool(higher_is_better(metric)))
    count = min(count, -(-len(ranked) // 2))
    return ranked[:count], ranked[::-1][: min(count, len(ranked) - count)]


def rankings(measured: Measurements, mains: Mapping[str, str], labels: Mapping[str, int]) -> list[Table]:
    """Return for each main metric of many tasks its distribution over them by model, and the best and worst tasks.

    There are none of at most ``MAX_LISTED_TASKS`` tasks. ``labels``: their number in the test, by task.
    """
    tables = list[Table]()
    for metric in dict.fromkeys(mains.values()) if len(mains) > MAX_LISTED_TASKS else ():
        tasks = [task for task, main in mains.items() if main == metric]
        rows = []
        for model in dict.fromkeys([measured.in_use, *measured.models()]):
            values = [*_values(measured, tasks, metric, model).values()]
            ends = np.quantile(values, [*QUARTILES.values()]).tolist() if values else []
            rows.append([model, str(len(values)), *map(number, ends or [None] * len(QUARTILES))])
        title = f"{metric} over {len(tasks)} tasks"
        tables.append(Table(["model", "defined", *QUARTILES], rows, title))
        values_by_task = {task: number(measured.value(task, metric, model=measured.in_use)) for task in tasks}
        best, worst = best_and_worst(measured, mains, metric, labels)
        cells = ([[task, values_by_task[task], str(labels.get(task, ""))] for task in part] for part in (best, worst))
        rows = [[*good, *bad] for good, bad in itertools.zip_longest(*cells, fillvalue=[""] * 3)]
        note = f"Among the tasks with at least {MIN_ROWS} labels in the test rows."
        tables += [Table(["best", metric, "labels", "worst", metric, "labels"], rows, notes=[note])] if rows else []
    return tables


def _sharing(shares: Mapping[tuple[str, int], float], groups: Mapping[str, int]) -> Group:
    """Return a table of the tasks that use each expert, beside the groups from which simulated data drew the tasks."""
    numbers = sorted(set(groups.values()))
    used: dict[int, list[str]] = {}
    for (task, expert), share in shares.items():
        if share >= USED:
            used.setdefault(expert, []).append(task)
    rows = []
    for expert in sorted(used):
        names = [[task for task in used[expert] if groups[task] == group] for group in numbers]
        cells = (" ".join(name.removeprefix("task_") for name in members) or "-" for members in names)
        rows.append([str(expert), *cells])
    table = Table(["expert", *(f"true group {n}" for n in numbers)], rows, "\ntasks that use each expert")
    pairs = list(itertools.combinations(groups, 2))
    together = {pair for tasks in used.values() for pair in itertools.combinations(tasks, 2)}
    counted = []
    for is_same, name in ((True, "of one group"), (False, "of different groups")):
        kind = [pair for pair in pairs if (groups[pair[0]] == groups[pair[1]]) == is_same]
        counted += [f"{len(together.intersection(kind))} of {len(kind)} pairs {name}"] if kind else []
    return Group(table, f"share an expert: {', '.join(counted)}")
