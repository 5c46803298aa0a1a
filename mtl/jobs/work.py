"""Work on lists of runs until all of them have ended."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean

from omegaconf import DictConfig

from mtl.checks import InputError, require
from mtl.config.check import checked_run
from mtl.files.formatting import duration, number
from mtl.jobs import job as jobs
from mtl.jobs.job import Do, Job, JobResult, say
from mtl.jobs.setting import Setting, overrides_by_key, replace_references, require_same, run_folder
from mtl.runs.console import protect_streams
from mtl.runs.signals import StopSignals
from mtl.training.metrics import mode_of

STOPPED = "during a study; the same command, or another worker, goes on"
POLL = 1.0  # seconds between two looks at what other workers have


@dataclass(kw_only=True)
class JobList:
    """The ``count`` runs of a setting with ``seed`` and the next ones, so that settings can be compared in pairs.

    Any number of workers do them, at any time; all that is known of them is in their folders. A run that failed is
    tried again by the next command. ``folder``: of the runs of all settings. ``monitor``: the metric whose best value
    is the result of a run. ``retries``: restarts of a run whose process or worker was killed. ``references``: the label
    of the setting whose run of the same number each text in the overrides stands for.
    """

    setting: Setting
    folder: Path
    monitor: str
    count: int
    retries: int
    seed: int
    references: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._results: dict[int, JobResult] = {}
        self._failed_before = {index for index in range(self.count) if self.job(index).record().get("error")}

    def ended(self) -> Mapping[int, JobResult]:
        """Return how those ended that have, by number; InputError for runs with other options or of an earlier mtl."""
        for index in range(self.count):
            if index not in self._results and self.job(index).folder.exists() and (result := self._result(index)):
                self._results[index] = result
        return {index: result for index, result in self._results.items() if index < self.count}

    def _result(self, number: int) -> JobResult | None:
        job = self.job(number)
        record = job.record()
        if "overrides" in record:
            require_same(job.name, overrides_by_key(record["overrides"]), overrides_by_key(self._own(number)))
        failed = record.get("error") and number not in self._failed_before
        return job.result() or (JobResult(error=record["error"]) if failed else None)

    def _own(self, number: int) -> list[str]:
        return [*self.setting.overrides, f"seed={self.seed + number}"]

    def begin(self, job: Job) -> bool:
        """Complete ``job``, whose lock this worker has; return False if it is not, or no longer, to be done."""
        if self._result(job.number):  # another worker had it until a moment ago
            return False
        job.overrides = [*self.overrides(job.number), f"seed={self.seed + job.number}"]
        if job.number in self._failed_before:
            self._failed_before.discard(job.number)
            job.note(error="", starts=0)
        job.note(overrides=self._own(job.number))
        return True

    def finish(self, job: Job, result: JobResult) -> None:
        """Store how ``job`` ended, unless its results say so."""
        job.note(error=result.error)

    def prune(self, job: Job, epoch: int, value: float) -> bool:
        """Return whether to end ``job``, which has the ``value`` after ``epoch``."""
        return False

    def job(self, number: int) -> Job:
        """Return run ``number``, without its overrides."""
        folder = run_folder(self.folder, self.setting.label, number).absolute()
        return Job(f"{self.setting.name} trial {number}", number, folder, self.monitor)

    def num_begun(self) -> int:
        """Return how many runs have begun on this disk."""
        return sum(self.job(index).folder.exists() for index in range(self.count))

    def pending(self) -> Iterator[Job]:
        """Yield the runs that have not ended."""
        ended = self.ended()
        return (self.job(index) for index in range(self.count) if index not in ended)

    def overrides(self, number: int) -> list[str]:
        """Return the overrides of the setting; references stand for runs ``number``."""
        folders = {text: run_folder(self.folder, label, number) for text, label in self.references.items()}
        return replace_references(self.setting.overrides, folders)

    def take(self) -> Job | None:
        """Return a job to do, whose lock this worker has; None if none is free now, until all have ended.

        A job has failed if it was already restarted ``retries`` times.
        """
        for job in self.pending():
            if job.acquire():
                if self.begin(job):
                    starts = job.record().get("starts", 0)
                    if starts <= self.retries:
                        job.note(starts=starts + 1, worker=f"process {os.getpid()} on {socket.gethostname()}")
                        return job
                    failed = JobResult(error=f"its process or worker was killed {starts} times")
                    say(f"{job.name}: failed: {failed.error}")
                    self.finish(job, failed)
                job.lock.release()
        return None

    def held(self) -> Iterator[str]:
        """Yield the jobs that workers have now, with who has them and by which lock."""
        for job in self.pending():
            if worker := job.record().get("worker"):
                if job.acquire():
                    job.lock.release()
                else:
                    yield f"{job.name} ({worker} has {job.lock.lock_file})"


@contextmanager
def working(folder: Path, show: object = False) -> Iterator[None]:
    """Work on runs in ``folder``, or ``show`` those that there are; a signal ends the block with a message."""
    protect_streams()
    require(not show or folder.exists(), f"{folder}: nothing has been run yet")
    with StopSignals().listening(STOPPED):
        yield


def checked_runs(settings: Sequence[Sequence[str]]) -> list[DictConfig]:
    """Return the configuration of a run with each list of overrides, to find wrong options before any run."""
    runs = [checked_run(overrides) for overrides in settings]
    monitors = sorted({str(run.monitor) for run in runs})
    require(len(monitors) == 1, f"the settings have different metrics to monitor: {', '.join(monitors)}")
    return runs


def work(sources: Sequence[JobList], max_failures: int | None, later: int | None = 0, do: Do | None = None) -> None:
    """Do jobs of ``sources`` until all have ended, always of the source with the fewest ones begun.

    All sources then have about equally many results if the work is interrupted. Waits while other workers do the last
    jobs, since one of them might be killed. Raises InputError after ``max_failures`` failed jobs in a row.

    ``later``: the number of runs that follow these, which count for the time left; None: unknown, so no time is said.
    ``do``: does a job in another way than ``mtl.jobs.job.do``.
    """
    failures, waiting = 0, False
    while any(len(source.ended()) < source.count for source in sources):
        in_turn = sorted(sources, key=lambda source: source.num_begun())  # a stable sort: the first one wins a tie
        taken = next(((source, job) for source in in_turn if (job := source.take())), None)
        if taken is None:
            if not waiting:
                held = "".join(f", {text}" for source in sources for text in source.held())
                say(f"waiting for other workers{held}; Ctrl-C leaves them alone")
            waiting = True
            time.sleep(POLL)
            continue
        waiting, error = False, _do(*taken, do or jobs.do, lambda: "" if later is None else _left(sources, later))
        failures = failures + 1 if error else 0
        if max_failures and failures >= max_failures:
            raise InputError(
                f"{failures} trials in a row failed, the last one with: {error}. "
                "Correct this, or set max_failures=null, and start the same command again"
            )


def _do(source: JobList, job: Job, do: Do, left: Callable[[], str]) -> str:
    """Do ``job``, store how it ended, if it has, and release it; return its error, "" if there is none.

    ``left`` returns the end of the last line.
    """
    started, starts = time.monotonic(), job.record()["starts"]
    say(job.name + " again" * (starts > 1) + (f": {job.text}" if job.text else ""))
    try:
        try:
            result = do(job, partial(source.prune, job))
        except BaseException:  # the worker is stopped, which does not count
            job.note(starts=starts - 1)
            raise
        finally:
            seconds = time.monotonic() - started
            job.note(seconds=job.record().get("seconds", 0.0) + seconds)
        if result is None:
            say(f"{job.name}: its process was killed")
            return ""
        source.finish(job, result)
    finally:
        job.lock.release()
    text = "pruned" if result.pruned else f"failed: {result.error}" if result.error else number(result.value, 6)
    say(f"{job.name}: {text} ({seconds:.0f} s){_best(source)}{left()}")
    return result.error


def _best(source: JobList) -> str:
    """Return the best value so far and its run as the end of a line; "" if no run has a value."""
    ended = source.ended()
    values = {index: result.value for index, result in ended.items() if result.value is not None}
    if not values:
        return ""
    best = (max if mode_of(source.monitor) == "max" else min)(values, key=values.__getitem__)
    return f"; {len(ended)} of {source.count} done, best {number(values[best], 6)} (trial {best})"


def _left(sources: Sequence[JobList], later: int) -> str:
    """Return how long the runs take that are left, as the end of a line; "" if there are none, or none has succeeded.

    They are assumed to take as long as those that have ended, on average, and to be shared by all workers.
    """
    ended = [result for source in sources for result in source.ended().values()]
    seconds = [result.seconds for result in ended if not result.error]
    runs = sum(source.count for source in sources) - len(ended) + later
    if not runs or not seconds:
        return ""
    workers = 1 + sum(1 for source in sources for _ in source.held())
    return f"; about {duration(runs * fmean(seconds) / workers)} left ({runs} run{'s' * (runs > 1)})"
