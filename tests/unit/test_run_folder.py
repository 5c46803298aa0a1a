"""Run folders, the console's streams, errors as sentences, printed commands, and memory that is kept."""

from __future__ import annotations

import io
import math
import os
import platform
import shlex
from functools import partial
from pathlib import Path
from threading import Timer

import pytest
import torch
from filelock import FileLock
from hydra.core.override_parser.overrides_parser import OverridesParser

import mtl
from mtl.checks import InputError
from mtl.cli.errors import explain
from mtl.config import resolvers
from mtl.config.portable import is_portable
from mtl.files.run_files import checked_file, find_checkpoint
from mtl.pipeline import memory
from mtl.pipeline.peers import is_lost_peer
from mtl.pipeline.run_lock import lock_run_folder, unlock_run_folder
from mtl.runs import commands
from mtl.runs.caller import Caller
from mtl.runs.console import FaultTolerantStream
from mtl.runs.signals import Stopped
from tests.programs import Forked


def test_new_folders_never_coincide(tmp_path: Path) -> None:
    folders = [resolvers.new_folder(str(tmp_path / "run")) for _ in range(4)]
    assert [Path(folder).name for folder in folders] == ["run", "run_2", "run_3", "run_4"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="file"):
        resolvers.new_folder(str(tmp_path / "file"))


def test_only_checkpoints_in_run_folders_lead_to_a_run_folder(tmp_path: Path) -> None:
    assert resolvers.run_folder(str(tmp_path / "lone.ckpt")) is None
    assert resolvers.run_folder(str(tmp_path / "checkpoints" / "last.ckpt")) is None
    (tmp_path / "config.yaml").write_text("seed: 0")
    assert resolvers.run_folder(str(tmp_path / "checkpoints" / "last.ckpt")) == tmp_path


def test_run_without_a_checkpoint_is_no_wrong_path(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"checkpoint {tmp_path}: no such file; give a run folder"):
        find_checkpoint(tmp_path)
    (tmp_path / "config.yaml").write_text("seed: 0")
    with pytest.raises(
        InputError, match=f"{tmp_path}: this run was stopped before its first checkpoint; begin it again"
    ):
        find_checkpoint(tmp_path)


def test_only_regular_files_inside_a_folder_are_its_own(tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    (run / "folder").mkdir(parents=True)
    outside.write_text("x")
    (run / "file").write_text("x" * 9)
    (run / "inside").symlink_to("file")
    for name in ("file", "inside"):
        assert checked_file(run / name, run, 9) == run / name
        with pytest.raises(InputError, match=f"run/{name}: must be a regular file of at most 0 MiB inside {run}"):
            checked_file(run / name, run, 8)
    os.mkfifo(run / "pipe")
    (run / "circle").symlink_to("circle")
    for name, target in (("device", "/dev/null"), ("out", outside), ("dangling", "nothing")):
        (run / name).symlink_to(target)
    for name in ("folder", "pipe", "circle", "device", "out", "dangling", "nothing", "../outside"):
        with pytest.raises(InputError, match="must be a regular file inside"):
            checked_file(run / name, run, math.inf)
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "best.ckpt").symlink_to(outside)
    with pytest.raises(InputError, match=r"best.ckpt: must be a regular file inside"):
        mtl.load(run)
    (run / "train.log").symlink_to(outside)
    with pytest.raises(InputError, match=r"train.log: must be a regular file inside"):
        lock_run_folder(run, resumed=True, caller=Caller())


def test_run_folder_has_one_owner(tmp_path: Path) -> None:
    lock = lock_run_folder(tmp_path, resumed=False, caller=Caller())
    other = Forked(
        [], tmp_path.parent / "printed", main=partial(lock_run_folder, tmp_path, resumed=False, caller=Caller())
    ).wait()
    assert other.status
    assert "another process is using it" in other.output
    lock.release()
    lock_run_folder(tmp_path, resumed=False, caller=Caller()).release()
    (tmp_path / "config.yaml").write_text("seed: 0")
    (tmp_path / "checkpoints").mkdir()
    lock_run_folder(tmp_path, resumed=False, caller=Caller()).release()  # it ended before its first checkpoint
    for name in ("best.ckpt", "last.ckpt"):
        (tmp_path / "checkpoints" / name).touch()
        with pytest.raises(
            InputError, match=f"resume it with: python -m mtl train ckpt={tmp_path}/checkpoints/{name}; or"
        ):
            lock_run_folder(tmp_path, resumed=False, caller=Caller())
    lock_run_folder(tmp_path, resumed=True, caller=Caller()).release()


def test_a_lock_that_is_looked_at_for_a_moment_stops_no_run(tmp_path: Path) -> None:
    """As ``mtl report --watch`` does."""
    looked_at = FileLock(tmp_path / ".lock", thread_local=False)
    looked_at.acquire()
    Timer(0.1, looked_at.release).start()
    lock_run_folder(tmp_path, resumed=True, caller=Caller()).release()


