"""Load the tokenizer of a checkpoint: from a folder, the local cache of Hugging Face, or its hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtl.checks import InputError, first_line, require

from ..files.reading import quote
from .encoder import Encoder

FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")  # a tokenizer's folder has at least one of these
OTHERWISE = "Give the folder of a tokenizer, or null for a vocabulary trained on your texts"


def load(name: str) -> Encoder:
    """Return the tokenizer ``name``: a folder, or a name on the hub. Raises InputError."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        there = any((folder / file).is_file() for file in FILES)
        require(there, f"data.tokenizer={name}: the folder has none of {', '.join(FILES)}. {OTHERWISE}")
        found = _read(folder)
    else:
        found = _read(name)
        found = _read(name, local=False) if isinstance(found, Exception) else found
    if isinstance(found, Exception):
        raise InputError(
            f"data.tokenizer={name} cannot be read: {quote(first_line(found), 150)}. {OTHERWISE}"
        ) from found
    good = bool(found.is_fast and found.pad_token and found.cls_token)
    require(good, f"data.tokenizer={name}: it must be a fast tokenizer with tokens for padding and [CLS]. {OTHERWISE}")
    return Encoder.of(found.backend_tokenizer, found.pad_token, found.cls_token, name)


def _read(name: str | Path, local: bool = True) -> Any:
    """Return the tokenizer, or the error that prevents loading it."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(name), local_files_only=local)
    except Exception as error:  # a missing or damaged file can raise almost any exception
        return error
