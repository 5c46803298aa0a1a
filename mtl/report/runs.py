"""Read the folders of runs, finished or not, into one table with a row for each run."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl
import yaml
from pydantic import BaseModel, ValidationError

from mtl.checks import InputError, require
from mtl.files.run_files import COMMAND, CONFIG, LOG, RESULTS, checked_file, read_json
from mtl.loggers.base import MAX_LISTED_TASKS
from mtl.options import fits
from mtl.overrides import LOCAL
from mtl.report.statistics import DELTA, SEEDS, Value, pairing_keys, with_delta
from mtl.training.measurements import LEAD, NETWORK, Key, Measurements, is_routing
from mtl.training.metrics import higher_is_better

FINISHED, FAILED, UNFINISHED = "finished", "failed", "unfinished"
Named = tuple[str, int | None]  # the setting of a run, and its seed
ALL = "all runs"  # if nothing distinguishes them
Options = dict[str, str]  # of a run, by name
NEUTRAL = ("run_name", "report", "predictions")  # options that change no number
_PLAIN = ("parameters", "epochs", "seconds_per_epoch")
TOTALS = {  # columns that are multiplied by the epochs
    "training/flops_selected": "training/flops_in_all",
    "training/binary_after": "training/epochs_until_binary",
}
MEAN = "mean_"  # begins the names of means over tasks
EARLIER = "of an earlier mtl; train the run again, or leave the folder out"
# As in conf/hydra/job_logging/run.yaml
_LINE = re.compile(r"^\d\d:\d\d:\d\d (?P<level>[A-Z]+) (?!hydra)[\w.]+: (?P<message>.*)")
_TAIL = 8192  # bytes at the end of a log that are searched for the last message


class Data(BaseModel):
    """The entry ``data`` of results.json: rows by split (and task, where each task has its own), names of files.

    ``test_labels``: the number of labelled test rows of each task. ``test_positives``: those that are
    positive, of binary tasks.
    """

    rows: dict[str, int | dict[str, int]] = {}
    test_labels: dict[str, int] = {}
    test_positives: dict[str, int] | None = None
    files: list[str] = []
    random_split: bool = False

    @property
    def overlap(self) -> float:
        """The number of test rows over that of training rows if the split is random, else 0."""
        counts = {name: sum(n.values()) if isinstance(n, dict) else n for name, n in self.rows.items()}
        return counts.get("test", 0) / counts["train"] if self.random_split and counts.get("train") else 0.0


class Results(BaseModel):
    """The entries of results.json that a report reads."""

    numbers: dict[str, dict[str, dict[str, float | tuple[float | None, float | None] | None]]]
    main_metrics: dict[str, str] = {}
    checkpoint: str = ""  # that was tested
    monitor: str = ""
    best: float | None = None
    tested_epoch: int | None = None
    seed: int | None = None
    parameters: float | None = None
    epochs: float | None = None
    seconds_per_epoch: float | None = None
    data: Data = Data()
    versions: dict[str, str | None] = {}
    advice: list[str] = []
    slices: list[dict[str, Any]] = []
    calibration: dict[str, dict[str, float]] = {}
    thresholds: dict[str, dict[str, float | None]] = {}
    intervals: dict[str, dict[str, float]] = {}
    blend: dict[str, dict[str, float]] = {}  # weights by task and model
    best_epochs: dict[str, dict[str, float]] = {}
    finished: str = ""
    command: str = ""

    @cached_property
    def measured(self) -> Measurements:
        """The numbers, by what they measure."""
        return Measurements.from_plain(self.numbers)


class Command(BaseModel):
    """The entries of command.json that a report reads: overrides, choices from the config groups, and the seed."""

    overrides: list[str] = []
    choices: dict[str, Any] = {}
    seed: Any = None


@dataclass(frozen=True)
class Runs:
    """The table of several runs.

    ``table`` has a row for each run, with the columns ``run`` (its folder), ``state`` ("finished", "failed" or
    "unfinished"), ``reason`` (why it has not finished), ``setting``, ``seed``, ``data_seed`` (which draws its rows and
    splits), ``overlap`` (of ``Data``), an ``option NAME`` for each option that differs, and numbers: ``parameters``,
    ``epochs``, ``seconds_per_epoch``, and what was measured, by the text of its ``Key``, such as ``test/click/auroc``
    or ``linear:test/click/auroc``. Further ones are computed: ``test/mean_METRIC`` over tasks, ``test/delta_m`` and
    ``val/delta_m`` (of ``mtl.report.statistics``), and ``training/flops_in_all`` and ``training/epochs_until_binary``,
    products with the epochs. If a run has not recorded a value, it is null; an undefined value is NaN.
    ``heading`` names the options that the settings consist of, and ``main`` is the main metric of each task.
    ``higher`` says for columns whose names do not tell whether higher values are better.
    """

    table: pl.DataFrame
    heading: str
    main: dict[str, str]
    higher: Mapping[str, bool] = field(default_factory=dict)

    def is_higher_better(self, column: str) -> bool | None:
        """Return whether higher values of a column of numbers are better; None if that is not known."""
        if column in self.higher:
            return self.higher[column]
        metric = Key.of(column).metric
        return metric == DELTA or higher_is_better(metric.removeprefix(MEAN))

    @property
    def overlap(self) -> float:
        """That of ``summarise`` for the runs: 0 unless they have random splits of their own."""
        done = self.table.filter(state=FINISHED)
        if not {"overlap", "data_seed"} <= {*done.columns} or done["data_seed"].n_unique() < 2:
            return 0.0
        return max((value for value in done["overlap"] if value), default=0.0)

    def values(self, setting: str, column: str) -> dict[tuple[Any, Any], Value]:
        """Return the values of a column in the runs of a setting that have ended, by ``pairing_keys``.

        An undefined value is NaN or None; that of a failed run, such as one whose loss became infinite, is None, unless
        a finished run has the same seeds. The result is empty if no finished run has recorded a value, as runs of top-k
        have no share of binary selectors.
        """
        ended = self.table.filter(pl.col("state").is_in([FAILED, FINISHED]), setting=setting).sort("state")
        recorded = ended.filter(state=FINISHED)[column] if column in ended.columns else None
        if recorded is None or recorded.null_count() == len(recorded) > 0:
            return {}
        return dict(zip(pairing_keys(ended), ended[column].to_list(), strict=True))  # the finished ones come last


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Return the run folders at or below ``folders``, in the order of the jobs of a sweep; InputError without any."""
    runs: dict[Path, None] = {}
    for folder in folders:
        require(folder.is_dir(), f"{folder}: no such folder")
        below = []
        for path, names, files in os.walk(folder):
            if {CONFIG, LOG, COMMAND, RESULTS} & set(files):
                names.clear()  # a run contains no other run
                below.append(Path(path))
        runs |= dict.fromkeys(sorted(below, key=_natural))
    require(bool(runs), f"{', '.join(map(str, folders))} contains no run; a run is a folder with a {CONFIG}")
    return list(runs)


