"""Stop a run on SIGTERM, SIGINT (Ctrl-C) and SIGHUP: after the step while it trains, else at once."""

from __future__ import annotations

import _thread
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
BEFORE = "with nothing to save"
STOP_TIMEOUT_S = 60.0  # seconds that a process may wait for the others after a signal
PING = signal.SIGURG  # the system ignores it

log = logging.getLogger(__name__)


class Stopped(BaseException):
    """Report that signal ``number`` stopped the run; the message says how to resume it.

    As with KeyboardInterrupt, ``except Exception`` does not catch it: a signal may arrive anywhere.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class StopSignals:
    """Record the signal that asks the program to stop, and stop at once unless a training loop is running.

    ``number`` is that signal, or 0. Outside training, the handler raises ``Stopped`` immediately. Between
    ``training_starts`` and ``training_ends`` it only sets ``number``, which the loop reads after each step. There, a
    SIGINT after another signal stops the program at once.
    """

    def __init__(self) -> None:
        self.number = 0
        self.is_listening = False
        self._training = False
        self._message = BEFORE
        self._answered = 0.0

    @contextmanager
    def listening(self, message: str = BEFORE) -> Iterator[None]:
        """Handle the signals inside the ``with`` block; put the earlier handlers back at its end, whatever happens.

        ``message``: what the outermost block says of a stop outside training, after "stopped by SIGNAL".
        A nested block installs our handlers again after Lightning has replaced them. A signal that is ignored stays
        ignored (``nohup``, a background job). Outside the main thread, where Python allows no handlers, this does
        nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        outermost = not self.is_listening
        if outermost:
            self.number, self._training, self._message = 0, False, message
        earlier = {number: signal.getsignal(number) for number in SIGNALS}
        try:
            self.is_listening = True
            for number, handler in earlier.items():
                if handler != signal.SIG_IGN:
                    signal.signal(number, self._handle)
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            if outermost:
                self.is_listening = self._training = False

    @contextmanager
    def watching(self, end_others: Callable[[signal.Signals], object] | None = None) -> Iterator[None]:
        """End the process if, after a signal, its main thread waits for ``STOP_TIMEOUT_S`` seconds for other processes.

        Python calls handlers only between two operations of the main thread: never, if another process does not take
        part in a collective operation. So a thread reads the signals, too, and then pings the main thread.
        ``end_others`` sends a signal to the processes that this one has started.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        (reading, writing), ended = socket.socketpair(), threading.Event()
        writing.setblocking(False)
        earlier = signal.signal(PING, self._answer)
        descriptor = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reading, ended, end_others), daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            signal.set_wakeup_fd(descriptor)
            signal.signal(PING, earlier)
            writing.close()

    def _answer(self, number: int, frame: FrameType | None) -> None:
        self._answered = time.monotonic()

    def _watch(
        self, reading: socket.socket, ended: threading.Event, end_others: Callable[[signal.Signals], object] | None
    ) -> None:
        with reading:
            number = next((byte[0] for byte in iter(lambda: reading.recv(1), b"") if byte[0] in SIGNALS), 0)
            self._answered = time.monotonic()
            while time.monotonic() < self._answered + STOP_TIMEOUT_S:
                if ended.wait(STOP_TIMEOUT_S / 60):
                    return
                _thread.interrupt_main(PING)
        name, message = signal.Signals(number).name, self._message.removeprefix("at once, ")
        log.warning("stopped by %s after %.0f s of waiting for other processes, %s", name, STOP_TIMEOUT_S, message)
        if end_others is not None:
            end_others(signal.SIGKILL)
        logging.shutdown()
        os._exit(128 + number)

    def training_starts(self, resume: str) -> None:
        """Delay signals until the end of a step; ``resume``: the command that resumes after an immediate stop."""
        self._training = True
        self._message = f"at once, without saving; resume from the last save with: {resume}"

    def training_ends(self, weights: str, evaluate: str) -> None:
        """Stop at once again, also for a signal received during training.

        ``weights``: the checkpoint to be tested. ``evaluate``: the command that tests it.
        """
        self._training = False
        self._message = f"during the test; the trained weights are in {weights}, test them with: {evaluate}"
        if self.number:
            self._stop()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = bool(self.number)
        self.number = number
        if not self._training or (again and number == signal.SIGINT):
            self._stop()

    def _stop(self) -> None:
        raise Stopped(f"stopped by {signal.Signals(self.number).name} {self._message}", self.number)
