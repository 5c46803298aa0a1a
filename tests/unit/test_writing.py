"""Write files: each is complete under its name or absent, and a write that fails is one message."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from matplotlib.figure import Figure

from mtl.checks import InputError
from mtl.files.writing import write_csv, write_json, write_text, writing
from tests.conftest import ROOT
from tests.disks import largest_file

FRAME = pl.DataFrame({"a": np.random.default_rng(0).random(50_000)})


def picture(file: Any) -> None:
    figure = Figure()
    figure.subplots().plot(FRAME["a"])
    figure.savefig(file, format="png")


WRITERS: dict[str, Callable[[Any], Any]] = {
    "bytes": lambda file: file.write(b"x" * 200_000),
    "torch": lambda file: torch.save(torch.rand(50_000), file),
    "csv": FRAME.write_csv,
    "parquet": FRAME.write_parquet,
    "lazy parquet": FRAME.lazy().sink_parquet,
    "name": lambda file: FRAME.write_parquet(file.name),
    "figure": picture,
}


def test_file_gets_its_name_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "x.txt"
    write_text(path, "old")
    with writing(path) as file:
        file.write("größer".encode())
        assert path.read_text() == "old"
    assert path.read_text(encoding="utf-8") == "größer"
    write_csv(path, ["a", "b"], [[1, "x,y"], [2.5, None]])
    assert path.read_text() == 'a,b\n1,"x,y"\n2.5,\n'
    assert [each.name for each in path.parent.iterdir()] == ["x.txt"]


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    target, link, pipe, folder = (tmp_path / name for name in ("target", "link", "pipe", "folder"))
    target.write_text("old")
    link.symlink_to(target)
    os.mkfifo(pipe)
    folder.mkdir()
    (tmp_path / "device").symlink_to("/dev/full")
    for path in (link, pipe, folder, tmp_path / "device"):
        kind = path.lstat().st_mode
        with pytest.raises(InputError, match=f"{path} cannot be written: it is a link, a folder or a device"):
            write_text(path, "new")
        assert path.lstat().st_mode == kind
    (tmp_path / f".x.{os.getpid()}").symlink_to(target)  # as somebody could who guesses the number of the process
    write_text(tmp_path / "x", "new")
    assert (target.read_text(), (tmp_path / "x").read_text()) == ("old", "new")
    assert not (tmp_path / "x").is_symlink()


@pytest.mark.parametrize("writer", WRITERS)
def test_full_disk_is_one_message_and_keeps_the_previous_file(
    writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.txt"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda path, mode: open("/dev/full", mode.replace("x", "w")))  # noqa: SIM115
        with pytest.raises(InputError, match=rf"^{re.escape(str(path))} cannot be written: no space left on device$"):
            write_with(WRITERS[writer], path)
    assert not list(tmp_path.iterdir())
    path.write_text("old")
    with largest_file(4_000), pytest.raises(InputError, match=r"file too large; the previous .*x.txt is intact$"):
        write_with(WRITERS[writer], path)
    assert [each.name for each in tmp_path.iterdir()] == ["x.txt"]
    assert path.read_text() == "old"


def write_with(writer: Callable[[Any], Any], path: Path) -> None:
    with writing(path) as file:
        writer(file)


def test_place_that_takes_no_file_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for place, reason in {
        "file/x": "not a directory",
        "folder": "it is a link, a folder",
        "x" * 300: "file name too",
    }.items():
        with pytest.raises(InputError, match=rf"{place[:250]}.* cannot be written: {reason}"):
            write_json(tmp_path / place, {})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder"]


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("old")
    for error in (ValueError("mine"), InputError("row 3 is bad"), KeyboardInterrupt("Ctrl-C")):
        with pytest.raises(type(error), match=str(error)):
            write_with(partial(fail, error), path)
        assert [each.name for each in tmp_path.iterdir()] == ["x.txt"]
        assert path.read_text() == "old"
    error = InputError("row 3 cannot be read")
    error.__cause__ = OSError(5, "Input/output error")
    with pytest.raises(InputError, match="row 3"):
        write_with(partial(fail, error), path)


def fail(error: BaseException, file: Any) -> None:
    file.write(b"half")
    raise error


def test_killed_writer_keeps_the_previous_file(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("old")
    code = (
        "import os, pathlib, sys; from mtl.files.writing import writing\n"
        "with writing(pathlib.Path(sys.argv[1])) as file:\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