def by_data(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Group the run folders ``paths`` by the name of their data, since losses on different data cannot be compared.

    The name is "" if a run does not record it. The files of ``data.path`` are named where they differ.
    """
    data = dict[Path, tuple[str, str]]()
    for path in paths:
        file = overridden_options(_training_overrides(path)).get("data.path", "")
        data[path] = str(command(path).choices.get("data", "")), file
    names = [name for name, _ in set(data.values())]
    several = {name for name in names if names.count(name) > 1}
    groups: dict[str, list[Path]] = {}
    for path, (name, file) in data.items():
        groups.setdefault(f"{name} ({file})" if name in several else name, []).append(path)
    return groups


def read_runs(folders: Sequence[Path]) -> Runs:
    """Return the runs at or below ``folders``; InputError if there are none."""
    paths = find_runs(folders)
    options = [overridden_options(_training_overrides(path)) for path in paths]
    heading, settings = labels(options)
    named: dict[Path, Named] = {path: (setting, None) for path, setting in zip(paths, settings, strict=True)}
    return _table(named, options, heading)


def read_named_runs(named: Mapping[Path, Named], heading: str = "setting") -> Runs:
    """Return the runs in the folders ``named``, each with its (setting, seed); seed None: read it from the run.

    A folder that does not exist yet counts as an unfinished run. InputError if ``named`` is empty.
    """
    require(bool(named), "there is no run to compare")
    return _table(named, [{}] * len(named), heading)


def _table(named: Mapping[Path, Named], options: Sequence[Options], heading: str) -> Runs:
    names = varying_options(options)
    rows: list[dict[str, Any]] = []
    main: dict[str, str] = {}
    for (path, (setting, named_seed)), chosen in zip(named.items(), options, strict=True):
        results, wrong = read_results(path)
        state, reason = (FINISHED, None) if results else (FAILED, wrong) if wrong else last_message(path / LOG)
        row: dict[str, Any] = {"run": str(path), "state": state, "reason": reason, "setting": setting}
        recorded_seed = results.seed if results else command(path).seed or config(path).get("seed")
        seed = recorded_seed if named_seed is None else named_seed
        data = config(path).get("data")
        for name, value in zip(SEEDS, (seed, data.get("seed") if isinstance(data, dict) else None), strict=True):
            row[name] = value if isinstance(value, int) else None  # the seed of a failed run may be any value
        row["overlap"] = results.data.overlap if results else None
        rows.append(row | {f"option {name}": chosen.get(name) for name in names} | numbers(results))
        if results:
            main = results.main_metrics | main  # the first run decides
    table = with_means(pl.DataFrame(rows, infer_schema_length=None))
    choices = [command(path).choices for path in named]
    data, single = [str(c.get("data")) for c in choices], [c.get("network") == "single_task" for c in choices]
    for split in ("test", "val"):
        table = with_delta(table, data, single, main, split)
    return Runs(table, heading, main)


def with_means(table: pl.DataFrame) -> pl.DataFrame:
    """Add the means over all tasks that have a metric, as ``test/mean_METRIC``, if there are several such tasks.

    The mean is null or NaN if the value of any task is, since a mean over fewer tasks could not be compared. Of more
    than ``MAX_LISTED_TASKS`` tasks, it is over those that are ``defined_in_all`` runs.
    """
    metrics: dict[str, list[str]] = {}
    for column, key in zip(table.columns, map(Key.of, table.columns), strict=True):
        if key.split == "test" and key.task and key.model == NETWORK:
            metrics.setdefault(key.metric, []).append(column)
    several = {f"test/{MEAN}{metric}": defined_in_all(table, names) for metric, names in metrics.items() if names[1:]}
    means = {mean: pl.mean_horizontal(names, ignore_nulls=False) for mean, names in several.items()}
    return table.with_columns(**means)


def defined_in_all(table: pl.DataFrame, columns: list[str]) -> list[str]:
    """Return those of many ``columns`` that are defined in all runs with a value in any; few columns are all needed."""
    values = table.filter(pl.any_horizontal(pl.col(columns).cast(pl.Float64).is_finite()))
    few = len(columns) <= MAX_LISTED_TASKS or not len(values)
    return columns if few else [name for name in columns if values[name].is_finite().fill_null(False).all()] or columns


def overridden_options(overrides: Iterable[str]) -> Options:
    """Return the options that Hydra's ``overrides`` set, by name, without seeds and those that change no number."""
    pairs = (override.lstrip("+").partition("=") for override in overrides)
    options = {name: value for name, _, value in pairs if name.split(".")[0] not in (*LOCAL, *NEUTRAL)}
    return {name: value for name, value in options.items() if "seed" not in name.split(".")[-1]}


def varying_options(options: Sequence[Options]) -> list[str]:
    """Return the names of the options that differ between runs, in order of appearance."""
    names = dict.fromkeys(name for run_options in options for name in run_options)
    return [name for name in names if len({run_options.get(name) for run_options in options}) > 1]


def labels(options: Sequence[Options]) -> tuple[str, list[str]]:
    """Return a heading and the label of each run, without the options that all runs share.

    If every run was given all differing options, the heading names them and the labels are their values, as in
    "gate, data.rho" and "topk, 0.5". Otherwise the heading is "setting", and labels are like ``gate=topk
    data.rho=0.5``.
    """
    names = varying_options(options)
    if names and all(name in run_options for run_options in options for name in names):
        return ", ".join(names), [", ".join(run_options[name] for name in names) for run_options in options]
    texts = [" ".join(f"{name}={values[name]}" for name in names if name in values) for values in options]
    return "setting", [text or ("defaults" if names else ALL) for text in texts]


def _training_overrides(path: Path) -> list[str]:
    """Return the overrides that say what was trained: those of the command line, or of the run that it starts from."""
    command_overrides = command(path).overrides
    if command_overrides and not any(override.startswith(("ckpt=", "evaluate=")) for override in command_overrides):
        return command_overrides
    overrides = config(path).get("overrides")
    return list(overrides or ()) if fits(list[str], overrides) else command_overrides


def numbers(results: Results | None) -> dict[str, float]:
    """Return the numbers in ``results`` by the names of their columns; null, an undefined value, becomes NaN."""
    if results is None:
        return {}
    row: dict[str, Any] = {}
    for key, (value, _) in results.measured.items():
        of_other = key.model != NETWORK
        is_main = results.main_metrics.get(key.task) == key.metric
        if not (LEAD in key.model or (of_other and not is_main) or (key.task and is_routing(key.metric))):
            row[str(key)] = value
    row |= {name: getattr(results, name) for name in _PLAIN if name in results.model_fields_set}
    row = {name: math.nan if value is None else value for name, value in row.items()}
    if results.epochs:  # totals over the training
        for name, total in TOTALS.items():
            row |= {total: row[name] * results.epochs} if name in row else {}
    return row


def read_results(path: Path) -> tuple[Results | None, str | None]:
    """Return the results of a run (None if it has none yet), and an error message if its file is damaged."""
    record = read_json(path / RESULTS)
    if record and "numbers" not in record:
        return None, f"{RESULTS} is {EARLIER}"
    try:
        return (Results.model_validate(record) if record else None), None
    except ValidationError as error:
        [first, *_] = error.errors()
        return None, f"{RESULTS}: {'.'.join(map(str, first['loc']))}: {first['msg'][0].lower()}{first['msg'][1:]}"


def finished_results(path: Path) -> Results | None:
    """Return the results of a run, None if it has none yet. Raises InputError if its file is damaged or too old."""
    results, problem = read_results(path)
    require(problem is None, f"{path}/{problem}")
    return results


def command(path: Path) -> Command:
    """Return the content of command.json in a run folder; without entries if the file is missing or damaged."""
    try:
        return Command.model_validate(read_json(path / COMMAND))
    except ValidationError:
        return Command()


def config(path: Path) -> dict[str, Any]:
    """Return the resolved configuration of a run; {} if the run ended before it was written."""
    try:
        text = checked_file(path / CONFIG, path).read_text()
        content = yaml.load(text, yaml.CSafeLoader)  # plain Python takes ten times as long
    except (OSError, RecursionError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def last_message(log: Path) -> tuple[str, str | None]:
    """Return the state of a run without results, and its last message.

    The run has failed if this message is an error. Otherwise it is unfinished: still running, stopped or killed.
    """
    try:
        with checked_file(log, log.parent, math.inf).open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except (OSError, InputError):
        return UNFINISHED, None
    last = next((match for match in map(_LINE.match, reversed(lines)) if match), None)
    if last is None:
        return UNFINISHED, lines[-1] if lines else None
    return FAILED if last["level"] == "ERROR" else UNFINISHED, last["message"]


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that puts ``10_x`` after ``9_x``."""
    return [(int(part.split("_")[0]) if part.split("_")[0].isdigit() else -1, part) for part in path.parts]
