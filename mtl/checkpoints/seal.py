"""End a checkpoint with a checksum, and check it."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path
from typing import Any

from mtl.checks import InputError

LABEL = b"mtl-sha256:"
SEAL = len(LABEL) + 64  # bytes: the label and the digits


def seal(file: Any) -> str:
    """Append the SHA-256 digest of a zip file, open for reading and writing, as its comment, and return the digest.

    The zip format's own checksums do not cover its directory. Other programs can still read the file.
    """
    file.flush()
    file.seek(-2, os.SEEK_END)
    if file.read(2) != b"\0\0":  # the length of its comment, the last field of a zip file
        raise RuntimeError("torch.save wrote a zip file that cannot take a checksum")
    file.seek(-2, os.SEEK_END)
    file.write(SEAL.to_bytes(2, "little") + LABEL)
    file.flush()
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    file.seek(0, os.SEEK_END)
    file.write(digest.encode())
    return digest


def check_seal(path: Path) -> str:
    """Return the file's digest; raise ValueError if it is wrong, and InputError if there is none.

    Raises an error also if the file is not a zip file or has compressed members. torch never compresses, so a
    compressed file could only be meant to fill the memory.
    """
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
        if not stored or sum(member.file_size for member in members) > path.stat().st_size:
            raise ValueError("its members are larger than the file: this is no checkpoint but a zip bomb")
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        for start in range(0, size - 64, 1 << 20):
            digest.update(file.read(min(1 << 20, size - 64 - start)))
        file.seek(max(0, size - SEAL))
        end = file.read()
    if not end.startswith(LABEL):
        raise InputError(f"checkpoint {path} was not written by this program: it has no checksum")
    if digest.hexdigest().encode() != end[-64:]:
        raise ValueError("its checksum is wrong")
    return digest.hexdigest()
