"""Read the command line of mtl train, tune, share and reproduce. Imports nothing slow."""

from __future__ import annotations

import os
import re
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import NoReturn

from mtl.checks import InputError, format_value, require
from mtl.runs.commands import Line, in_quotes, key_of, quoted, without

CLOUD = re.compile(r"([\w.]+)=((?:s3|gs|hf)://[^'\"]+)")  # Hydra reads = in a value, as in day=*/*.csv, in quotes alone


VALUED = ("--config-dir", "--trust", "--cfg", "--package")  # flags whose value is the next word


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


def name_files(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of ``mtl evaluate RUN [FILE]`` with RUN and FILE as words, as in ``evaluate=RUN``."""
    keys = {key_of(word) for word in arguments}
    options = [option for option in ("evaluate", "data.test_path") if option not in keys]
    words = list[str]()
    for before, word in zip(["", *arguments], arguments, strict=False):
        is_file = before not in VALUED and _is_path(word)
        words.append(f"{options.pop(0)}={quoted(word)}" if is_file and options else word)
    return words


def _is_path(word: str) -> bool:
    """Return whether a word is a path, which may contain =, as in ``s3://sets/day=1/x.csv``, and no flag or option."""
    if word.startswith(("-", "+", "~", "hydra/")):
        return False
    return "=" not in word or "/" in key_of(word) or os.path.exists(word)
