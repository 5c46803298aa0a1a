"""Write text that others chose, such as names of columns and folders, so that it is taken for text wherever it goes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u202a-\u202e\u2066-\u2069]")

RESERVED = r"(?:\?{3}|_(?:target|partial|recursive|convert|args)_)"  # texts with a meaning to OmegaConf and Hydra


def escape_control(text: str) -> str:
    """Return ``text`` in one line for a console or page, with control characters as Python writes them: ``\\x1b``."""
    return CONTROL.sub(lambda match: " " if match[0] in "\t\n\r" else ascii(match[0])[1:-1], text)


def markdown(text: str) -> str:
    """Return ``text`` in one line of Markdown, where nothing in it is markup: no tags, links, pictures or emphasis."""
    text = re.sub(r"&(?=#?\w+;)", "&amp;", escape_control(text))
    text = re.sub(r"<(?=[a-zA-Z/!?])", "&lt;", text).replace("](", "]\\(")
    return re.sub(r"[*`]|\\(?=[^\w\s(])|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", text)


def plain(text: str) -> str:
    """Return the text that ``markdown`` was given, in one line."""
    return re.sub(r"\\([^\w\s]|_)", r"\1", text.replace("&lt;", "<").replace("&amp;", "&"))


def escape_mathtext(text: str) -> str:
    """Return ``text`` for a figure of matplotlib, which takes what stands between two dollar signs for a formula."""
    return escape_control(text).replace("$", r"\$")


def escape_interpolation(value: Any) -> Any:
    """Return ``value`` with ``$\\{`` for ``${`` in all its texts, and ``\\???`` and ``\\_target_`` for such texts.

    OmegaConf and Hydra then find no interpolations, missing values and classes in them. OmegaConf's own escape, in
    which a backslash precedes the dollar, would not last: each time a configuration is resolved, one level is lost.
    """
    if isinstance(value, Mapping):
        return {escape_interpolation(key): escape_interpolation(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [escape_interpolation(child) for child in value]
    return re.sub(rf"(?<=\$)(?=\\*{{)|^(?=\\*{RESERVED}\Z)", r"\\", value) if isinstance(value, str) else value


def unescape_interpolation(text: str) -> str:
    """Return the text that ``escape_interpolation`` was given."""
    return re.sub(rf"(?<=\$)\\(?=\\*{{)|^\\(?=\\*{RESERVED}\Z)", "", text)
