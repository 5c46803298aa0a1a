"""Run the program in processes that start at once: they are forked from a server that has imported everything.

They are not forked from the process of the tests, which has threads (of polars, for one) that a fork would lose.
"""

from __future__ import annotations

import os
import random
import runpy
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mtl.cli import train
from mtl.config import resolvers
from mtl.jobs import process
from mtl.runs.trial import TrialEnd
from tests.conftest import ROOT

SMALL = ["trainer.max_epochs=1", "trainer.accelerator=cpu", "callbacks.progress=null", "~logger"]
SMALL += ["callbacks.routing.figures=false", "data.rows=[120,40,40]", "data.batch_size=40"]
SERVER = process.SERVER  # that of the runs of a study
SERVER.set_forkserver_preload(["tests.preloaded"])
LIMIT = 240  # seconds; only to end a program that hangs


@dataclass(frozen=True)
class Outcome:
    """What became of a command: its exit status (negative: the signal that ended it) and all that it printed."""

    words: Sequence[str]
    status: int
    output: str
    seconds: float

    @property
    def problem(self) -> str | None:
        """Return why this is no clear answer to bad input, or None if it is one message."""
        message = [line for line in self.output.splitlines() if line.startswith(("error: ", "stopped "))]
        if "Traceback" in self.output or "bug in mtl" in self.output:
            return "traceback"
        if self.status == 0:
            return "accepted"
        if self.status < 0:
            return "hung" if self.seconds >= LIMIT else "died"
        if not message:
            return "no message"
        if len(message) > 1:
            return "more than one message"
        named = [name for word in self.words for name in (word.lstrip("+~").split("=")[0].split(".")[-1], word[-20:])]
        named += [word.partition("=")[2] for word in self.words if len(word.partition("=")[2]) > 2]
        return None if any(name in message[0] for name in named) else "the message names no option of the command"


