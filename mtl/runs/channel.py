"""The channel between a worker and the run of its trial: the run reports values, the worker may prune it."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import threading

VARIABLE = "MTL_TRIAL"  # holds the file descriptor of the run's end of the channel


def started() -> bool:
    """Return whether a worker started this run."""
    return VARIABLE in os.environ


class TrialChannel:
    """The run's end of the channel, in its first process. If the worker closes it or dies, the run gets a SIGTERM."""

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=int(os.environ[VARIABLE]))
        self._answers: queue.Queue[str] = queue.Queue()
        self._stops = True  # whether the end of the channel stops the run
        threading.Thread(target=self._read, daemon=True).start()

    def report(self, epoch: int, value: float) -> bool:
        """Report the ``value`` after ``epoch``; return whether the worker prunes the run."""
        self._send({"epoch": epoch, "value": value})
        return self._answers.get() == "stop\n"

    def fitted(self) -> None:
        """Report that the training is over; the test then runs to its end even if the worker dies."""
        self._stops = False
        self._send({"fitted": True})

    def _send(self, message: dict[str, float | bool]) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # the worker is gone, as the thread notices
            self._answers.put("")

    def _read(self) -> None:
        try:
            with self._socket, self._socket.makefile() as lines:
                for line in lines:
                    self._answers.put(line)
        except OSError:
            pass
        if self._stops:
            os.kill(os.getpid(), signal.SIGTERM)
        self._answers.put("")
