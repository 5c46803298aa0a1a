"""Try bad input on the real program, each in a process of its own, forked from this one so that it starts fast."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

import train
from tests.conftest import ROOT

SMALL = ["trainer.max_epochs=1", "trainer.accelerator=cpu", "callbacks.progress=null", "~logger"]
SMALL += ["callbacks.routing.pictures_every=null", "data.rows=[120,40,40]", "data.batch_size=40"]
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
        if "Traceback" in self.output or "mistake in the code" in self.output:
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


def attempt(words: Sequence[str], folder: Path, small: bool = True) -> Outcome:
    """Run ``python train.py <words>`` in ``folder``, on a data set of few rows unless ``small`` is false."""
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "output.txt"
    began = time.monotonic()
    given = {word.lstrip("+~").split("=")[0] for word in words}
    shrunk = [word for word in SMALL if small and word.lstrip("~").split("=")[0] not in given]
    child = os.fork()
    if child == 0:
        _program([*shrunk, *words], folder, output)
    status = _wait(child, began)
    seconds = time.monotonic() - began
    return Outcome(words, status, output.read_text(errors="replace"), seconds)


def _program(words: Sequence[str], folder: Path, output: Path) -> None:
    status = 70
    try:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(file, number)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w") for number in (1, 2))
        os.chdir(folder)
        sys.argv = [str(ROOT / "train.py"), *words]
        try:
            train.cli()
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


def _wait(child: int, began: float) -> int:
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() - began > LIMIT:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -signal.SIGKILL
        time.sleep(0.01)


# Values that no option of that kind accepts
NEVER: dict[type, list[str]] = {
    bool: ["maybe", "3", "[true]", "{a: 1}", "0.5"],
    int: ["abc", "true", "1.5", "[1]", "{a: 1}", "nan", "1e999", "-7", "'1 '"],
    float: ["abc", "true", "[1]", "{a: 1}", "nan", "inf", "-inf", "''"],
    str: ["[a]", "{a: 1}", "5.5", "true"],
    list: ["abc", "5", "{a: 1}", "[null]", "[[1]]", "true"],
}
# Options whose values are free, or that accept what others do not
FREE = ("choices", "paths", "ckpt", "evaluate", "trust", "label", "trainer.devices", "trainer.max_steps", "data.tasks")
FREE += ("trainer.max_epochs", "callbacks.best.save_top_k", "gate.weights", "trainer.accelerator", "trainer.precision")
LENGTHS = (".epochs", ".every_minutes", ".start", ".end", ".min_delta")  # whole numbers by default, but need not be


def generated(cfg: DictConfig, count: int, seed: int) -> list[list[str]]:
    """Return ``count`` commands with one bad value each, drawn from all options of ``cfg`` that have a value."""
    words = []
    for key, value in _options(OmegaConf.to_container(cfg, resolve=False)):
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
