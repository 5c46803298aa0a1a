"""Bad input: the error that reports it."""

from __future__ import annotations

from collections.abc import Iterator

LARGEST_WHOLE = 10**15  # of an option: sizes and counts beyond it overflow somewhere


class InputError(ValueError):
    """Report invalid input from the user.

    The message says what was given, where, what is accepted and what to do; the program prints it alone,
    without a traceback, and exits with 1.
    """


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield ``error``, what caused it, what caused that, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def require(condition: bool, message: str) -> None:
    """Raise ``InputError(message)`` unless ``condition`` holds."""
    if not condition:
        raise InputError(message)