class Forked:
    """A run of ``python train.py <words>`` in one forked process, or in several with the ranks that torchrun gives.

    ``main``: what runs instead of train.py's, a function that can be pickled; it finds the words in ``sys.argv``.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        processes: int = 1,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        main: Callable[[], object] = train.main,
    ) -> None:
        self.words, self.outputs = list(words), [folder / f"output_{rank}.txt" for rank in range(processes)]
        folder.mkdir(parents=True, exist_ok=True)
        self._began, port = time.monotonic(), free_port()
        self._children = []
        for rank, output in enumerate(self.outputs):
            own = env or (ranks(rank, processes, port) if processes > 1 else {})
            child = SERVER.Process(target=_program, args=(list(words), cwd or folder, output, dict(own), main))
            child.start()
            self._children.append(child)

    def signal(self, number: int, rank: int = 0) -> None:
        """Send a signal to one of the processes."""
        os.kill(self._children[rank].pid, number)

    def started(self) -> list[int]:
        """Return the numbers of the processes that the first process has started."""
        number = self._children[0].pid
        return [int(child) for child in Path(f"/proc/{number}/task/{number}/children").read_text().split()]

    def wait_for(self, path: Path, after: int = 0) -> None:
        """Return as soon as the program has written ``path``, later than at ``after`` (``st_mtime_ns``)."""
        while not path.exists() or path.stat().st_mtime_ns <= after:
            assert all(child.is_alive() for child in self._children), self.outputs[0].read_text(errors="replace")
            assert time.monotonic() < self._began + LIMIT, f"no {path} after {LIMIT} s"
            time.sleep(0.02)

    def wait(self) -> Outcome:
        """Return what became of the first process, with what all of them printed, when all have ended."""
        for child in self._children:
            child.join(max(0.0, self._began + LIMIT - time.monotonic()))
        for child in self._children:
            if child.is_alive():
                os.killpg(child.pid, signal.SIGKILL)
                child.join()
        output = "".join(path.read_text(errors="replace") for path in self.outputs)
        return Outcome(self.words, self._children[0].exitcode, output, time.monotonic() - self._began)


def free_port() -> int:
    """Return a port of this machine that nobody uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def ranks(rank: int, processes: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets."""
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "x", "NODE_RANK": 0}
    names |= {"GROUP_RANK": 0, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "RANK": rank, "LOCAL_RANK": rank}
    return {name: str(value) for name, value in names.items()}


def attempt(words: Sequence[str], folder: Path, small: bool = True) -> Outcome:
    """Run ``python train.py <words>`` in ``folder``, on a data set of few rows unless ``small`` is false."""
    given = {word.lstrip("+~").split("=")[0] for word in words}
    shrunk = [word for word in SMALL if small and word.lstrip("~").split("=")[0] not in given]
    outcome = Forked([*shrunk, *words], folder).wait()
    return replace(outcome, words=words)


def run_file(path: Path, arguments: Sequence[str], trial: TrialEnd) -> None:
    """Run a file that stands for ``mtl train``; it finds its words in ``sys.argv``, and ``trial``."""
    runpy.run_path(str(path), {"trial": trial})


def _program(words: Sequence[str], cwd: Path, output: Path, env: Mapping[str, str], main: Callable[[], object]) -> None:
    status = 70
    try:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(file, number)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w") for number in (1, 2))
        os.chdir(cwd)
        os.environ.update(env)
        sys.path[:0] = env["PYTHONPATH"].split(os.pathsep) if "PYTHONPATH" in env else []
        warnings.resetwarnings()  # those of pytest are errors
        resolvers.RANK = env.get("RANK", "0")
        sys.argv = [str(ROOT / "train.py"), *words]
        try:
            main()
            status = 0
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            if isinstance(stop.code, str):
                sys.stderr.write(stop.code + "\n")
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(status)


# Values that no option of that kind accepts
NEVER: dict[type, list[str]] = {
    bool: ["maybe", "3", "[true]", "{a: 1}", "0.5"],
    int: ["abc", "true", "1.5", "[1]", "{a: 1}", "nan", "1e999", "-7", "'1 '"],
    float: ["abc", "true", "[1]", "{a: 1}", "nan", "inf", "-inf", "''"],
    str: ["[a]", "{a: 1}", "5.5", "true"],
    list: ["abc", "5", "{a: 1}", "[null]", "[[1]]", "true"],
}
# Options whose values are free, or that accept what others do not
FREE = (
    "choices",
    "paths",
    "ckpt",
    "evaluate",
    "trust",
    "run_name",
    "trainer.devices",
    "trainer.max_steps",
    "data.tasks",
)
FREE += (
    "trainer.fast_dev_run",
    "trainer.max_epochs",
    "gate.weights",
    "trainer.accelerator",
    "trainer.precision",
)
LENGTHS = (".epochs", ".every_n_minutes", ".start", ".end", ".min_delta")  # whole numbers by default, but need not be


def generated(cfg: DictConfig, count: int, seed: int) -> list[list[str]]:
    """Return ``count`` commands with one bad value each, drawn from all options of ``cfg`` that have a value."""
    words, text = [], OmegaConf.to_yaml(cfg)
    for key, value in _options(OmegaConf.to_container(cfg, resolve=False)):
        if key.startswith("recipe.") and f"${{{key}}}" not in text:
            continue  # of a gate that was not chosen
        kind = type(value)
        if kind is str and value.startswith("${"):
            value = OmegaConf.select(cfg, key, throw_on_resolution_failure=False)
            kind = type(value)
        if key.startswith(FREE) or kind not in NEVER or key.rsplit(".", 1)[-1][0] == "_":
            continue
        kind = float if kind is int and key.endswith(LENGTHS) else kind
        words += [[f"{key}={bad}"] for bad in NEVER[kind] if not (kind is int and bad == "-7" and value < 0)]
    return random.Random(seed).sample(words, min(count, len(words)))


def _options(node: Any, key: str = "") -> list[tuple[str, Any]]:
    if not isinstance(node, dict):
        return [(key, node)]
    return [pair for name, child in node.items() for pair in _options(child, f"{key}.{name}" if key else str(name))]
