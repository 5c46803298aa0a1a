"""Read the trials of studies, and the folders of their runs, for a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import polars as pl
from optuna.importance import get_param_importances
from optuna.study import Study, StudyDirection, get_all_study_names
from optuna.trial import FrozenTrial, TrialState

from mtl.checks import require
from mtl.jobs.setting import run_folder
from mtl.report.runs import FAILED, FINISHED, UNFINISHED, read_named_runs
from mtl.report.trials import PRUNED, Trials
from mtl.tune.definition import DEFAULTS
from mtl.tune.search import monitor_of, study_of, undamaged
from mtl.tune.storage import opened

MIN_TRIALS = 20  # completed trials from which the importance of options is shown: of fewer, chance decides
_STATES = {TrialState.COMPLETE: FINISHED, TrialState.PRUNED: PRUNED, TrialState.FAIL: FAILED}


def read_trials(studies: Mapping[str, tuple[Study, Path]]) -> Trials:
    """Return the trials of ``studies``, which map the name of a setting to its study and the folder of its runs.

    The state of a trial and its validation value come from the storage, everything else from its run. Raises InputError
    if there is no trial.
    """
    trials_by_folder: dict[Path, tuple[str, FrozenTrial]] = {}
    for name, (study, folder) in studies.items():
        for trial in study.get_trials(deepcopy=False):
            path = run_folder(folder, "", trial.number)  # or where it was trained
            path = path if path.exists() else Path(str(trial.user_attrs.get("folder", path)))
            trials_by_folder[path] = name, trial
    require(bool(trials_by_folder), f"{', '.join(studies)}: no trial has begun")
    study = next(iter(studies.values()))[0]
    monitor, higher = monitor_of(study), study.direction == StudyDirection.MAXIMIZE
    named = {path: (name, trial.user_attrs.get("seed")) for path, (name, trial) in trials_by_folder.items()}
    runs, trials = read_named_runs(named), [trial for _, trial in trials_by_folder.values()]
    values = [trial.value if trial.state == TrialState.COMPLETE else None for trial in trials]
    told = zip(trials, runs.table.select("run", "state", "reason").rows(), values, strict=True)
    outcomes = [(*_outcome(trial, *run), value) for trial, run, value in told]
    types = {"state": pl.String, "reason": pl.String, monitor: pl.Float64}
    table = runs.table.with_columns(pl.DataFrame(outcomes, types, orient="row").get_columns())
    heading = "gate" if len(studies) > 1 else "study"
    runs = replace(runs, table=table, heading=heading, higher={monitor: higher})
    return Trials(runs, monitor, f"test/{monitor.removeprefix('val/')}", higher)


def read_study(name: str, address: str | None, folder: Path) -> Trials:
    """Return the trials of all methods of the study ``name`` of mtl tune, whose runs are in ``folder``.

    ``address``: of its storage, as in ``open_storage``. Raises InputError if there are no trials.
    """
    with opened(address, folder) as storage:
        with undamaged(name):
            names = [text for text in get_all_study_names(storage) if f"{text}/".startswith(f"{name}/")]
        require(bool(names), f"study={name}: its storage has no such study")
        studies = {text.removeprefix(name).removeprefix("/"): study_of(text, storage) for text in names}
        studies_by_gate = {gate or name: (study, folder / gate) for gate, study in studies.items() if study}
        importances, defaults = dict[str, dict[str, float]](), dict[str, Path]()
        for gate, (study, part) in studies_by_gate.items():
            values = [trial.value for trial in study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])]
            if len(values) >= MIN_TRIALS and len(set(values)) > 1:
                importances[gate] = get_param_importances(study)
            if (path := run_folder(part, DEFAULTS, 0)).exists():
                defaults[gate] = path
        return replace(read_trials(studies_by_gate), importances=importances, defaults=defaults)


def _outcome(trial: FrozenTrial, path: str, state: str, reason: str | None) -> tuple[str, str | None]:
    """Return the state of a trial, and why it has not finished; ``path``, ``state``, ``reason``: of its run."""
    ended = _STATES.get(trial.state, UNFINISHED)
    if ended == FINISHED:
        return (FINISHED, None) if state == FINISHED else (UNFINISHED, f"its run is not in {path}")
    if ended == UNFINISHED:
        return UNFINISHED, "waiting" if trial.state == TrialState.WAITING else reason
    return ended, str(trial.user_attrs.get("error", "")) if ended == FAILED else f"after epoch {trial.last_step}"
