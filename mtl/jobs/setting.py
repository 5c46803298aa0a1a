"""Runs that have their options in common, and where they are. Imports nothing slow."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from mtl.checks import InputError
from mtl.files.run_files import flatten
from mtl.options import LargeCount, LargeCountOrZero, RunSeed, StrictModel, matching
from mtl.overrides import key_of, quote_path

FolderName = Annotated[str, matching(r"(?!\s)[^/]+(?<!\s)", "a name without slashes")]


class WorkerOptions(StrictModel):
    """The options of all commands that share runs among workers; ``conf/tune.yaml`` explains them."""

    seed: RunSeed
    retries: LargeCountOrZero
    max_failures: LargeCount | None


@dataclass(frozen=True)
class Setting:
    """The options of some runs as ``overrides`` of mtl train."""

    name: str  # for messages
    label: str  # the path of their folders, below a common one
    overrides: list[str]


def run_folder(folder: Path, label: str, number: int) -> Path:
    """Return the folder of run ``number`` of the setting ``label``; ``folder``: of all settings."""
    return folder / label / f"trial_{number:05d}"


def replace_references(overrides: Sequence[str], folders: Mapping[str, Path]) -> list[str]:
    """Return ``overrides`` with the folders of other runs in place of the texts, inside quotes, that stand for them."""
    for text, folder in folders.items():
        path = quote_path(folder.absolute()).strip("'")
        overrides = [override.replace(text, path) for override in overrides]
    return list(overrides)


def overrides_by_key(overrides: Sequence[str]) -> dict[str, str]:
    """Return the overrides that all runs of a setting have in common; folders may differ by machine."""
    return {key_of(override): override for override in overrides if not override.startswith(("paths.", "hydra."))}


def require_same(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise InputError unless earlier runs, or the study, had the same options as ``now``."""
    old, new = flatten(before), flatten(now)
    changed = [key for key in dict.fromkeys((*old, *new)) if old.get(key) != new.get(key)]
    if changed:
        changes = "; ".join(f"{key} was {old.get(key, 'not given')}, is {new.get(key, 'not given')}" for key in changed)
        raise InputError(
            f"{name} exists with other options: {changes}. Take the changes back, since runs with other options "
            "cannot be compared, choose another folder with paths.output_dir=FOLDER, or choose another name with "
            "name=NAME (mtl tune, mtl share)"
        )


def derived_seed(seed: int, *names: object) -> int:
    """Return a seed of 32 bits, a pure function of ``seed`` and ``names``."""
    digest = hashlib.sha256(" ".join(map(str, (seed, *names))).encode()).digest()
    return int.from_bytes(digest[:4], "big")
