"""The files of a run folder: their names, and how they are written and read. Imports nothing that takes long."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

LOCK = ".lock"
COMMAND = "command.json"  # the overrides, choices and seed of a new run, written first of all
CONFIG = "config.yaml"  # written before a run trains
LOG = "train.log"
RESULTS = "results.json"  # written last


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as JSON, as ``write_text`` does."""
    write_text(path, json.dumps(content, indent=2))


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to a temporary file and rename it, so that a reader never sees a partial file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a file, {} if there is none yet or if it is damaged."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts by their dotted names."""
    if not isinstance(node, dict):
        return {prefix: node}
    parts = [flatten(child, f"{prefix}.{name}" if prefix else str(name)) for name, child in node.items()]
    return {key: value for part in parts for key, value in part.items()}
