"""Write files atomically: a file is complete or absent, and a failed write gives one message."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from mtl.checks import InputError, causes


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as JSON."""
    write_text(path, json.dumps(content, indent=2))


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write ``rows`` below ``header`` as CSV."""
    content = io.StringIO()
    csv.writer(content).writerows([header, *rows])
    write_text(path, content.getvalue())


def write_text(path: Path, text: str) -> None:
    """Write ``text`` in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` as it is."""
    with writing(path) as file:
        file.write(content)


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """Provide a new file beside ``path``, which gets that name when the context ends without an error.

    A reader of ``path`` never sees a partial file, not even after a kill or a power cut. Missing folders are created.
    Raises InputError if the file cannot be written. Pass the file object, not its name, to libraries in C++ and Rust:
    some of them end the process, or lose the reason, if a write fails.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with reported(path):
            with suppress(FileExistsError):  # it is a file: to open the new one then says so
                path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # otherwise a power cut after the rename could leave an empty file
            temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def reported(path: Path) -> Iterator[None]:
    """Raise InputError if an error inside this context means that the system cannot write ``path``."""
    try:
        yield
    except Exception as error:
        number = refusal(error, path.parent)
        if number is None:
            raise
        reason = os.strerror(number)
        kept = f"; the previous {path} is intact" if os.path.isfile(path) else ""
        raise InputError(f"{path} cannot be written: {reason[0].lower()}{reason[1:]}{kept}") from None


def refusal(error: Exception, folder: Path) -> int | None:
    """Return the system's error number behind ``error``, raised while writing a file in ``folder``, or None."""
    chain = list(causes(error))
    if any(isinstance(cause, InputError) for cause in chain):
        return None
    for cause in chain:
        if isinstance(cause, OSError) and cause.errno:
            return cause.errno
        if found := re.search(r"\(os error (\d+)\)", str(cause)):  # of libraries in Rust
            return int(found[1])
    try:  # some errors do not say it: see whether the disk takes more
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))
    except OSError as full:
        return full.errno
    return None
