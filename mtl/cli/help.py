"""The help of commands whose options are lines of YAML files: each option with the comment of its line."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

LINE = re.compile(r"(?P<indent> *)(?P<name>\w+):(?: +(?P<value>[^# ].*?))?(?: +# (?P<comment>.*))?")
NOT_OURS = ("hydra", "paper", "pruner", "sampler", "study")  # folders of conf/ that are not config groups of a run
COLUMN = 32  # where comments begin
FLAGS = (
    "  --config-dir FOLDER           your own YAML files, whose classes are trusted",
    "  --trust PACKAGE               your package, whose classes checkpoints may name",
    "  --version                     the version of mtl",
)
FLAGS_OF_TRAIN = (
    "  -m, --multirun                a run for each combination of values",
    "  --cfg job                     print the configuration and stop",
)
EVALUATE_USAGE = """
Test the network of a run again, on its test rows or on those of a file with
the columns of the training, and save the results in a folder of their own.

  mtl evaluate outputs/DATE/RUN
  mtl evaluate outputs/DATE/RUN new.csv threshold=f1 interval=0.9

All other options are as in the run; mtl train --help lists them.
"""
OF_EVALUATE = ("threshold", "interval", "predictions")  # options that say what is measured and written
MAX_VALUE_CHARS = 60  # characters of a value that are shown


def print_help(usage: str, file: Path, overrides: Sequence[str] = ()) -> None:
    """Print ``usage`` and the options of ``file`` and of each choice among ``overrides``; for a run all choices."""
    conf, lines = file.parent, []
    for paragraph in usage.strip().replace("``", "").split("\n\n"):
        lines += [paragraph if "\n  " in f"\n{paragraph}" else textwrap.fill(paragraph, width()), ""]
    if file.name == "train.yaml":
        lines += ["Choices, as in gate=topk; --config-dir FOLDER adds those of your own:", ""]
        for group, names in groups(conf):
            line = f"{group}: {', '.join(names)}"
            lines += textwrap.wrap(line, width(), initial_indent="  ", subsequent_indent="      ")
    choices = [override.replace("=", "/") for override in overrides if re.fullmatch(r"[\w/]+=\w+", override)]
    chosen = [conf / f"{choice}.yaml" for choice in choices]
    for path in [file, *(path for path in chosen if path.is_file())]:
        lines += [f"Options of {path.relative_to(conf)}, as in NAME=VALUE:", ""]
        first = path.read_text().partition("\n")[0]
        package = ".".join(path.parent.relative_to(conf).parts)
        package = first.removeprefix("# @package ") if first.startswith("# @package ") else package
        prefix = f"{package}." if package not in ("", "_global_") else ""
        for name, value, comment in options(path):
            text = value if len(value) <= MAX_VALUE_CHARS else "..."
            lines += described(f"{prefix}{name}={text}", comment)
        lines.append("")
    lines += ["Flags:", "", *(FLAGS_OF_TRAIN if file.name == "train.yaml" else ()), *FLAGS]
    print("\n".join(lines))


def print_help_of_evaluate(file: Path) -> None:
    """Print how to test a run, and the options of ``file`` that are of use there."""
    print(EVALUATE_USAGE.strip(), "\n\nOptions, as in NAME=VALUE:\n", sep="")
    for name, value, comment in options(file):
        if name in OF_EVALUATE:
            print(*described(f"{name}={value}", comment), sep="\n")
    print("", "Flags:", "", *FLAGS, sep="\n")


def groups(conf: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the config groups of a run with the choices that each has."""
    for folder in sorted(path for path in conf.rglob("*") if path.is_dir()):
        name, files = str(folder.relative_to(conf)), sorted(folder.glob("*.yaml"))
        if files and not name.startswith(NOT_OURS):
            yield name, [path.stem for path in files]


def options(file: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, comment) of the options in a YAML file, nested ones as ``section.name``."""
    parents: list[tuple[int, str]] = []
    for line in file.read_text().splitlines():
        match = LINE.fullmatch(line)
        if match is None:
            continue
        indent, name, value = len(match["indent"]), match["name"], match["value"] or ""
        parents = [(depth, parent) for depth, parent in parents if depth < indent]
        path = [*(parent for _, parent in parents), name]
        if not value:
            parents.append((indent, name))
        elif path[0] not in ("defaults", "hydra") and not name.startswith("_"):
            yield ".".join(path), value, match["comment"] or ""


def width() -> int:
    """Return the columns of the terminal, at most 100."""
    return min(shutil.get_terminal_size().columns, 100)


def described(option: str, comment: str) -> list[str]:
    """Return the lines of an option and its comment, side by side if the option is short."""
    indent = " " * COLUMN
    short = len(option) < COLUMN - 3
    first = f"  {option}".ljust(COLUMN) if short else indent
    lines = textwrap.wrap(comment, width(), initial_indent=first, subsequent_indent=indent) or [first.rstrip()]
    return lines if short else [*textwrap.wrap(option, width(), initial_indent="  ", subsequent_indent="    "), *lines]
