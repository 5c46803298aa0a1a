"""Read YAML with plain values."""

from __future__ import annotations

from typing import Any

import yaml

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # plain Python takes ten times as long


def parse_yaml(text: str) -> Any:
    """Return the values of ``text``: dicts, lists, texts, numbers, booleans and None. Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)
