"""The commands that a finished run prints, to paste into a shell."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mtl.config.compose import CONF
from mtl.overrides import key_of, quote_path
from mtl.runs.commands import RUN_FOLDER, CommandLine, config_dirs, program, relative_to_cwd

# Sections whose overrides a study keeps
STUDY_SECTIONS = ("data", "paths", "trainer", "trust", "monitor", "hydra.searchpath")


def next_commands(cfg: DictConfig, data: Any, folder: Path, line: CommandLine) -> list[str]:
    """Return the commands that predict the rows of the run's table, report on it and search its options.

    ``data``: its data module; only tables can be predicted and searched without further options. ``line``: the command
    line that started the run.
    """
    files = data.source_files() if data.labelled is not None else {}
    rows, command_lines = files.get("data.test_path", files.get("data.path")), []
    if rows is not None and rows.is_file():
        command_lines.append([*program("predict"), relative_to_cwd(folder), relative_to_cwd(rows)])
    command_lines.append([*program("report"), relative_to_cwd(folder)])
    if "data.path" in files:
        study: Any = OmegaConf.load(CONF / "study" / "table.yaml")
        gate = cfg.choices.get("gate")
        flags = config_dirs(line.searched)
        keys = [key for key in map(key_of, line.overrides) if key.startswith(STUDY_SECTIONS) and key not in RUN_FOLDER]
        overrides = [override for override in line.overrides if key_of(override) in keys]
        searched = f"gate={gate if gate in study.methods else 'softmax,comet'}"
        name = f"name={quote_path(files['data.path'].name.split('.')[0])}"  # a study of each table
        command_lines.append([*program("tune"), *flags, "study=table", name, searched, *overrides])
    return [shlex.join(arguments) for arguments in command_lines]
