"""Read the command line of mtl train, tune, share and reproduce. Imports nothing slow."""

from __future__ import annotations

import os
import re
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import NoReturn

from mtl.checks import InputError, format_value, require
from mtl.runs.commands import Line, in_quotes, without

CLOUD = re.compile(r"([\w.]+)=((?:s3|gs|hf)://[^'\"]+)")  # Hydra reads = in a value, as in day=*/*.csv, in quotes alone


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def read_line(arguments: Sequence[str], name: str = "train") -> Line:
    """Return the command line ``mtl NAME ARGUMENTS``. Raises InputError for an unknown flag or folder."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--config-dir", metavar="FOLDER", action="append", default=[])
    parser.add_argument("--trust", metavar="PACKAGE", action="append", default=[])
    if name == "train":
        parser.add_argument("-m", "--multirun", action="store_true")
        parser.add_argument("--cfg", choices=("job", "hydra", "all"))
        parser.add_argument("--resolve", action="store_true")
        parser.add_argument("--package")
    found, words = parser.parse_known_args(arguments)
    unknown = [word for word in words if word.startswith("-")]
    if unknown:
        raise InputError(f"{format_value(unknown[0])}: no such flag; mtl {name} --help lists all")
    for folder in found.config_dir:
        require("://" in folder or os.path.isdir(folder), f"--config-dir {format_value(folder)}: no such folder")
    searched = [path if "://" in path else f"file://{os.path.abspath(path)}" for path in found.config_dir]
    words, paths = without(words, "hydra.searchpath")
    if found.trust:
        words, trust = without(words, "trust")
        words.append(f"trust=[{','.join([*trust, *found.trust])}]")
    words = [CLOUD.sub(lambda found: f"{found[1]}={in_quotes(found[2])}", word) for word in words]
    flags = {key: value for key, value in vars(found).items() if key not in ("trust", "config_dir")}
    return Line(given=arguments, words=words, searched=[*searched, *paths], **flags)
