"""The pipe between a worker and the run of its trial: the run reports values, the worker may prune it."""

from __future__ import annotations

import os
import queue
import signal
import threading
from multiprocessing.connection import Connection

FITTED = "fitted"  # the message that the training is over; all others are an epoch and the value after it


class TrialEnd:
    """The run's end of the ``pipe``, in its first process. If the worker closes it or dies, the run gets a SIGTERM."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._answers: queue.Queue[bool] = queue.Queue()
        self._stops = True  # whether the end of the pipe stops the run
        threading.Thread(target=self._read, daemon=True).start()

    def report(self, epoch: int, value: float) -> bool:
        """Report the ``value`` after ``epoch``; return whether the worker prunes the run."""
        self._send((epoch, value))
        return self._answers.get()

    def fitted(self) -> None:
        """Report that the training is over; the test then runs to its end even if the worker dies."""
        self._stops = False
        self._send(FITTED)

    def _send(self, message: tuple[int, float] | str) -> None:
        try:
            self._pipe.send(message)
        except OSError:  # the worker is gone, as the thread notices
            self._answers.put(False)

    def _read(self) -> None:
        try:
            while True:
                self._answers.put(self._pipe.recv())
        except (EOFError, OSError):
            pass
        if self._stops:
            os.kill(os.getpid(), signal.SIGTERM)
        self._answers.put(False)
