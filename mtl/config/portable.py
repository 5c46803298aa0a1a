"""Tell which overrides a run may take from a checkpoint. Imports nothing slow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from mtl.checkpoints.trust import BUILT, UNBUILT, is_installed
from mtl.overrides import LOCAL, key_of

NAME_KEYS = (  # keys of sections in UNBUILT whose texts name no files and no servers
    *("accelerator", "devices", "gradient_clip_algorithm", "max_time", "mode", "monitor"),
    *("precision", "shape", "target"),
)
TEXTS = ("run_name", "start_from")  # whose text is free; other overrides without a dot choose from a config group


def is_portable(override: str) -> bool:
    """Return whether a run may take ``override``, as in ``gate.k=4``, from a checkpoint.

    Choices of config groups by plain names are harmless. So are values that name no class, no location of data, and no
    file or server of callbacks, loggers and trainer. Other overrides are not stored; the commands that messages print
    repeat them.
    """
    try:
        parsed = OverridesParser.create().parse_override(override)
        key, value = parsed.key_or_group, parsed.value()
    except (HydraException, ValueError):
        return False
    section, _, option = key.partition(".")
    if option == "_target_" and section in BUILT:
        return is_installed(section, value)
    if section in LOCAL or is_data_location(key) or any(part.startswith("_") for part in key.split(".")):
        return False
    if option or key in TEXTS:
        return _is_value(value, option.rpartition(".")[2], section in UNBUILT)
    names = value if isinstance(value, list) else [value]
    return all(not isinstance(name, str) or re.fullmatch(r"[\w-]+(/[\w-]+)*", name) for name in names)


def is_data_location(key: str) -> bool:
    """Return whether an option says where data are."""
    return key == "data.data_dir" or (key.startswith("data.") and key.endswith("_url"))


def places_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``data`` that say where they are: its folder and addresses."""
    return {key: value for key, value in data.items() if is_data_location(f"data.{key}")}


def _is_value(value: Any, key: str, numbers_only: bool) -> bool:
    """Return whether ``value`` holds only plain values; with ``numbers_only``, text only under ``NAME_KEYS``."""
    if isinstance(value, list):
        return all(_is_value(item, key, numbers_only) for item in value)
    if isinstance(value, dict):
        return all(not str(k).startswith("_") and _is_value(v, str(k), numbers_only) for k, v in value.items())
    if isinstance(value, str):
        return "${" not in value and value != "???" and (not numbers_only or key in NAME_KEYS)
    return value is None or isinstance(value, bool | int | float)


def is_top(key: str) -> bool:
    """Return whether an override with this key chooses from a config group or sets an option outside the sections."""
    return "." not in key.partition("@")[0]


def choices_among(overrides: Sequence[str], command_overrides: Sequence[str]) -> list[str]:
    """Return those of a run's ``overrides`` that choose from groups, set top-level options, or delete.

    Those that ``command_overrides`` replace are left out.
    """
    keys = set(map(key_of, command_overrides))
    kept = [override for override in overrides if key_of(override) not in keys]
    return [override for override in kept if override.startswith("~") or is_top(key_of(override))]
