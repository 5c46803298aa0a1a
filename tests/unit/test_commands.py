"""Commands that messages print do what they say when they are pasted into a shell."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from mtl.config.resume import is_harmless
from mtl.runs import commands
from mtl.runs.signals import Stopped, StopSignals


@pytest.mark.parametrize("path", ["/a/b.ckpt", "/it's=x/[1],{2} 3.ckpt", "/C:\\d/ä$HOME\\'.ckpt", "/end\\"])
def test_any_path_survives_shell_and_hydra(path: str) -> None:
    *_, word = shlex.split(commands.command("ckpt", path))
    assert OverridesParser.create().parse_override(word).value() == path


def test_a_command_has_what_the_checkpoint_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["paths.data_dir=/my sets", "trust=[mine]", "logger.tensorboard.name=x", "callbacks.best.save_top_k=2"]
    words += ["gate.k=3", "trainer.max_epochs=2", "trainer=default", "paths.output_dir=out"]
    kept = [word for word in words if not is_harmless(word)]
    assert kept == ["paths.data_dir=/my sets", "trust=[mine]", "logger.tensorboard.name=x", "paths.output_dir=out"]
    monkeypatch.setattr(commands, "KEPT", ["--config-dir", "/my conf", *kept])
    signals = StopSignals()
    signals.number = 15
    with pytest.raises(Stopped) as stopped:
        signals.training_ends("/runs/best.ckpt")
    printed = shlex.split(str(stopped.value).partition("with: ")[2])
    assert printed == ["python", "train.py", "--config-dir", "/my conf", *kept, "evaluate=/runs/best.ckpt"]


def test_a_program_in_another_folder_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [str(tmp_path / "train.py")])
    assert shlex.split(commands.command("ckpt", "a"))[1] == str(tmp_path / "train.py")
    monkeypatch.chdir(tmp_path)
    assert shlex.split(commands.command("ckpt", "a"))[1] == "train.py"


def test_a_sweep_goes_on_in_its_folder() -> None:
    words = ["-m", "seed=1,2", "label=a b", "hydra.sweep.dir=old"]
    printed = shlex.split(commands.sweep_command(words, "/new folder"))
    assert printed == ["python", "train.py", "-m", "seed=1,2", "label=a b", "hydra.sweep.dir='/new folder'"]
