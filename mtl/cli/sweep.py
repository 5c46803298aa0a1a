"""Announce each job of a multirun, report on the sweep after each job, and write its page at the end."""

from __future__ import annotations

import atexit
import logging
import math
import time
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from mtl.overrides import key_of

log = logging.getLogger("mtl")


class SweepTable(Callback):
    """Write ``summary.csv`` after each job; at the end, print the table and write the other files of ``mtl report``.

    Everything is read from the folder of the sweep, so it does not matter which process or machine ran a job. Imports
    are inside the methods, since Hydra creates this object before anything else.
    """

    varied: dict[str, int] | None = None  # the number of values of each option; unknown in the process of a launcher
    began = 0.0

    def __init__(self) -> None:
        self.messages = set[str]()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self.began = time.monotonic()
        atexit.register(self.stopped, config)
        running = GlobalHydra.instance().hydra
        parser = OverridesParser.create(running.config_loader if running else None)  # which finds those of glob(*)
        overrides = parser.parse_overrides(list(config.hydra.overrides.task))
        swept = [override for override in overrides if override.is_discrete_sweep()]
        self.varied = {override.get_key_element(): len(list(override.sweep_string_iterator())) for override in swept}

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        if "MULTIRUN" in str(config.hydra.mode):
            from mtl.files.formatting import duration
            from mtl.runs.console import ConsoleHandler

            for handler in logging.getLogger().handlers:  # Hydra makes new ones for each job
                if isinstance(handler, ConsoleHandler):
                    handler.addFilter(self._is_new)
            overrides, of, done = list(config.hydra.overrides.task), "", config.hydra.job.num
            if self.varied is not None:
                overrides = [override for override in overrides if key_of(override) in self.varied]
                jobs = math.prod(self.varied.values())
                left = (time.monotonic() - self.began) * (jobs - done) / max(done, 1)
                of = f" of {jobs}" + (f", about {duration(left)} left" if done else "")
            log.info("job %d%s: %s", done + 1, of, " ".join(overrides))

    def _is_new(self, record: logging.LogRecord) -> bool:
        """Say whether no earlier job has said the same: what the columns are taken for, say, is shown once."""
        text = record.getMessage()
        is_new = text not in self.messages or record.levelno >= logging.ERROR
        self.messages.add(text)
        return is_new

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if "MULTIRUN" in str(config.hydra.mode):
            from mtl.files.writing import write_text
            from mtl.report.page import CSV
            from mtl.report.runs import read_runs

            folder = Path(config.hydra.sweep.dir)
            write_text(folder / CSV, read_runs([folder]).table.write_csv())

    def stopped(self, config: DictConfig) -> None:
        """Print the table and how to continue, after a failure or signal; Hydra calls no method then."""
        if not any(path.is_dir() for path in Path(config.hydra.sweep.dir).glob("*")):
            return  # no job has begun
        from mtl.report.page import CSV
        from mtl.runs.commands import config_dirs, sweep_command

        self.on_multirun_end(config)
        if (Path(config.hydra.sweep.dir) / CSV).exists():
            searched = [source for source in config.hydra.runtime.config_sources if source.provider == "command-line"]
            flags = config_dirs(f"{source.schema}://{source.path}" for source in searched)
            overrides = [*config.hydra.overrides.task, *config.hydra.overrides.hydra]
            print(f"finish the sweep with: {sweep_command(['-m', *flags, *overrides], config.hydra.sweep.dir)}")

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from mtl.checks import InputError
        from mtl.cli.report import compare_runs
        from mtl.report.runs import find_runs

        atexit.unregister(self.stopped)
        folder = Path(config.hydra.sweep.dir)
        try:
            find_runs([folder])
        except InputError:
            return  # no job has begun
        compare_runs([str(folder)])
