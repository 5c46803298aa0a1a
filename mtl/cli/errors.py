"""Explain in one sentence errors that are not mistakes in the code. Imports nothing slow."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from omegaconf.errors import OmegaConfBaseException

from mtl.checks import InputError, causes, first_line
from mtl.runs.signals import Stopped

_MEMORY = ("not enough memory", "out of memory", "Cannot allocate memory", "bad_alloc")
MAX_PATH_CHARS = 500  # characters of a file name that a message repeats
_FULL = "Set HYDRA_FULL_ERROR=1 to see where"


@contextmanager
def one_line_errors(explain_known: Callable[[BaseException], str | None] = lambda error: None) -> Iterator[None]:
    """Exit with one message for an error inside this context; with HYDRA_FULL_ERROR=1, raise it.

    ``explain_known`` returns the sentence for the errors that it knows.
    """
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        end(error, explain_known(error))


def end(error: BaseException, sentence: str | None = None) -> NoReturn:
    """Exit with the message ``sentence``, by default that of ``explain``; with HYDRA_FULL_ERROR=1 raise ``error``."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
    message, status = (f"error: {sentence}", 1) if sentence else explain(error)
    if status == 1:
        sys.exit(message)
    sys.stderr.write(message + "\n")
    sys.exit(status)


def explain(error: BaseException) -> tuple[str, int]:
    """Return the message for ``error`` and the exit status."""
    chain = list(causes(error))
    for cause in chain:
        if isinstance(cause, Stopped):
            return str(cause), 128 + cause.number
        if isinstance(cause, InputError):
            return f"error: {cause}", 1
    if any(isinstance(cause, KeyboardInterrupt) for cause in chain):
        return "stopped by Ctrl-C; what was saved before can be resumed with ckpt=RUN", 130
    for cause in chain:
        text = _sentence(cause)
        if text:
            return f"error: {text}", 1
    bug = f"This is a bug in mtl; please report it. {_FULL}"
    return f"error: {type(error).__name__}: {first_line(error)} ({_line_of(error)}). {bug}", 1


def _sentence(error: BaseException) -> str | None:
    memory = isinstance(error, RuntimeError) and any(text in str(error) for text in _MEMORY)
    if memory or isinstance(error, MemoryError):
        return (
            f"out of memory ({first_line(error)}); use a smaller data.batch_size, fewer experts "
            "(recipe.num_experts) or smaller ones (recipe.expert_units)"
        )
    if isinstance(error, OSError):
        name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
        name = name if len(name) <= MAX_PATH_CHARS else f"{name[:80]}... ({len(name):,} letters)"
        free = " Free some space and resume the run." if error.errno == errno.ENOSPC else ""
        return f"{name}: {error.strerror or error}.{free}".removeprefix(": ")
    if isinstance(error, RuntimeError) and "Error(s) in loading state_dict" in str(error):
        lines = [line.strip() for line in str(error).splitlines()[1:]]
        return f"the checkpoint does not fit this network and these data: {' '.join(lines[:2])}"
    if isinstance(error, RecursionError):
        return f"the configuration is nested too deeply ({first_line(error)})"
    if isinstance(error, OmegaConfBaseException) or type(error).__name__ == "MisconfigurationException":  # Lightning's
        return first_line(error)
    return None


def _line_of(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "no traceback"
