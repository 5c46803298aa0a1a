"""Read the command line of mtl train, tune, share and reproduce. Imports nothing slow."""

from __future__ import annotations

import os
import re
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import NoReturn

from mtl.checks import InputError, format_value, require
from mtl.overrides import key_of, quote_path, quote_text, remove_list
from mtl.runs.commands import CommandLine

CLOUD = re.compile(r"([\w.]+)=((?:s3|gs|hf)://[^'\"]+)")  # Hydra reads = in a value, as in day=*/*.csv, in quotes alone


VALUED = ("--config-dir", "--trust", "--cfg", "--package")  # flags whose value is the next argument


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def read_line(arguments: Sequence[str], name: str = "train") -> CommandLine:
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
    parsed, overrides = parser.parse_known_args(arguments)
    unknown = [override for override in overrides if override.startswith("-")]
    if unknown:
        option = unknown[0].removeprefix("--").partition("=")[0]
        hint = f"; if it is an option, write {option}=VALUE" if option.isidentifier() else ""
        raise InputError(f"{format_value(unknown[0])}: no such flag{hint}; mtl {name} --help lists all")
    for folder in parsed.config_dir:
        require("://" in folder or os.path.isdir(folder), f"--config-dir {format_value(folder)}: no such folder")
    searched = [path if "://" in path else f"file://{os.path.abspath(path)}" for path in parsed.config_dir]
    overrides, paths = remove_list(overrides, "hydra.searchpath")
    if parsed.trust:
        overrides, trust = remove_list(overrides, "trust")
        overrides.append(f"trust=[{','.join([*trust, *parsed.trust])}]")
    overrides = [CLOUD.sub(lambda match: f"{match[1]}={quote_text(match[2])}", override) for override in overrides]
    flags = {key: value for key, value in vars(parsed).items() if key not in ("trust", "config_dir")}
    return CommandLine(arguments=arguments, overrides=overrides, searched=[*searched, *paths], **flags)


def name_files(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of ``mtl evaluate RUN [FILE]`` with RUN and FILE as options, as in ``evaluate=RUN``."""
    keys = {key_of(argument) for argument in arguments}
    options = [option for option in ("evaluate", "data.test_path") if option not in keys]
    named = list[str]()
    for before, argument in zip(["", *arguments], arguments, strict=False):
        is_file = before not in VALUED and _is_path(argument)
        named.append(f"{options.pop(0)}={quote_path(argument)}" if is_file and options else argument)
    return named


def _is_path(argument: str) -> bool:
    """Return whether an argument is a path, even with a = as in ``s3://sets/day=1/x.csv``, and no flag or option."""
    if argument.startswith(("-", "+", "~", "hydra/")):
        return False
    return "=" not in argument or "/" in key_of(argument) or os.path.exists(argument)
