"""Who starts a run, which decides what its messages suggest: a command line, or Python code. Imports nothing slow."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from mtl.overrides import quote_path
from mtl.runs.commands import CommandLine, config_dirs, program, relative_to_cwd
from mtl.runs.signals import StopSignals
from mtl.runs.trial import TrialEnd


@dataclass(frozen=True)
class Caller:
    """A command line ``line`` that starts a run.

    ``local``: the overrides that a run started from a checkpoint of this one has to repeat, since a checkpoint keeps no
    folders, servers or classes. ``trial``: the pipe to the worker whose trial this run is, in its first process.
    ``frames``: the rows of splits that are in memory, as DataFrames of polars. ``callbacks``: further ones of
    Lightning. ``began``: when, by ``time.monotonic``.
    """

    line: CommandLine = field(default_factory=CommandLine)
    local: Sequence[str] = ()
    signals: StopSignals = field(default_factory=StopSignals)
    trial: TrialEnd | None = None
    frames: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Sequence[Any] = ()
    began: float = field(default_factory=time.monotonic)
    folder_option: ClassVar[str] = "hydra.run.dir"

    @property
    def is_alone(self) -> bool:
        """Whether nothing goes on with the results but the user: neither a sweep nor a study."""
        return not (self.line.multirun or self.trial)

    @property
    def why_one_process(self) -> str:
        """Why the run must not have several processes; "" if it may."""
        advice = "-m would run the whole sweep in each. Use one device per job (trainer=default), or leave out -m"
        return advice if self.line.multirun else ""

    def command(self, option: str, checkpoint: str | Path) -> str:
        """Return the command that starts from ``checkpoint``, as in ``python train.py ckpt=...``."""
        start = f"{option}={quote_path(relative_to_cwd(checkpoint))}"
        return shlex.join([*program(), *config_dirs(self.line.searched), *self.local, start])

    def typed(self) -> str:
        """Return the command that started this process."""
        return shlex.join([*program(), *self.line.arguments]) if self.line.arguments else " ".join(sys.argv)


@dataclass(frozen=True)
class PythonCaller(Caller):
    """Python code that calls ``mtl.fit``: nothing is printed, and Ctrl-C ends only the training.

    ``folder``: the folder of the run, None if it is a temporary one.
    """

    folder: Path | None = None
    folder_option: ClassVar[str] = "folder"

    @property
    def why_one_process(self) -> str:
        """Why the run must not have several processes."""
        return "mtl.fit trains in one; use mtl train for more"

    def command(self, option: str, checkpoint: str | Path) -> str:
        """Return the call that starts from ``checkpoint``."""
        if option == "ckpt":
            return f"mtl.fit(frame, tasks, resume={str(self.folder)!r})"
        return f"mtl.load({str(checkpoint)!r}).evaluate(frame)"
