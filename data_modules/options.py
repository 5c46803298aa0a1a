"""Check the arguments of data modules: a value that does not fit gives one sentence, before any file is touched.

Each function takes the name of an option and its value, as it comes from YAML or the command line: null, true, text,
numbers, lists and mappings. It returns the value, or raises InputError: what was given, and what is accepted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mtl.checks import InputError

MOST = 1_000_000_000  # of rows and other counts; far larger numbers overflow somewhere
SEEDS = 2**32  # number of seeds, as in Lightning
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u202a-\u202e\u2066-\u2069]")
LONGEST_TASK = 100  # characters
LONGEST_NAME = 255  # bytes in the name of a file
LONGEST_PATH = 4000  # bytes


def whole(name: str, value: object, low: int = 0, high: int = MOST) -> int:
    """Return a whole number in ``[low, high]``; true and 2.0 are none."""
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return value
    raise refused(name, value, f"a whole number from {low} to {high}")


def number(name: str, value: object, low: float = 0.0, high: float = 1.0) -> float:
    """Return a number in ``[low, high]`` as a float; NaN is none."""
    if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
        return float(value)
    raise refused(name, value, f"a number in [{low:g}, {high:g}]")


def flag(name: str, value: object) -> bool:
    """Return true or false."""
    if isinstance(value, bool):
        return value
    raise refused(name, value, "true or false")


def choice(name: str, value: object, choices: Sequence[str]) -> str:
    """Return one of ``choices``."""
    if isinstance(value, str) and value in choices:
        return value
    raise refused(name, value, f"one of {', '.join(choices)}")


def names(name: str, value: object, example: str) -> list[str]:
    """Return a list of distinct texts, which may be empty."""
    if isinstance(value, list | tuple) and all(isinstance(text, str) for text in value):
        listed = [str(text) for text in value]
        if len(set(listed)) == len(listed):
            return listed
        repeated = sorted({text for text in listed if listed.count(text) > 1})
        raise InputError(f"data.{name}: {', '.join(map(shown, repeated))} is named more than once")
    raise refused(name, value, f"a list of texts, as in {example}; put numbers, true, false and null in quotes")


def check_task_name(option: str, name: object) -> str:
    """Return the name of a task: text that may stand in the name of a metric, a file and an option."""
    fits = isinstance(name, str) and 0 < len(name) <= LONGEST_TASK and name == name.strip()
    if fits and not re.search(r"[/\\.]", str(name)) and not CONTROL.search(str(name)):
        return str(name)
    raise InputError(
        f"{option}: {shown(name)} cannot be the name of a task: names are texts of at most {LONGEST_TASK} characters "
        "without dots, slashes and control characters"
    )


def path(name: str, value: object, what: str) -> Path:
    """Return a path, ``~`` expanded. ``what`` it leads to completes the sentence "must be the path of ..."."""
    text = str(value) if isinstance(value, str | Path) else ""
    if text.strip() and not CONTROL.search(text):
        try:
            expanded = Path(text).expanduser()
            longest = max(len(os.fsencode(part)) for part in (*expanded.parts, "."))
            if longest <= LONGEST_NAME and len(os.fsencode(expanded)) <= LONGEST_PATH:
                return expanded
        except (RuntimeError, UnicodeError):  # ~name of an unknown user; characters that the system cannot encode
            pass
    raise refused(name, value, f"the path of {what}")


def address(name: str, value: object) -> str:
    """Return an http or https address without a slash at its end."""
    if isinstance(value, str) and is_address(value):
        return value.rstrip("/")
    raise refused(name, value, "an address that starts with http:// or https://")


def is_address(url: str) -> bool:
    """Return whether ``url`` is an http or https address with a host."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError for a port such as "abc" or 99999
    except ValueError:
        return False
    return (
        parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and not re.search(r"\s", url)
        and not CONTROL.search(url)
    )


def fits_memory(what: str, size: int) -> None:
    """Raise InputError if ``size`` bytes are more than the machine's memory; ``what`` names the options that set it."""
    memory = machine_memory()
    if memory is not None and size > memory:
        gigabytes, available = size / 1e9, memory / 1e9
        raise InputError(f"{what} need {gigabytes:.3g} GB of memory, this machine has {available:.3g} GB: lower them")


def machine_memory() -> int | None:
    """Return the machine's memory in bytes, None if the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def refused(name: str, value: object, accepted: str) -> InputError:
    """Return the error "data.NAME=VALUE: must be ACCEPTED"."""
    return InputError(f"data.{name}={shown(value)}: must be {accepted}")


def shown(value: Any, limit: int = 60) -> str:
    """Return ``value`` in YAML's words for a message: short, and without control characters."""
    if value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, str):
        plain = value and value == value.strip() and value.isprintable()
        text = value[: limit + 1] if plain else ascii(value[: limit + 1])
    elif isinstance(value, Mapping):
        text = "{" + ",".join(f"{shown(key, limit)}: {shown(item, limit)}" for key, item in value.items()) + "}"
    elif isinstance(value, list | tuple):
        text = "[" + ",".join(shown(item, limit) for item in value) + "]"
    elif isinstance(value, int) and value.bit_length() > 64:
        text = f"a number of about {int(value.bit_length() * 0.30103)} digits"  # Python refuses to print very long ones
    else:
        text = ascii(value)
    return text if len(text) <= limit else text[:limit] + "..."
