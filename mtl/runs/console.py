"""Write to the console without breaking a progress bar, and without ending a run when the console goes away."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO, TypeVar

Step = TypeVar("Step")


class ConsoleFormatter(logging.Formatter):
    """Write the time and the message of a record, and its level if it is a warning or worse; ``train.log`` has more."""

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        text = f"{self.formatTime(record, self.datefmt)} {level}{record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class ConsoleHandler(logging.Handler):
    """Print records to the current ``sys.stdout``, which a live progress bar replaces to print lines above itself.

    A record with the attribute ``file_only`` is not printed.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "file_only", False):
            return
        stream: TextIO = sys.stdout
        stream.write(self.format(record) + "\n")
        stream.flush()


class FaultTolerantStream:
    """Forward text to ``stream``; if that fails (closed, full disk, pipe without reader), drop all text from then on.

    A run of hours must not end because nobody reads what it prints.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._lost = stream, False

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[[], object]) -> None:
        if self._lost:
            return
        try:
            call()
        except (OSError, ValueError):  # ValueError: the stream is closed
            self._lost = True
            with contextlib.suppress(OSError, ValueError):  # the interpreter writes its buffer there when it ends
                sink = os.open(os.devnull, os.O_WRONLY)
                os.dup2(sink, self._stream.fileno())
                os.close(sink)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def protect_streams() -> None:
    """Make ``sys.stdout`` and ``sys.stderr`` accept all characters and outlive their terminal, pipe or file."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # started without the stream, as in ``python train.py >&-``
            stream = open(os.devnull, "w")  # noqa: SIM115  (stays open as long as the program)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # what the terminal cannot show becomes a question mark
        if not isinstance(stream, FaultTolerantStream):
            stream = FaultTolerantStream(stream)
        setattr(sys, name, stream)


def with_progress_bar(steps: Sequence[Step], title: str) -> Iterable[Step]:
    """Yield ``steps``, on a terminal beside a bar that shows their ``title`` and how long they will take."""
    from rich.console import Console  # what --help needs not
    from rich.progress import track

    console = Console(stderr=True)
    return track(steps, title, console=console, transient=True, disable=not console.is_terminal)
