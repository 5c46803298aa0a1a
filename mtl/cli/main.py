"""The command line: ``mtl COMMAND ...``. Imports nothing slow, so that ``--help`` is answered at once."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from mtl import __version__
from mtl.checks import suggestion
from mtl.runs.console import protect_streams

COMMANDS = {  # the module, which has a function named like the command or ``main``, and a description
    "train": ("mtl.cli.train", "train a network, test it and save the results"),
    "evaluate": ("mtl.cli.train", "test the network of a run: mtl evaluate RUN [FILE]"),
    "columns": ("mtl.cli.columns", "show what the columns of a table are taken for: mtl columns FILE"),
    "tune": ("mtl.cli.tune", "search the options of a data set"),
    "share": ("mtl.cli.share", "find out which tasks should share a network"),
    "reproduce": ("mtl.cli.reproduce", "run a table or figure of a paper again"),
    "report": ("mtl.cli.report", "compare runs and studies in a page"),
    "predict": ("mtl.cli.use", "predict the rows of a file"),
    "export": ("mtl.cli.use", "write a network as a program for other places"),
    "card": ("mtl.cli.use", "write a folder for a model hub, with a model card"),
    "serve": ("mtl.cli.use", "answer requests over HTTP"),
    "prune": ("mtl.cli.use", "extract the part of a network that a task uses"),
    "importance": ("mtl.cli.use", "rank the columns by what the tasks lose without them"),
    "explain": ("mtl.cli.use", "say which cells of a row raise or lower its predictions"),
    "drift": ("mtl.cli.use", "tell whether rows have changed since the training"),
    "compare": ("mtl.cli.use", "tell which of two networks is better on the same rows"),
    "neurons": ("mtl.cli.use", "rank the hidden units of a dense Transformer"),
}

QUICK = {"-h", "--help", "-c", "--cfg"}  # flags that are answered without PyTorch


def main(arguments: Sequence[str] | None = None, **options: Any) -> None:
    """Run the command that the command line names; its function takes further ``options``, such as a trial."""
    protect_streams()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        lines = [f"  {command:<12}{text}" for command, (_, text) in COMMANDS.items()]
        print("\n".join(["usage: mtl COMMAND ..., with:", "", *lines, "", "mtl COMMAND --help shows its options."]))
        return
    if "--version" in arguments:
        print(f"mtl {__version__}")
        return
    if name not in COMMANDS:
        sys.exit(f"error: {name}: no such command{suggestion(name, COMMANDS) or ';'} mtl --help lists all")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # finds the user's own classes, as python train.py does
    rest = arguments[1:]
    if name == "evaluate":
        from mtl.cli.command_line import name_files

        if {"-h", "--help"} & set(rest):
            from mtl.cli.help import print_help_of_evaluate
            from mtl.config.compose import CONF

            return print_help_of_evaluate(CONF / "train.yaml")
        rest = name_files(rest)
        if not (QUICK & set(rest) or any(argument.startswith("evaluate=") for argument in rest)):
            sys.exit("error: give a run, as in mtl evaluate outputs/DATE/RUN")
    if (rest or name == "train") and not QUICK & set(rest) and sys.stderr.isatty():
        sys.stderr.write("loading PyTorch (a few seconds) ...\n")  # the first line of most commands comes after that
    module = importlib.import_module(COMMANDS[name][0])
    getattr(module, name if COMMANDS[name][0] == "mtl.cli.use" else "main")(rest, **options)
