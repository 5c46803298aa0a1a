"""Freed memory stays with the process."""

from __future__ import annotations

import platform
from functools import partial
from pathlib import Path

import pytest

from mtl import memory
from tests.programs import Forked


def test_freed_memory_is_kept_and_without_glibc_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes of their own, since it cannot be taken back: how often the system had to clear a page."""
    program = """
import resource, sys, torch
from mtl.memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
for number in range(60):
    if number == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2**20 + number) for _ in range(12)]
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    runs = [Forked([way], tmp_path / way, main=partial(exec, program, {})).wait() for way in ("keep", "default")]
    kept, default = (int(run.output) for run in runs)
    if platform.libc_ver()[0] == "glibc":
        assert kept < default / 2
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    memory.keep_freed_memory()
