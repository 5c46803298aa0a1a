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
from stat import S_ISREG
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from mtl.checks import InputError, causes, require

SEPARATORS = {".csv": ",", ".tsv": "\t"}  # of tables that are written as text
SUFFIXES = (*SEPARATORS, ".parquet")


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
    Raises InputError if the file cannot be written, or if it would replace a link, a folder or a device. Pass the file
    object, not its name, to libraries in C++ and Rust: some of them end the process, or lose the reason, if a write
    fails.
    """
    check_place(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with reported(path):
            with suppress(FileExistsError):  # it is a file: to open the new one then says so
                path.parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            with temporary.open("x+b") as file:  # follows no link
                yield file
                file.flush()
                os.fsync(file.fileno())  # otherwise a power cut after the rename could leave an empty file
            temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink()


def check_place(path: Path) -> None:
    """Raise InputError unless ``path`` is free or a regular file, which a new file may replace."""
    if os.path.lexists(path) and not S_ISREG(path.lstat().st_mode):
        raise InputError(f"{path} cannot be written: it is a link, a folder or a device, not a regular file")


def check_out(out: Path, rows: Path, force: bool) -> None:
    """Raise InputError unless what is computed from the file ``rows`` can be written to ``out``."""
    require(out.suffix in SUFFIXES, f"-o {out}: accepted formats are {', '.join(SUFFIXES)}")
    require(out.parent.is_dir(), f"-o {out}: there is no folder {out.parent}")
    same = out.exists() and rows.exists() and out.samefile(rows)
    require(not same, f"-o {out}: this is the file of the rows; give another name")
    require(force or not out.exists(), f"-o {out}: this file exists; give another name, or --force to replace it")


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
        if match := re.search(r"\(os error (\d+)\)", str(cause)):  # of libraries in Rust
            return int(match[1])
    try:  # some errors do not say it: see whether the disk takes more
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))
    except OSError as full:
        return full.errno
    return None
