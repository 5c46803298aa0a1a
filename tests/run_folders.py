"""Run folders as the program leaves them, without a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml


def write_run(
    folder: Path,
    words: Sequence[str],
    test: Mapping[str, float | None] | None,
    main: Mapping[str, str] | None = None,
    seed: int = 0,
    log: str = "",
    config: Mapping[str, Any] | None = None,
    choices: Mapping[str, str] | None = None,
    numbers: Mapping[str, Any] | None = None,
    **more: Any,
) -> Path:
    """Write the files of a run with the overrides ``words``.

    ``test``: the metrics of the test, None for a run that has not finished. ``numbers``: those of other splits.
    ``more``: further entries of the results.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = {"overrides": list(words), "choices": dict(choices or {}), "seed": seed}
    (folder / "command.json").write_text(json.dumps(command))
    own = {"seed": seed, "paths": {"run_dir": str(folder)}}
    (folder / "config.yaml").write_text(yaml.safe_dump({**(config or {}), **own}))
    (folder / "train.log").write_text(log)
    if test is not None:
        record: dict[str, Any] = {"run_name": "comet", "seed": seed, "main_metrics": dict(main or {})}
        record |= {"numbers": {"test": {"network": dict(test)}, **(numbers or {})}}
        record |= {"monitor": "val/loss", "best": 0.4, "parameters": 1234, "epochs": 3, "seconds_per_epoch": 1.5}
        (folder / "results.json").write_text(json.dumps(record | more))
    return folder
