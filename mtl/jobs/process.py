"""The process of a run. On Linux it starts at once: a server forks it that has imported what every run needs.

The server does nothing else: when it forks, nothing is computed, no lock is held, and no GPU is in use.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from mtl.runs.trial import TrialEnd

MAIN = importlib.import_module("mtl.__main__")
LOST = 255  # exit status of a process whose server was killed: nobody knows how it ended, or whether it has
IMPORTED = [  # the last two where they are installed
    *("mtl.checkpoints", "mtl.pipeline.finish", "mtl.callbacks.default_callbacks"),
    *("scipy.optimize", "scipy.stats", "torch.utils.tensorboard"),
    *("lightgbm", "transformers.models.bert.modeling_bert"),
]

SERVER: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
SERVER.set_forkserver_preload(IMPORTED)


def prepare() -> None:
    """Let the server import what runs need, while this process checks their options."""
    if SERVER.get_start_method() == "forkserver":
        forkserver.ensure_running()


def start(program: Callable[..., object], overrides: Sequence[str], output: Path, pipe: Connection) -> BaseProcess:
    """Start ``mtl train OVERRIDES``, and return its process.

    ``program(arguments, trial=...)`` does it. What it prints is added to the file ``output``. ``pipe``: its end of the
    pipe to this worker.
    """
    process: BaseProcess = SERVER.Process(target=_run, args=(program, list(overrides), output, pipe, dict(os.environ)))
    script = sys.modules["__main__"]
    sys.modules["__main__"] = MAIN  # else the process would first run the user's script
    try:
        process.start()
    finally:
        sys.modules["__main__"] = script
    return process


def _run(
    program: Callable[..., object],
    overrides: Sequence[str],
    output: Path,
    pipe: Connection,
    environment: dict[str, str],
) -> None:
    os.setsid()  # Ctrl-C is for the worker, which stops this process
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):  # stdout and stderr
        os.dup2(file, number)
    os.environ.update(environment)
    sys.modules["__main__"] = MAIN  # by its name, Lightning starts the other processes of this run
    sys.argv = [str(MAIN.__file__), "train", *overrides]
    program(sys.argv[1:], trial=TrialEnd(pipe))
