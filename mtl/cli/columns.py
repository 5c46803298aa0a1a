"""Show what the columns of a table are taken for: ``mtl columns FILE``. Slow imports are inside functions."""

from __future__ import annotations

import logging
import re
import shlex
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mtl.cli.errors import one_line_errors
from mtl.config.compose import CONF
from mtl.config.early import check_rows
from mtl.files.cloud import path_of
from mtl.runs.commands import program
from mtl.runs.console import ConsoleHandler

EXISTS = "{}: this file exists; add --force to replace it, or give another folder with -o"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of columns, and write the options of a run on it."""
    text = "Show what the columns of a table are taken for, and write them as options to edit"
    parser = ArgumentParser(prog=" ".join(program("columns")), description=text)
    table = "a CSV or Parquet file, or a folder or pattern of them"
    parser.add_argument("file", metavar="FILE", type=path_of, help=table)
    parser.add_argument("labels", metavar="LABEL", nargs="*", help="the columns to predict; if none is given, the last")
    folder = "where to write data/NAME.yaml; default my_conf"
    parser.add_argument("-o", "--out", metavar="FOLDER", type=Path, default=Path("my_conf"), help=folder)
    parser.add_argument("--force", action="store_true", help="replace the file to write if it exists")
    with one_line_errors():
        args = parser.parse_args(arguments)
        check_rows(args.file, "FILE")
        from mtl.checks import require
        from mtl.data_modules.tables.suggested_options import suggest_column_options
        from mtl.files.writing import write_text

        name = data_name(args.file)
        out = args.out / "data" / f"{name}.yaml"
        require(args.force or not out.exists(), EXISTS.format(out))
        with print_logs():
            content = suggest_column_options(args.file, args.labels, name, args.out)
        write_text(out, content)
        first = "Once the cell above is dealt with, train" if "\n  # " in content else "Train"
        print(f"\n{out}: these options, to edit. {first} with them:")
        print(shlex.join([*program(), "--config-dir", str(args.out), f"data={name}"]))


@contextmanager
def print_logs() -> Iterator[None]:
    """Print what is logged inside this context, without time and level."""
    logger, handler = logging.getLogger("mtl"), ConsoleHandler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def data_name(path: Path) -> str:
    """Return a name for the data set, from the file's, that is not yet used."""
    name = re.sub(r"\W+", "_", path.name.split(".")[0]).strip("_") or "my_table"
    return f"my_{name}" if (CONF / "data" / f"{name}.yaml").exists() else name
