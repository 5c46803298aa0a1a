"""Find mistyped paths, kinds of tasks and columns, and options of a resumed run, before torch is imported.

Each is checked by the annotations that the run itself uses later.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from mtl.config import resolvers
from mtl.config.hydra_errors import explained
from mtl.config.portable import choices_among, is_portable
from mtl.files.cloud import CloudPath
from mtl.files.plain_yaml import parse_yaml
from mtl.files.run_files import CONFIG, checked_file, find_checkpoint
from mtl.options import FilePath, valid

CHECKPOINTS = ("ckpt", "evaluate", "start_from", "distillation.teacher")  # options that name one
TABLE, TEXT = "mtl.data_modules.table.TableDataModule", "mtl.data_modules.text.TextDataModule"


def check_early(cfg: DictConfig) -> None:
    """Raise InputError for a checkpoint or a file of rows that does not exist, or wrong options of tasks or columns.

    What cannot be checked here, such as a reference that cannot be resolved, is left to the run.
    """
    paths = {option: OmegaConf.select(cfg, option, throw_on_resolution_failure=False) for option in CHECKPOINTS}
    for path in paths.values():
        if isinstance(path, str):
            find_checkpoint(path)
    try:
        data: Any = OmegaConf.to_container(cfg.data, resolve=True)
    except Exception:  # a resolver may raise anything
        return
    kind = data.get("_target_") if isinstance(data, dict) else None
    if kind not in (TABLE, TEXT):
        return
    from mtl.data_modules.tables.label_options import TextTaskOptions
    from mtl.data_modules.tables.options import Columns, TaskOptions

    tasks: Any = data.get("tasks")
    of_task: Any = TextTaskOptions if kind == TEXT else TaskOptions
    valid(dict[str, of_task] | None, tasks, "data.tasks")  # a name may be a pattern, with a dot
    valid(Columns | None, data.get("columns"), "data.columns")
    places = {f"tasks.{name}": task for name, task in (tasks or {}).items()} if kind == TEXT else {"": data}
    for place, section in places.items():
        tests_only = paths["evaluate"] and section.get("test_path")
        for option in ("test_path",) if tests_only else ("path", "val_path", "test_path"):
            location = ".".join(filter(None, ("data", place, option)))
            if path := valid(FilePath | None, section.get(option), location):
                check_rows(path, location)


def check_rows(path: Path, option: str = "") -> None:
    """Raise InputError if there is no file of rows at ``path``, unless it is in the cloud; ``option`` names it."""
    from mtl.data_modules.files.reading import files_of

    if not isinstance(path, CloudPath):
        files_of(path, option)


def check_sweep(overrides: Sequence[str]) -> None:
    """Raise InputError, see ``check_early``, for those of a sweep's ``overrides`` that have one value for all jobs."""
    parser = OverridesParser.create()
    try:
        cfg = compose("train", [text for text in overrides if not parser.parse_override(text).is_sweep_override()])
    except Exception:  # of Hydra: a choice of the sweep may be missing
        return
    check_early(cfg)


def check_resumed(path: str, overrides: Sequence[str]) -> None:
    """Raise InputError if there is no checkpoint at ``path``, or if ``overrides`` do not fit the choices of its run.

    The file in the run folder says what the run has chosen. A folder without it, or with choices of files that are not
    found here, is left to the run.
    """
    folder = resolvers.run_folder(str(find_checkpoint(path)))
    try:
        stored = parse_yaml(checked_file(folder / CONFIG, folder).read_text())["overrides"] if folder else []
        choices = choices_among([override for override in stored if is_portable(override)], overrides)
        compose("train", choices)
    except Exception:  # of a file that someone has written by hand, or of Hydra
        return
    with explained([*choices, *overrides]):
        cfg = compose("train", [*choices, *overrides])
    check_early(cfg)
