"""Write text of data, such as names of columns, so that OmegaConf takes it for text: never ``${...}`` or ``???``.

OmegaConf's own escape ``\\${`` does not last: each time a configuration is resolved, one level of it is lost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def escaped(value: Any) -> Any:
    """Return ``value`` with ``$\\{`` for ``${`` and ``\\???`` for ``???`` in all its texts, keys included."""
    if isinstance(value, Mapping):
        return {escaped(key): escaped(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(child) for child in value]
    return re.sub(r"(?<=\$)(?=\\*\{)|^(?=\\*\?{3}\Z)", r"\\", value) if isinstance(value, str) else value


def unescaped(text: str) -> str:
    """Return the text that ``escaped`` was given."""
    return re.sub(r"(?<=\$)\\(?=\\*\{)|^\\(?=\\*\?{3}\Z)", "", text)
