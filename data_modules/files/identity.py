"""Tell whether values and files are the same: as earlier in this program, on this machine, or in the training."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mtl.checks import InputError
from mtl.files.cloud import CloudPath

from .reading import cloud_rows, files_of, regular_size

MAX_WHOLE_BYTES = 1 << 30  # bytes of files whose fingerprint covers all of them
NUM_SAMPLES = 16  # of a larger file, and one at its end: a Parquet file ends with the range of each column
SAMPLE_BYTES = 1 << 18


def digest(value: Any) -> str:
    """Return the SHA-256 of texts, numbers, and lists and dicts of them, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def stamp(*files: Path) -> list[int]:
    """Return size and modification time of each file, by which a changed file is recognized. Raises InputError."""
    try:
        stats = [file.stat() for file in files]
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}; prepare_data() fetches it") from error
    return [number for stat in stats for number in (stat.st_size, stat.st_mtime_ns)]


def fingerprint(path: Path) -> dict[str, Any]:
    """Return the name of a file, a folder or a pattern, the bytes and the number of its files, and a SHA-256 digest.

    The digest covers the contents of the files (evenly spaced samples and the end of each if together they have more
    than ``MAX_WHOLE_BYTES``), and the names of several files, but not of one. Of files in the cloud, it covers their
    names and numbers of rows, and the size is that number. Raises InputError if one cannot be read.
    """
    if isinstance(path, CloudPath):
        rows = cloud_rows(path)
        return {"name": path.name, "size": sum(rows.values()), "sha256": digest(rows), "files": len(rows)}
    files, content = files_of(path), hashlib.sha256()
    sizes = [regular_size(file) for file in files]
    for file, size in zip(files, sizes, strict=True):
        content.update(file.name.encode() + b"\0" if len(files) > 1 else b"")  # one file may be renamed
        step = size // NUM_SAMPLES if sum(sizes) > MAX_WHOLE_BYTES else 0
        try:
            with open(file, "rb") as opened:
                for start in (*range(0, size, max(SAMPLE_BYTES, step)), max(0, size - SAMPLE_BYTES)):
                    opened.seek(start)
                    content.update(opened.read(SAMPLE_BYTES))
        except OSError as error:
            raise InputError(f"cannot read {file}: {error.strerror or error}") from None
    return {"name": path.name, "size": sum(sizes), "sha256": content.hexdigest(), "files": len(files)}
