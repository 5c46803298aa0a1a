"""Read the folders of runs into one table, a row for each run, whether it has finished or not."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import yaml  # type: ignore[import-untyped]  # it has no types of its own

from mtl.checks import require
from mtl.records import COMMAND, CONFIG, LOG, RESULTS, read_json
from mtl.report.labels import Options, config_options, differing, given_options, labels

FINISHED, FAILED, UNFINISHED = "finished", "failed", "unfinished"
Named = tuple[str, int | None]  # the setting of a run, and its seed
_PLAIN = ("parameters", "epochs", "seconds_per_epoch")
_PER_EXPERT = ("expert_share/", "experts_per_sample/")  # too many for a table; results.json has them
_LINE = re.compile(
    r"^\d\d:\d\d:\d\d (?P<level>[A-Z]+) (?!hydra)[\w.]+: (?P<message>.*)"
)  # see conf/hydra/job_logging/run.yaml
_TAIL = 8192  # bytes at the end of a log, in which its last message starts


@dataclass(frozen=True)
class Runs:
    """Runs beside each other.

    ``table`` has a row for each run, with the columns ``run`` (its folder), ``state`` ("finished", "failed" or
    "unfinished"), ``reason`` (why it has not finished), ``setting``, ``seed``, an ``option NAME`` for each option that
    differs, and numbers: ``test NAME``, ``training NAME``, ``best NAME``, ``parameters``, ``epochs``,
    ``seconds_per_epoch``. If a run has not recorded a value, it is null; an undefined value is NaN. ``heading`` says
    what the settings are, ``main`` is the main metric of each task, and ``higher`` tells of metrics whether higher
    values are better.
    """

    table: pl.DataFrame
    heading: str
    main: dict[str, str]
    higher: dict[str, bool]

    def is_higher_better(self, column: str) -> bool | None:
        """Return whether higher values of a column of numbers are better, None if that is not known."""
        return self.higher.get(re.split("[ /]", column)[-1])


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Return the run folders at or below ``folders``, in the order of the jobs of a sweep; InputError without any."""
    found: dict[Path, None] = {}
    for folder in folders:
        require(folder.is_dir(), f"{folder}: no such folder")
        below = []
        for path, names, files in os.walk(folder):
            if {CONFIG, LOG, COMMAND, RESULTS} & set(files):
                names.clear()  # a run contains no other run
                below.append(Path(path))
        found |= dict.fromkeys(sorted(below, key=_natural))
    require(bool(found), f"{', '.join(map(str, folders))} contains no run; a run is a folder with a {CONFIG}")
    return list(found)


def by_data(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Return the run folders ``paths`` by the name of their data, since losses on other data say nothing to each other.

    The name is "" where a run does not know it, as one of an earlier version.
    """
    found: dict[str, list[Path]] = {}
    for path in paths:
        found.setdefault(str(command(path).get("choices", {}).get("data", "")), []).append(path)
    return found


def read_runs(folders: Sequence[Path]) -> Runs:
    """Return the runs at or below ``folders``; InputError if there are none."""
    paths = find_runs(folders)
    heading, settings, options = name_settings(paths)
    return _table(paths, settings, [None] * len(paths), options, heading)


def read_named_runs(named: Mapping[Path, Named], heading: str = "setting") -> Runs:
    """Return the runs in the folders ``named``, each with its (setting, seed); seed None: the one that the run knows.

    A folder that is not there yet is a run that has not finished. InputError if there is none.
    """
    require(bool(named), "there is no run to compare")
    settings, seeds = zip(*named.values(), strict=True)
    return _table(list(named), settings, seeds, [{}] * len(named), heading)


def _table(
    paths: Sequence[Path],
    settings: Sequence[str],
    seeds: Sequence[int | None],
    options: Sequence[Options],
    heading: str,
) -> Runs:
    records = [read_json(path / RESULTS) for path in paths]
    names = differing(options)
    rows: list[dict[str, Any]] = []
    main: dict[str, str] = {}
    for path, record, setting, given, chosen in zip(paths, records, settings, seeds, options, strict=True):
        state, reason = (FINISHED, None) if record else last_message(path / LOG)
        seed = (record or command(path) or config(path)).get("seed") if given is None else given
        row: dict[str, Any] = {"run": str(path), "state": state, "reason": reason, "setting": setting}
        row["seed"] = seed if isinstance(seed, int) else None  # a run that fails may be told anything
        rows.append(row | {f"option {name}": chosen.get(name) for name in names} | numbers(record))
        main = dict(record.get("main_metrics", {})) | main  # the first run has the last word
    return Runs(pl.DataFrame(rows, infer_schema_length=None), heading, main, directions(records))


def directions(records: Iterable[Mapping[str, Any]]) -> dict[str, bool]:
    """Return of each metric in results whether higher values are better, where that is known."""
    known: dict[str, bool] = {}
    for record in records:
        if "higher_is_better" in record:
            known |= record["higher_is_better"]
        elif record:  # an earlier version wrote it
            from mtl.training.metrics import higher_is_better  # takes seconds

            names = {name.rpartition("/")[2] for name in record.get("test", {})} - known.keys()
            known |= {name: better for name in names if (better := higher_is_better(name)) is not None}
    return known


def name_settings(paths: Sequence[Path]) -> tuple[str, list[str], list[Options]]:
    """Return a heading, the label of each run, and the options by which the runs differ.

    These are the overrides of their command lines. If a run does not know its own, as one that an earlier version
    wrote, all are told apart by their configurations.
    """
    words = [command(path).get("overrides") for path in paths]
    given = [None if each is None else given_options(each) for each in words]
    known = [each for each in given if each is not None]
    options = known if len(known) == len(paths) else config_options([config(path) for path in paths])
    heading, names = labels(options)
    return heading, names, options


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a results.json by the names of their columns; its nulls, undefined values, are NaN."""
    test = {name: value for name, value in record.get("test", {}).items() if not name.startswith(_PER_EXPERT)}
    best = {name.replace("_", " ", 1): value for name, value in record.items() if name.startswith("best_")}
    row = {f"test {name}": value for name, value in test.items()} | best
    row |= {f"training {name}": value for name, value in record.get("training", {}).items()}
    row |= {name: record[name] for name in _PLAIN if name in record}
    return {name: math.nan if value is None else float(value) for name, value in row.items()}


def command(path: Path) -> dict[str, Any]:
    """Return what the program wrote into a new run folder: overrides, choices and seed; {} in older ones."""
    return read_json(path / COMMAND)


def config(path: Path) -> dict[str, Any]:
    """Return the resolved configuration of a run, {} if it ended before that was written."""
    try:
        content = yaml.load((path / CONFIG).read_text(), yaml.CSafeLoader)  # plain Python takes ten times as long
    except (OSError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def last_message(log: Path) -> tuple[str, str | None]:
    """Return the state of a run without results, and its last message.

    It has failed if that is an error, and is unfinished otherwise: it goes on, or was stopped or killed.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return UNFINISHED, None
    last = next((found for found in map(_LINE.match, reversed(lines)) if found), None)
    if last is None:
        return UNFINISHED, lines[-1] if lines else None
    return FAILED if last["level"] == "ERROR" else UNFINISHED, last["message"]


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that puts ``10_x`` after ``9_x``."""
    return [(int(part.split("_")[0]) if part.split("_")[0].isdigit() else -1, part) for part in path.parts]
