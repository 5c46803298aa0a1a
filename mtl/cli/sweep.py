"""Report on a multirun after each job and at its end."""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class SweepTable(Callback):
    """Write ``summary.csv`` and ``summary.md`` after each job of a multirun, and print the table at the end.

    Everything is read from the folder of the sweep, so it does not matter which process or machine ran a job. Imports
    are inside the methods, since Hydra creates this object before anything else.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        atexit.register(self.stopped, config)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if "MULTIRUN" in str(config.hydra.mode):
            from mtl.report.summary import write

            folder = Path(config.hydra.sweep.dir)
            write([folder], folder)

    def stopped(self, config: DictConfig) -> None:
        """Print the table and how to continue, after a failure or signal; Hydra calls no method then."""
        from mtl.report.summary import CSV
        from mtl.runs.commands import GIVEN, sweep_command

        self.on_multirun_end(config)
        if (Path(config.hydra.sweep.dir) / CSV).exists():
            print(f"finish the sweep with: {sweep_command(GIVEN, config.hydra.sweep.dir)}")

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from mtl.checks import InputError
        from mtl.report.runs import find_runs
        from mtl.report.summary import CSV, MARKDOWN, show, write
        from mtl.report.tables import missing

        atexit.unregister(self.stopped)
        folder = Path(config.hydra.sweep.dir)
        try:
            find_runs([folder])
        except InputError:
            return  # no job has begun
        runs, comparison = write([folder], folder)
        show(comparison, missing(runs), f"{folder / CSV}, {MARKDOWN}")
