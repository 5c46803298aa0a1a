"""The commands that a finished run prints, to paste into a shell."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mtl.config.compose import CONF
from mtl.files.formatting import duration
from mtl.overrides import key_of, last_of_each, quote_path
from mtl.runs.caller import Caller
from mtl.runs.commands import RUN_FOLDER, config_dirs, program, relative_to_cwd

# Sections whose overrides a study keeps
STUDY_SECTIONS = ("data", "paths", "trainer", "trust", "monitor", "time_limit", "hydra.searchpath")
MIN_TRIALS, MAX_TRIALS = 10, 30  # of each method: a random search of fewer seldom finds more than luck
SEARCH_SECONDS = 3600  # for which as many trials are proposed as fit


def next_commands(cfg: DictConfig, data: Any, folder: Path, caller: Caller, seconds: float) -> list[str]:
    """Return the commands that predict the rows of the run's table, report on it and search its options.

    ``data``: its data module; only tables can be predicted and searched without further options. ``seconds``: what the
    run took; a line says how long the search will take, if each trial takes as long.
    """
    files = data.source_files() if data.labelled is not None else {}
    rows, commands = files.get("data.test_path", files.get("data.path")), []
    if rows is not None and rows.is_file():
        commands.append(shlex.join([*program("predict"), relative_to_cwd(folder), relative_to_cwd(rows)]))
    commands.append(shlex.join([*program("report"), relative_to_cwd(folder)]))
    # Those of the configuration are of all command lines of the run; it keeps neither folders nor classes
    overrides = [
        override
        for override in last_of_each([*cfg.get("overrides", ()), *caller.local])
        if (key := key_of(override)).startswith(STUDY_SECTIONS) and key not in RUN_FOLDER
    ]
    # A resumed run may have its path from a file of the user's that this command line does not name
    names_rows = "data.path" in map(key_of, overrides) or cfg.choices.get("data") != "table" or not cfg.data.path
    if "data.path" in files and names_rows:
        study: Any = OmegaConf.load(CONF / "study" / "table.yaml")
        gate = cfg.choices.get("gate")
        gates = [gate] if gate in study.methods else ["softmax", "comet"]
        trials = min(MAX_TRIALS, max(MIN_TRIALS, int(SEARCH_SECONDS / (len(gates) * seconds)) - 1))
        count = len(gates) * (trials + 1)  # the study has try_defaults
        time = f"at least {duration(count * seconds)}, since many take longer than this run"
        name = f"name={quote_path(folder.name)}"  # another run may have other options
        options = ["study=table", name, f"gate={','.join(gates)}", f"n_trials={trials}", *overrides]
        commands.append(shlex.join([*program("tune"), *config_dirs(caller.line.searched), *options]))
        commands.append(f"# {count} runs, one of each gate with the defaults; {time}")
    return commands
