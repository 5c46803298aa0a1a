"""Overrides of the configuration, such as ``gate.k=4``: read and written as Hydra's grammar has them.

Imports nothing slow, so that a mistyped option is answered at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from mtl.checks import require
from mtl.files.escaping import escape_interpolation

# Options of one command line, such as where it writes and whom it trusts: no run takes them from another
LOCAL = ("ckpt", "evaluate", "trust", "on_data_change", "paths", "hydra")


def key_of(override: str) -> str:
    """Return the name of the option or config group that an override such as ``+gate.k=4`` sets."""
    return override.lstrip("+~").partition("=")[0]


def value_of(override: str) -> Any:
    """Return the value that an override sets, such as the number 4 of ``gate.k=4``. Raises HydraException."""
    return OverridesParser.create().parse_override(override).value()


def last_of_each(overrides: Sequence[str]) -> list[str]:
    """Return the last override of each option."""
    return list({key_of(override): override for override in overrides}.values())


def remove_list(overrides: Sequence[str], option: str) -> tuple[list[str], list[str]]:
    """Return the ``overrides`` that do not set ``option``, and the list that the last of the others sets it to."""
    removed = [override for override in overrides if key_of(override) == option]
    value: Any = value_of(removed[-1]) if removed else None
    require(isinstance(value, list | None), f"{' '.join(removed)}: must be a list, as in {option}=[...]")
    return [override for override in overrides if override not in removed], value or []


def write_override(option: str, value: Any, is_group: bool = False) -> str | None:
    """Return ``option=value`` so that Hydra reads exactly this value; None if its grammar cannot write it.

    ``is_group``: the option is a config group, whose choices are names.
    """
    value = to_plain(value)
    text = f"{option}={value if is_group and isinstance(value, str) else write_value(value)}"
    try:
        read = OverridesParser.create().parse_override(text)
        same = read.key_or_group == option.lstrip("+~") and (is_group or to_plain(read.value()) == value)
    except (HydraException, ValueError):
        return None
    return text if same and (is_group or "${" not in text) else None


def write_value(value: Any, write_text: Callable[[str], str] | None = None) -> str:
    """Return ``value`` as Hydra's grammar writes it; strings are written by ``write_text``, by default in quotes.

    Numbers get the shortest text that reads as the same number.
    """
    write_text = write_text or quote_text
    if isinstance(value, list):
        return f"[{','.join(write_value(child, write_text) for child in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{write_value(child, write_text)}' for name, child in value.items())}}}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return write_text(value) if isinstance(value, str) else repr(value)


def quote_path(path: str | Path) -> str:
    """Quote a path so that Hydra reads it unchanged, and no part of it is an interpolation."""
    text: str = escape_interpolation(str(path))
    return text if re.fullmatch(r"[\w./-]+", text) else quote_text(text)


def quote_text(text: str) -> str:
    """Return ``text`` in quotes, inside which Hydra reads every character as it is."""
    return "'" + re.sub(r"(\\*)('|$)", lambda end: end[1] * 2 + end[2].replace("'", "\\'"), text) + "'"


def to_plain(value: Any) -> Any:
    """Return ``value`` as a configuration holds it: lists for tuples, text for paths, Python's numbers for numpy's."""
    if isinstance(value, Mapping):
        return {key: to_plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(child) for child in value]
    if isinstance(value, Path):
        return str(value)
    return value.tolist() if hasattr(value, "tolist") else value  # numpy's, also of a single number
