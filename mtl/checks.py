"""Bad input: the error that reports it, and checks of options that raise it.

``where`` names the option in messages, as in ``callbacks.last.every_steps``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

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


def require(condition: bool, message: str) -> None:
    """Raise ``InputError(message)`` unless ``condition`` holds."""
    if not condition:
        raise InputError(message)


def check_whole(where: str, value: Any, at_least: int, or_null: bool = False) -> None:
    """Raise InputError unless ``value`` is a whole number of at least ``at_least``, or None if ``or_null``."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    accepted = f"a whole number of at least {at_least}{' or null' if or_null else ''}"
    require((whole and value >= at_least) or (or_null and value is None), f"{where}={value!r}: must be {accepted}")
    require(not whole or value <= LARGEST_WHOLE, f"{where}: must be {accepted}, and at most {LARGEST_WHOLE:.0e}")


def check_number(
    where: str,
    value: Any,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    or_null: bool = False,
) -> None:
    """Raise InputError unless ``value`` is a finite number within the given limits, or None if ``or_null``."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    limits = [] if above is None else [f"greater than {above:g}"]
    limits += [] if at_least is None else [f"at least {at_least:g}"]
    limits += [] if at_most is None else [f"at most {at_most:g}"]
    good = good and (above is None or value > above) and (at_least is None or value >= at_least)
    good = good and (at_most is None or value <= at_most)
    accepted = " ".join(["a finite number", " and ".join(limits)]).strip() + (" or null" if or_null else "")
    require(good or (or_null and value is None), f"{where}={value!r}: must be {accepted}")


def check_choice(where: str, value: Any, choices: Sequence[str]) -> None:
    """Raise InputError unless ``value`` is one of ``choices``."""
    require(isinstance(value, str) and value in choices, f"{where}={value!r}: must be one of {', '.join(choices)}")


def check_switch(where: str, value: Any) -> None:
    """Raise InputError unless ``value`` is true or false."""
    require(isinstance(value, bool), f"{where}={value!r}: must be true or false")


def check_name(where: str, value: Any) -> None:
    """Raise InputError unless ``value`` is a text that is not empty."""
    require(isinstance(value, str) and value.strip() != "", f"{where}={value!r}: must be a name")
