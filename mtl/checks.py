"""Bad input: the error that reports it, and the words of its messages. Imports nothing slow."""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

LARGEST_WHOLE = 10**15  # of an option: sizes and counts beyond it overflow somewhere
MAX_VALUE_CHARS = 60  # characters of a value that a message repeats
WORD = 1000  # characters of a word, such as a path, in a message
MAX_PROBLEMS = 4  # problems that one message names
MAX_NAMES = 20  # names in a message
MAX_TEXTS = 3  # tasks, slices or commands of a sentence


class InputError(ValueError):
    """Report invalid input from the user.

    The message says what was given, where, what is accepted and what to do; the program prints it alone,
    without a traceback, and exits with 1. Words of more than ``WORD`` characters lose their middle.
    """

    def __init__(self, message: str) -> None:
        super().__init__(
            re.sub(
                rf"\S{{{WORD + 1},}}",
                lambda word: f"{word[0][:MAX_VALUE_CHARS]}...{word[0][-MAX_VALUE_CHARS:]}",
                message,
            )
        )


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


def join_some(texts: Iterable[str]) -> str:
    """Return the first ``MAX_TEXTS`` different texts, and the number of the others."""
    different = [text for text in dict.fromkeys(texts) if text]
    more = [f"{len(different) - MAX_TEXTS} more"] if len(different) > MAX_TEXTS else []
    return "; ".join([*different[:MAX_TEXTS], *more])


def require(condition: bool, message: str) -> None:
    """Raise ``InputError(message)`` unless ``condition`` holds."""
    if not condition:
        raise InputError(message)


def require_packages(what: str, extra: str, *packages: str) -> None:
    """Raise InputError unless the optional ``packages`` of ``extra``, which ``what`` needs, are installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    require(not missing, f"{what} needs the package {' and '.join(missing)}: pip install -e '.[{extra}]'")


def format_value(value: Any) -> str:
    """Return ``value`` as in JSON, cut to a readable length; unambiguous text without quotes."""
    value = str(value) if isinstance(value, Path) else value
    try:
        text = json.dumps(value, ensure_ascii=False, default=lambda other: f"a {type(other).__name__}")
    except (TypeError, ValueError, RecursionError):  # Python refuses to write thousands of digits
        text = "..."
    if isinstance(value, str) and value == value.strip() != "" and not _is_json(value):
        text = value
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def suggestion(name: Any, names: Iterable[str], before: str = "", cutoff: float = 0.6) -> str:
    """Return "; did you mean NAME?" with the most similar of ``names``, "" if none is more similar than ``cutoff``."""
    if not isinstance(name, str):
        return ""
    lower = {other.lower(): other for other in names}
    near = difflib.get_close_matches(name.lower(), lower, 1, cutoff)
    return f"; did you mean {before}{lower[near[0]]}?" if near else ""


def join_names(names: Iterable[str]) -> str:
    """Return names for a message, the first ones if there are many."""
    names = list(names)
    more = f", ... ({len(names)} in all)" if len(names) > MAX_NAMES else ""
    return ", ".join(map(format_value, names[:MAX_NAMES])) + more


def in_one_line(problems: Sequence[str]) -> str:
    """Return the first ``MAX_PROBLEMS`` of ``problems`` in one line, and the number of the others."""
    more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
    return "; ".join([*problems[:MAX_PROBLEMS], *more])
