"""The tensor cache: built once, rebuilt if damaged, never half-written, one builder at a time."""

from __future__ import annotations

import fcntl
import logging
import threading
from pathlib import Path

import pytest
import torch
from mtl.data_modules.files.cache import cached, keyed, locked
from torch import Tensor

from mtl.checks import InputError
from tests.disks import largest_file


class Builder:
    """Return some tensors and count the calls."""

    def __init__(self, rows: int = 1000) -> None:
        self.rows, self.calls = rows, 0

    def __call__(self) -> dict[str, Tensor]:
        self.calls += 1
        return {"a": torch.arange(self.rows), "b": torch.full((3,), torch.nan)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "set.pt"


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and left["a"].equal(right["a"])


def test_each_key_has_its_own_file(path: Path) -> None:
    build = Builder()
    cached(path, build, (1, "x"))
    cached(path, build, (2, "x"))
    cached(path, build, (1, "x"))
    assert build.calls == 2
    assert keyed(path, (1, "x")).name.startswith("set-")
    assert keyed(path, (1, "x")) != keyed(path, (2, "x"))


@pytest.mark.parametrize("damage", ["empty", "cut", "text"])
def test_damaged_file_is_rebuilt(path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    build = Builder()
    cached(path, build)
    file = keyed(path, ())
    raw = file.read_bytes()
    file.write_bytes({"empty": b"", "cut": raw[: len(raw) // 2], "text": b"hello"}[damage])
    assert same(cached(path, build), Builder()())
    assert build.calls == 2
    assert "is damaged and will be rebuilt" in caplog.text
    cached(path, build)
    assert build.calls == 2


def test_leftovers_of_killed_processes_are_removed(path: Path) -> None:
    path.parent.mkdir()
    leftover = path.with_name(f".{keyed(path, ()).name}.99")
    leftover.write_text("half")
    cached(path, Builder())
    assert not leftover.exists()


def test_error_of_the_builder_is_raised_and_leaves_no_file(path: Path) -> None:
    def fail() -> dict[str, Tensor]:
        raise InputError("line 3 is damaged")

    with pytest.raises(InputError, match="line 3"):
        cached(path, fail)
    assert [file.suffix for file in path.parent.iterdir()] == [".lock"]
    cached(path, Builder())  # the lock is released


def test_full_disk_leaves_no_partial_file(path: Path) -> None:
    with largest_file(100_000), pytest.raises(InputError, match=r"cache/set-.*\.pt cannot be written: file too large"):
        cached(path, Builder(rows=100_000))
    assert [file.suffix for file in path.parent.iterdir()] == [".lock"]


def test_waiting_for_the_lock_is_logged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as another process does
        timer = threading.Timer(0.2, fcntl.flock, (file, fcntl.LOCK_UN))
        timer.start()
        with caplog.at_level(logging.INFO, "mtl.data_modules.files.cache"), locked(path, "counting sheep"):
            timer.join(1)
    assert "waiting for another process that is counting sheep" in caplog.text
