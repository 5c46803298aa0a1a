"""A folder that can be pushed to a model hub: weights, their description, and a model card in README.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtl.checkpoints.files import read
from mtl.checkpoints.safetensors_weights import write_plain
from mtl.checks import InputError
from mtl.config.resume import config_to_load
from mtl.files.escaping import markdown
from mtl.files.formatting import number
from mtl.files.run_files import CONTENT, WEIGHTS
from mtl.files.tables import Table, bullets
from mtl.files.writing import write_text
from mtl.loggers.base import MAX_LISTED_TASKS
from mtl.predictions import class_names
from mtl.report.runs import read_results
from mtl.runs.results import rankings
from mtl.use import slices
from mtl.use.trained import TrainedModel, model_of

KINDS = {"binary": "tabular-classification", "multiclass": "tabular-classification", "regression": "tabular-regression"}


def write_card(run: Path, folder: Path, trust: Sequence[str] = ()) -> None:
    """Write the network of the finished ``run`` into ``folder``, which ``mtl.load`` reads. Raises InputError."""
    results, problem = read_results(run)
    if results is None:
        raise InputError(f"{run} is not the folder of a finished run: {problem or 'it has no results.json'}")
    checkpoint = read(run)
    model = model_of(checkpoint, config_to_load(checkpoint, trust), "cpu")
    write_plain(model.content(), folder)
    write_text(folder / "README.md", card(model, results, run.resolve().name))


def card(model: TrainedModel, results: Any, name: str) -> str:
    """Return the model card: a block of metadata in YAML, and what the network predicts, from what, and how well."""
    tasks, is_short = model.spec.tasks, len(model.spec.tasks) <= MAX_LISTED_TASKS
    names = "### Tasks\n\n" + markdown(", ".join(task.name for task in tasks))
    classes = {task.name: ", ".join(class_names(task)) for task in tasks if task.kind != "regression"}
    predicted = [[t.name, t.kind, classes.get(t.name) or "a number in the unit of its column"] for t in tasks]
    ranked = [] if is_short else rankings(results.measured, results.main_metrics, results.data.test_labels)
    metrics = ranked or [_metrics(model, results)]
    parts = [
        f"---\n{_metadata(model, results, name)}---",
        f"# {markdown(name)}",
        f"A network of `mtl` ({type(model.core).__name__}, {results.parameters or 0:,.0f} parameters) that predicts "
        f"{len(tasks)} tasks together.",
        Table(["task", "kind", "predicts"], predicted, "Tasks").markdown() if is_short else names,
        "### Inputs\n\n" + markdown(", ".join(model.columns or model.spec.inputs)),
        *(table.markdown() for table in metrics),
    ]
    if results.slices:
        by_slice = slices.tables_of(slices.read(results.slices), results.main_metrics)
        parts += [table.markdown() for table in by_slice]
    rows = ", ".join(f"{count:,} {split}" for split, count in results.data.rows.items() if isinstance(count, int))
    files = ", ".join(results.data.files)
    limits = [
        f"Data: {files or 'not from files'}; rows: {rows or 'unknown'}. Rows of another kind may be predicted worse.",
        *results.advice,
        "Unknown categories share one embedding; numbers far outside those of the training rows are extrapolated.",
    ]
    lines = ["```python", "import mtl", "", f"model = mtl.load({json.dumps(f'path/to/{name}')})", "model.predict(rows)"]
    use = "### Use\n\n" + "\n".join([*lines, "```"])
    trained = f"### Training\n\n{markdown(results.command)}, seed {results.seed}; finished {results.finished}."
    return "\n\n".join(part for part in [*parts, "### Limits\n\n" + bullets(limits), use, trained] if part) + "\n"


def _metrics(model: TrainedModel, results: Any) -> Table:
    table = results.measured.by_model()
    by_name = {task.name: table.filter(task=task.name).rows() for task in model.spec.tasks}
    rows = [[task, metric, *map(number, values)] for rows in by_name.values() for task, metric, *values in rows]
    return Table(table.columns, rows, "Metrics of the test rows")


def _metadata(model: TrainedModel, results: Any, name: str) -> str:
    """Return the metadata that model hubs read; each value is JSON, which is YAML too."""
    results_by_task = []
    for task in model.spec.tasks if len(model.spec.tasks) <= MAX_LISTED_TASKS else ():
        table = results.measured.by_model().filter(task=task.name)
        metrics = table.select("metric", results.measured.in_use).drop_nulls()
        values = [{"type": metric, "value": value} for metric, value in metrics.rows()]
        about = {"type": KINDS.get(task.kind, "other"), "name": task.name}
        dataset = {"type": "tabular", "name": ", ".join(results.data.files) or "unnamed"}
        results_by_task.append({"task": about, "dataset": dataset, "metrics": values})
    entries = {
        "library_name": "mtl",
        "tags": ["multi-task-learning", "mixture-of-experts", "tabular"],
        "model-index": [{"name": name, "results": results_by_task}],
    }
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in entries.items())


FILES = (WEIGHTS, CONTENT, "README.md")