def test_folder_without_a_run_is_deleted(tmp_path: Path) -> None:
    for begun in (False, True):
        folder = tmp_path / "run"
        lock = lock_run_folder(folder, resumed=False, caller=Caller())
        (folder / "command.json").write_text("{}")
        if begun:
            (folder / "config.yaml").write_text("seed: 0")
        unlock_run_folder(folder, lock, delete_empty=True)
        assert folder.exists() == begun


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def test_stream_outlives_its_reader() -> None:
    stream = FaultTolerantStream(Broken())
    assert stream.write("abc") == 3
    stream.flush()
    print("more", file=stream)
    closed = io.StringIO()
    closed.close()
    FaultTolerantStream(closed).write("abc")


@pytest.mark.parametrize(
    ("error", "text", "status"),
    [
        (InputError("data.x=1: must be 2"), "error: data.x=1: must be 2", 1),
        (Stopped("stopped by SIGTERM", 15), "stopped by SIGTERM", 143),
        (KeyboardInterrupt(), "stopped by Ctrl-C", 130),
        (PermissionError(13, "Permission denied", "/x/y"), "error: /x/y: Permission denied", 1),
        (OSError(28, "No space left on device", "/x/y"), "Free some space", 1),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."), "out of memory", 1),
        (RuntimeError("Error(s) in loading state_dict for X:\n\tsize mismatch for a: 1"), "does not fit", 1),
        (ZeroDivisionError("division by zero"), "This is a bug in mtl", 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_errors_are_sentences(error: BaseException, text: str, status: int) -> None:
    message, code = explain(error)
    assert text in message
    assert code == status
    assert "\n" not in message


def test_lost_process_is_recognised() -> None:
    assert is_lost_peer(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:6124"))
    assert not is_lost_peer(RuntimeError("size mismatch"))
    assert not is_lost_peer(torch.OutOfMemoryError("x"))


def test_freed_memory_is_kept_and_without_glibc_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes of their own, since it cannot be taken back: how often the system had to clear a page."""
    program = """
import resource, sys, torch
from mtl.pipeline.memory import keep_freed_memory
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


@pytest.mark.parametrize("path", ["/a/b.ckpt", "/it's=x/[1],{2} 3.ckpt", "/C:\\d/ä$HOME\\'.ckpt", "/end\\"])
def test_any_path_survives_shell_and_hydra(path: str) -> None:
    *_, word = shlex.split(Caller().command("ckpt", path))
    assert OverridesParser.create().parse_override(word).value() == path


def test_a_command_has_what_the_checkpoint_lacks() -> None:
    words = [
        "paths.data_dir=/my sets",
        "trust=[mine]",
        "logger.tensorboard.name=x",
        "callbacks.best.save_weights_only=true",
    ]
    words += ["gate.k=3", "trainer.max_epochs=2", "trainer=default", "paths.output_dir=out"]
    kept = [word for word in words if not is_portable(word)]
    assert kept == ["paths.data_dir=/my sets", "trust=[mine]", "logger.tensorboard.name=x", "paths.output_dir=out"]
    caller = Caller(commands.CommandLine(searched=["file:///my conf"]), kept)
    printed = shlex.split(caller.command("evaluate", "/runs/best.ckpt"))
    assert printed == ["python", "-m", "mtl", "train", "--config-dir", "/my conf", *kept, "evaluate=/runs/best.ckpt"]
    here, searched = f"{Path.cwd()}/conf", f"hydra.searchpath=['file://{Path.cwd()}/conf','pkg://x']"
    flags = ["--config-dir", "conf", "--config-dir", "pkg://x"]
    assert shlex.split(commands.run_command(["seed=1", searched, "gate.k=3"]))[4:] == [*flags, "seed=1", "gate.k=3"]
    assert shlex.split(Caller().command("ckpt", f"{here}/a"))[-1] == "ckpt=conf/a"


def test_a_program_in_another_folder_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [str(tmp_path / "train.py")])
    assert shlex.split(Caller().command("ckpt", "a"))[1] == str(tmp_path / "train.py")
    monkeypatch.chdir(tmp_path)
    assert shlex.split(Caller().command("ckpt", "a"))[1] == "train.py"


def test_a_sweep_goes_on_in_its_folder() -> None:
    words = ["-m", "seed=1,2", "run_name=a b", "hydra.sweep.dir=old", "hydra.mode=MULTIRUN"]
    printed = shlex.split(commands.sweep_command(words, "/new folder"))
    assert printed == [
        "python",
        "-m",
        "mtl",
        "train",
        "-m",
        "seed=1,2",
        "run_name=a b",
        "hydra.sweep.dir='/new folder'",
    ]
