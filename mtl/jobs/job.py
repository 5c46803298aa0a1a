"""Do a run of ``mtl train`` in a separate process: a crash, a leak or a lack of memory ends only this run."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mtl.config.portable import is_portable
from mtl.files.run_files import LOCK, read_json
from mtl.files.writing import write_json
from mtl.jobs.process import LOST, MAIN, SERVER, start
from mtl.overrides import quote_path
from mtl.report.runs import finished_results
from mtl.runs.signals import SIGNALS
from mtl.runs.trial import FITTED

RECORD = "job.json"  # what workers note of a job: who began it, how often and for how long, its options, its error
OUTPUT = "output.txt"  # everything that the process prints
LAST = Path("checkpoints") / "last.ckpt"
STOPPED = {LOST, *(128 + number for number in SIGNALS)}  # exit status of a run that was stopped


@dataclass(frozen=True)
class JobResult:
    """How a job ended: with the ``value`` of the monitored metric, pruned, or failed with the message ``error``."""

    value: float | None = None
    pruned: bool = False
    error: str = ""
    seconds: float = 0.0  # that all workers have spent on it


@dataclass
class Job:
    """``mtl train OVERRIDES`` in ``folder``, done once, by whichever worker holds the lock beside the folder."""

    name: str
    number: int  # in its list
    folder: Path
    monitor: str
    overrides: Sequence[str] = ()
    text: str = ""  # what distinguishes its options, for the reader

    def __post_init__(self) -> None:
        self.lock = FileLock(f"{self.folder}.lock")

    def acquire(self) -> bool:
        """Return whether this worker has the job now; no other one has it until ``lock`` is released."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(Timeout):
            self.lock.acquire(timeout=0)
        return self.lock.is_locked

    def record(self) -> dict[str, Any]:
        """Return what workers have noted of the job: {} if none has begun it on this disk."""
        return read_json(self.folder / RECORD)

    def note(self, **entries: Any) -> None:
        """Add ``entries`` to the record, or replace them."""
        write_json(self.folder / RECORD, self.record() | entries)

    def result(self) -> JobResult | None:
        """Return how the run ended, None if it has no results. Raises InputError if they are of an earlier mtl."""
        results, record = finished_results(self.folder), self.record()
        if results is None:
            return None
        pruned, seconds = record.get("pruned", False), record.get("seconds", 0.0)
        error = "" if pruned or results.best is not None else f"no finite {self.monitor} was measured"
        return JobResult(None if pruned else results.best, pruned, error, seconds)


Prune = Callable[[int, float], bool]  # whether to end the run, by the epoch and the value after it
Do = Callable[[Job, Prune], JobResult | None]


def do(job: Job, prune: Prune, program: Callable[..., object] = MAIN.main) -> JobResult | None:
    """Do ``job`` to its end, from its last checkpoint if it has one; return None if its process was killed.

    If this worker is stopped, the process saves its state first. ``program`` does ``mtl train``, see ``start``, and can
    be pickled.
    """
    lock = FileLock(job.folder / LOCK)
    with contextlib.suppress(Timeout):
        lock.acquire(timeout=0)
    if not lock.is_locked:
        say(f"{job.name}: waiting for the process of an earlier worker, which completes its step and saves")
        lock.acquire()
    lock.release()
    if job.result() is None:
        overrides = job.overrides
        if (job.folder / LAST).exists() and not job.record().get("fitted"):
            local = [override for override in overrides if not is_portable(override)]
            overrides = [f"ckpt={quote_path(job.folder / LAST)}", *local]
        else:  # a run that was killed during its test has no results and nothing left to train: start again
            for path in job.folder.iterdir():
                if path.name != RECORD:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            job.note(fitted=False)
            overrides = [*overrides, f"hydra.run.dir={quote_path(job.folder)}"]
        status = _run(job, prune, program, overrides)
        if status < 0 or status in STOPPED:
            return None
        if status:
            return JobResult(error=_message(job.folder))
    return job.result() or JobResult(error="the process ended without results")


def say(text: str) -> None:
    """Print a line at once, also into a file."""
    print(text, flush=True)


def _run(job: Job, prune: Prune, program: Callable[..., object], overrides: Sequence[str]) -> int:
    """Return the exit status of ``mtl train OVERRIDES``."""
    ours, theirs = SERVER.Pipe()
    with theirs:
        process = start(program, overrides, job.folder / OUTPUT, theirs)
    try:
        while message := _received(ours):
            if message == FITTED:
                job.note(fitted=True)
                continue
            if prunes := prune(*message):
                job.note(pruned=True)
            with contextlib.suppress(OSError):  # it was killed meanwhile
                ours.send(prunes)
        process.join()
        assert process.exitcode is not None  # it has ended
        return process.exitcode
    finally:
        ours.close()
        process.terminate()
        process.join()


def _received(pipe: Connection) -> Any:
    """Return the next message of the run, see ``TrialEnd``; None if it has ended."""
    with contextlib.suppress(EOFError, OSError):  # it was killed, perhaps while it wrote
        return pipe.recv()
    return None


def _message(folder: Path) -> str:
    """Return the error message of the process."""
    lines = (folder / OUTPUT).read_text(errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or [line for line in lines if line.strip()] or ["the process ended without a message"])[-1]
