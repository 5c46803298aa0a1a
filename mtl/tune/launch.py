"""Run a trial as ``mtl train`` in a separate process: a crash, a leak or a lack of memory ends only this trial."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from optuna.trial import Trial

from mtl.config.resume import is_portable
from mtl.files.records import LOCK, RESULTS
from mtl.overrides import quote_path
from mtl.report.runs import finished_results
from mtl.runs.signals import SIGNALS
from mtl.runs.trial import FITTED
from mtl.tune.definition import Definition
from mtl.tune.process import LOST, MAIN, SERVER, start
from mtl.tune.queue import Lease, Outcome, Queue
from mtl.tune.space import write_overrides

OUTPUT = "output.txt"  # everything that the process prints
LAST = Path("checkpoints") / "last.ckpt"
PRUNED = "pruned"
STOPPED = {LOST, *(128 + number for number in SIGNALS)}  # exit status of a run that was stopped
PATIENCE = 300  # seconds in which the process of a dead worker completes its step and saves


def run_folder(folder: Path, label: str, number: int) -> Path:
    """Return the run folder of a trial; ``folder``: of all studies, ``label``: see ``Definition``."""
    return folder / label / f"trial_{number:05d}"


@dataclass(frozen=True)
class Launcher:
    """Run trials in folders below ``folder``; ``program`` does ``mtl train``, see ``start``, and can be pickled."""

    folder: Path
    program: Callable[..., object] = MAIN.main

    def __call__(self, queue: Queue, trial: Trial) -> Outcome | None:
        """Run ``trial`` to its end, from its last checkpoint if it has one, and return how it ended.

        Return None if the process was killed or another worker took over the trial. If this worker is stopped, the
        process saves its state first.
        """
        folder = run_folder(self.folder, queue.definition.label, trial.number).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with Lease(queue, trial.number, lost=lambda: None):  # while waiting, keep the trial from other workers
                FileLock(folder / LOCK).acquire(timeout=PATIENCE).lock.release()
        except Timeout:  # the process of an earlier worker still runs
            return None
        if not queue.holds(trial.number):
            return None
        seed, was_fitted = queue.training_seed(trial.number), trial.user_attrs.get(FITTED)
        # These overrides reproduce the trial
        overrides = [*self.overrides(queue.definition, trial.number), *write_overrides({**trial.params, "seed": seed})]
        for name, entry in (("folder", str(folder)), ("command", overrides), ("seed", seed)):
            queue.set(trial.number, name, entry)
        if not (folder / RESULTS).exists():
            if (folder / LAST).exists() and not was_fitted:
                overrides = [
                    f"ckpt={quote_path(folder / LAST)}",
                    *(override for override in overrides if not is_portable(override)),
                ]
            else:  # a run that was killed during its test has no results and nothing left to train: start again
                shutil.rmtree(folder)
                folder.mkdir()
                queue.set(trial.number, FITTED, False)
                overrides = [*overrides, f"hydra.run.dir={quote_path(folder)}"]
            status, lost = self._run(queue, trial, folder, overrides)
            if lost or status < 0 or status in STOPPED:
                return None
            if status:
                return Outcome(error=_message(folder))
        if PRUNED in queue.frozen(trial.number).user_attrs:
            return Outcome(pruned=True)
        results = finished_results(folder)
        value = results.best if results else None
        return Outcome(value=value) if value is not None else Outcome(error=f"no finite {queue.monitor} was measured")

    def overrides(self, definition: Definition, number: int) -> list[str]:
        """Return the overrides of trial ``number``, with the folders of earlier runs in place of their placeholders.

        A placeholder stands for the run of the same number, in a search always for the first one.
        """
        source, overrides = 0 if definition.space else number, definition.overrides
        for text, label in definition.sources.items():
            folder = quote_path(run_folder(self.folder, label, source).absolute()).strip("'")
            overrides = [override.replace(text, folder) for override in overrides]
        return overrides

    def _run(self, queue: Queue, trial: Trial, folder: Path, overrides: Sequence[str]) -> tuple[int, bool]:
        """Return the exit status of ``mtl train OVERRIDES``, and whether another worker has taken over the trial."""
        ours, theirs = SERVER.Pipe()
        with theirs:
            process = start(self.program, overrides, folder / OUTPUT, theirs)
        try:
            with Lease(queue, trial.number, lost=process.terminate) as lease:
                while message := _received(ours):
                    if message == FITTED:
                        queue.set(trial.number, FITTED, True)
                        continue
                    prunes = _prunes(queue, trial, *message)
                    with contextlib.suppress(OSError):  # it was killed meanwhile
                        ours.send(prunes)
                process.join()
                assert process.exitcode is not None  # it has ended
                return process.exitcode, lease.is_lost
        finally:
            ours.close()
            process.terminate()
            process.join()


def _received(pipe: Connection) -> Any:
    """Return the next message of the run, see ``TrialEnd``; None if it has ended."""
    with contextlib.suppress(EOFError, OSError):  # it was killed, perhaps while it wrote
        return pipe.recv()
    return None


def _prunes(queue: Queue, trial: Trial, epoch: int, value: float) -> bool:
    """Store the ``value`` that the run has reported after ``epoch``, and return whether the study prunes it."""
    if epoch not in queue.frozen(trial.number).intermediate_values:  # an epoch may be trained twice
        trial.report(value, epoch)
    if not trial.should_prune():
        return False
    queue.set(trial.number, PRUNED, epoch)
    return True


def _message(folder: Path) -> str:
    """Return the error message of the process."""
    lines = (folder / OUTPUT).read_text(errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or [line for line in lines if line.strip()] or ["the process ended without a message"])[-1]


Launch = Callable[[Queue, Trial], Outcome | None]
