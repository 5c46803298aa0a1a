"""Define what a run tells a logger beside the values that Lightning logs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

MAX_LISTED_TASKS = 64  # with more tasks, pages, tables and loggers have their distribution and some of them


class RunLogger:
    """Mixin of loggers: a run calls these methods, and a logger replaces those that it can do something with.

    Lightning's own loggers have none of them, and go without. ``takes_all_tasks``: the logger gets the values of every
    task; others get those of ``MAX_LISTED_TASKS`` tasks and their distribution, since a page draws a chart for each.
    """

    takes_all_tasks = False

    def resume_at(self, step: int) -> None:
        """Drop what was logged from ``step`` on, since it will be computed again; a new run starts at 0."""

    def log_picture(self, name: str, file: Path, step: int) -> None:
        """Show the PNG ``file``."""

    def log_markdown(self, name: str, text: str) -> None:
        """Show ``text``, in Markdown."""

    def log_finished(self, write: Callable[[Path], None]) -> None:
        """Note that the run has finished; ``write`` writes its network, as ``mtl card`` does, into a new folder."""

    def close(self) -> None:
        """Close files and connections: until then the logger stays open between training and test."""


def run_loggers(loggers: Iterable[object]) -> list[RunLogger]:
    """Return those of ``loggers`` that are a ``RunLogger``."""
    return [logger for logger in loggers if isinstance(logger, RunLogger)]
