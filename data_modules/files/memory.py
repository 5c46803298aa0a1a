"""Refuse data that cannot fit into the machine's memory, before they are made."""

from __future__ import annotations

import os

from mtl.checks import InputError


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
