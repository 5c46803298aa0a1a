"""A checkpoint as two files that any program can read: weights as safetensors, all else as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mtl.checks import InputError, first_line, require, require_packages
from mtl.files.run_files import CONTENT, WEIGHTS, checked_file
from mtl.files.writing import write_text, writing

TENSOR, PAIRS, TUPLE = "\0tensor", "\0pairs", "\0tuple"  # keys that no entry of a checkpoint has


def write_plain(content: Mapping[str, Any], folder: Path) -> None:
    """Write ``content``, of tensors and plain data, into ``folder``. Raises InputError if it cannot be written."""
    require_packages("this folder", "hub", "safetensors")
    from safetensors.torch import save

    tensors = dict[str, Tensor]()
    text = json.dumps(_described(dict(content), "", tensors), indent=1)
    with writing(folder / WEIGHTS) as file:
        file.write(save({name: value.detach().cpu().contiguous() for name, value in tensors.items()}))
    write_text(folder / CONTENT, f"{text}\n")


def read_plain(folder: Path) -> dict[str, Any]:
    """Return the content that ``write_plain`` wrote into ``folder``. Raises InputError for a damaged file or a link."""
    require_packages(f"{folder / WEIGHTS}", "hub", "safetensors")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    content, weights = (checked_file(folder / name, folder, math.inf) for name in (CONTENT, WEIGHTS))
    try:
        restored = _restored(json.loads(content.read_text()), load_file(weights))
    except (OSError, ValueError, LookupError, TypeError, RecursionError, SafetensorError) as error:
        raise InputError(f"{folder} is damaged ({first_line(error)}); take it from where it came once more") from None
    require(isinstance(restored, dict), f"{folder / CONTENT} is damaged: it is no object")
    return dict(restored)


def _described(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return ``value`` as JSON can hold it, with the names of its tensors, which go to ``tensors``."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {TENSOR: name}
    if isinstance(value, Mapping):
        parts = {key: _described(child, f"{name}.{key}".lstrip("."), tensors) for key, child in value.items()}
        return parts if all(isinstance(key, str) for key in parts) else {PAIRS: [[*pair] for pair in parts.items()]}
    if isinstance(value, list | tuple):
        items = [_described(child, f"{name}.{number}", tensors) for number, child in enumerate(value)]
        return {TUPLE: items} if isinstance(value, tuple) else items
    return value


def _restored(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_restored(child, tensors) for child in value]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        return tensors[value[TENSOR]]
    if TUPLE in value:
        return tuple(_restored(value[TUPLE], tensors))
    pairs = value[PAIRS] if PAIRS in value else value.items()
    return {key: _restored(child, tensors) for key, child in pairs}
