"""Run a trial as ``train.py`` in a process of its own: a crash, a leak or a lack of memory ends this trial alone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from filelock import FileLock, Timeout
from optuna.trial import Trial

from mtl.cli.commands import quoted
from mtl.records import LOCK, RESULTS, read_json
from mtl.tune.channel import VARIABLE
from mtl.tune.queue import Lease, Outcome, Queue
from mtl.tune.space import words

OUTPUT = "output.txt"  # all that the process prints
LAST = Path("checkpoints") / "last.ckpt"
LOCAL = ("paths.", "hydra.", "trust=")  # options that a checkpoint does not bring with it
PRUNED, FITTED = "pruned", "fitted"
SIGNALS = {128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}  # exit status of a stopped run
PATIENCE = 300  # seconds in which the process of a worker that is gone completes its step and saves


def run_folder(folder: Path, label: str, number: int) -> Path:
    """Return the run folder of a trial; ``folder``: of all studies, ``label``: of the trial's definition."""
    return folder / label / f"trial_{number:05d}"


@dataclass(frozen=True)
class Launcher:
    """Run trials as ``program``, as in ``mtl train``, in folders below ``folder``."""

    program: Sequence[str]
    folder: Path

    def __call__(self, queue: Queue, trial: Trial) -> Outcome | None:
        """Run ``trial`` to its end, from its last checkpoint if it has one, and return how it ended.

        Return None if the process was killed or the trial went to another worker. If this worker is stopped, the
        process saves its state first.
        """
        folder = run_folder(self.folder, queue.definition.label, trial.number).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with Lease(queue, trial.number, lost=lambda: None):  # else another worker would take the trial meanwhile
                FileLock(folder / LOCK).acquire(timeout=PATIENCE).lock.release()
        except Timeout:  # the process of an earlier worker does not end
            return None
        if not queue.holds(trial.number):
            return None
        seed, was_fitted = queue.training_seed(trial.number), trial.user_attrs.get(FITTED)
        given = [*queue.definition.words, *words({**trial.params, "seed": seed})]  # they give the same value again
        for name, known in (("folder", str(folder)), ("command", given), ("seed", seed)):
            queue.set(trial.number, name, known)
        if not (folder / RESULTS).exists():
            if (folder / LAST).exists() and not was_fitted:
                given = [f"ckpt={quoted(folder / LAST)}", *(word for word in given if word.startswith(LOCAL))]
            else:  # a run that was killed during its test has nothing to train, and no results: it starts again
                shutil.rmtree(folder)
                folder.mkdir()
                queue.set(trial.number, FITTED, False)
                given = [*given, f"hydra.run.dir={quoted(folder)}"]
            status, lost = self._run(queue, trial, folder, given)
            if lost or status < 0 or status in SIGNALS:
                return None
            if status:
                return Outcome(error=_message(folder))
        if PRUNED in queue.frozen(trial.number).user_attrs:
            return Outcome(pruned=True)
        value = read_json(folder / RESULTS).get(f"best_{queue.monitor.replace('/', '_')}")
        return Outcome(value=value) if value is not None else Outcome(error=f"no finite {queue.monitor} was measured")

    def _run(self, queue: Queue, trial: Trial, folder: Path, given: Sequence[str]) -> tuple[int, bool]:
        """Return the exit status of ``train.py given``, and whether the trial went to another worker meanwhile."""
        ours, theirs = socket.socketpair()
        with (folder / OUTPUT).open("ab") as output:
            process = subprocess.Popen(
                [*self.program, *given],
                env=os.environ | {VARIABLE: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the worker, which stops the process
            )
        theirs.close()
        try:
            with Lease(queue, trial.number, lost=process.terminate) as lease, ours.makefile("rw") as line:
                while message := _received(line):
                    answer = _answer(queue, trial, message)
                    with contextlib.suppress(OSError):  # it was killed meanwhile
                        line.write(answer)
                        line.flush()
                return process.wait(), lease.is_lost
        finally:
            ours.close()
            process.terminate()
            process.wait()


def _received(line: TextIO) -> dict[str, float]:
    """Return the next message of the run, {} if it has ended."""
    with contextlib.suppress(OSError, ValueError):  # it was killed, perhaps while it wrote
        return dict(json.loads(line.readline()))
    return {}


def _answer(queue: Queue, trial: Trial, message: dict[str, float]) -> str:
    """Store what the run reports, and return the answer."""
    if FITTED in message:
        queue.set(trial.number, FITTED, True)
        return ""
    epoch = int(message["epoch"])
    if epoch not in queue.frozen(trial.number).intermediate_values:  # else it was trained twice
        trial.report(message["value"], epoch)
    if not trial.should_prune():
        return "go\n"
    queue.set(trial.number, PRUNED, epoch)
    return "stop\n"


def _message(folder: Path) -> str:
    """Return what the process said about its error."""
    lines = (folder / OUTPUT).read_text(errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or [line for line in lines if line.strip()] or ["the process ended without a message"])[-1]


Launch = Callable[[Queue, Trial], Outcome | None]
