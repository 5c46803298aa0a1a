"""The names of the files in a run folder, and functions that read them. Imports nothing slow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LOCK = ".lock"
COMMAND = "command.json"  # the overrides, choices and seed of a new run, written first of all
CONFIG = "config.yaml"  # written before a run trains
LOG = "train.log"
CHECKPOINTS = "checkpoints"  # the folder of best.ckpt and last.ckpt
RESULTS = "results.json"  # written last


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; {} if it is missing or damaged."""
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
