"""Find the files of a table, given as one file, a folder or a pattern."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from mtl.checks import require

from .reading import regular_size

SUFFIXES = (".csv", ".csv.gz", ".tsv", ".parquet")  # of tables
PATTERN = "*?["  # a path that does not exist and contains one of these is a pattern


def files_of(path: Path, option: str = "") -> list[Path]:
    """Return the regular files that ``path`` stands for, sorted by name.

    ``path`` is a file; a folder, which stands for its files with one of the ``SUFFIXES``, except hidden ones; or a
    pattern such as ``visits/*.parquet``. ``option`` is the option that names the files in messages. Raises InputError
    if there is no file, or if formats differ.
    """
    here = f"{option}={path}" if option else str(path)
    if os.path.isdir(path):
        found = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
        found = [file for file in found if not file.name.startswith(".")]
        require(bool(found), f"{here} is a folder without tables ({', '.join(SUFFIXES)}): give a file, or their folder")
    elif is_pattern(path):
        found = sorted(Path(file) for file in glob.glob(str(path), recursive=True))
        require(bool(found), f"{here}: no file matches this pattern")
    else:
        found = [path]
    for file in found:
        regular_size(file, option)
    formats = sorted({suffix for file in found for suffix in SUFFIXES if file.name.endswith(suffix)})
    require(
        len(formats) < 2, f"{here}: {' and '.join(formats)} files: give a pattern that matches one format, as in *.csv"
    )
    return found


def is_several(path: Path) -> bool:
    """Return whether ``path`` is a folder or a pattern, not a file."""
    return os.path.isdir(path) or is_pattern(path)


def is_pattern(path: Path) -> bool:
    return any(sign in str(path) for sign in PATTERN) and not os.path.exists(path)
