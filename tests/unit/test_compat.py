"""Private names of other libraries that this program uses, and the versions that it accepts."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tomllib
from types import ModuleType

import pytest
import torch
from lightning_utilities.core.imports import RequirementCache
from packaging.requirements import Requirement
from pytorch_lightning import Trainer
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
from transformers import BertConfig, BertModel

from mtl import compat
from tests.conftest import ROOT


def test_a_resumed_run_finds_the_batch_of_its_epoch() -> None:
    assert hasattr(_TrainingEpochLoop, "batch_idx")
    assert "batch_progress" in inspect.getsource(_TrainingEpochLoop.__init__)


def test_values_that_no_module_logs_reach_the_monitors() -> None:
    assert "_logger_connector.callback_metrics" in inspect.getsource(Trainer.callback_metrics.fget)


def test_layers_of_an_encoder_have_the_parts_that_are_replaced() -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    layer = BertModel(BertConfig(**sizes, vocab_size=9)).encoder.layer[0]
    assert all(hasattr(layer.attention, name) for name in ("self", "output"))
    assert all(hasattr(layer.output, name) for name in ("dense", "LayerNorm", "dropout"))
    assert hasattr(layer.intermediate, "dense")


def run_python(program: str, **environment: str) -> str:
    """Return what a program prints in a new process, in which OpenMP's waiting is not set but by ``environment``."""
    variables = {name: value for name, value in os.environ.items() if name not in compat.WAITING} | environment
    done = subprocess.run([sys.executable, "-c", program], env=variables, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_lightning_can_be_imported_after_mtl_without_slow_packages_that_torchmetrics_does_not_need() -> None:
    program = (
        "import mtl, sys, torch, pytorch_lightning, torchmetrics, torchvision\n"
        "slow = ('transformers', 'scipy', 'matplotlib')\n"
        "print([name for name in slow if name in sys.modules])\n"
        "figure, _ = torchmetrics.utilities.plot.plot_single_or_multi_val(torch.tensor(0.5))\n"
        "print(type(figure).__name__)"
    )
    assert run_python(program, MPLBACKEND="agg").splitlines() == ["[]", "Figure"]
    assert RequirementCache("torch").requirement == "torch"
    assert RequirementCache("torch")  # as before the import of torchmetrics
    assert RequirementCache("scipy")
    assert not RequirementCache("no-such-package")


SPINS = "import mtl, os; print(os.environ.get('GOMP_SPINCOUNT'))"


def test_waiting_threads_soon_sleep_unless_the_user_has_decided() -> None:
    assert run_python(SPINS) == "80000"
    assert run_python(SPINS, GOMP_SPINCOUNT="5") == "5"
    assert run_python(SPINS, OMP_WAIT_POLICY="ACTIVE") == "None"
    assert run_python("import torch; " + SPINS) == "None"  # OpenMP has already read it


def test_missing_operators_of_torchvision_are_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    executed = []

    def execute(module: ModuleType) -> None:
        executed.append("torchvision.part" in sys.modules)
        if len(executed) == 1:
            raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setitem(sys.modules, "torchvision.part", ModuleType("torchvision.part"))
    for name in [name for name in sys.modules if name.startswith("torchvision.")]:
        monkeypatch.setitem(sys.modules, name, sys.modules[name])  # put back after the test
    compat._execute_torchvision(execute, ModuleType("torchvision"))
    assert executed == [True, False]  # the partly imported package has gone before the second attempt
    assert hasattr(torch.ops.torchvision, "nms")


NEEDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
BOUNDS = {need.name: need.specifier for need in map(Requirement, NEEDS)}


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        ("pytorch-lightning", ["2.6.6"], ["2.6.2", "2.6.3", "2.6.5"]),  # malicious, or run code of a checkpoint
        ("lightning-fabric", ["2.6.6"], ["2.6.2", "2.6.3", "2.6.5"]),
        ("hydra-core", ["1.3.8"], ["1.3.3", "1.4.0"]),
        ("torch", ["2.13.0", "2.14.1"], ["2.12.1", "2.15.0"]),
        ("torchvision", ["0.28.0", "0.29.1"], ["0.27.0", "0.30.0"]),
    ],
)
def test_bounds_keep_out_what_must_not_be_installed(name: str, accepted: list[str], refused: list[str]) -> None:
    assert [version for version in accepted + refused if version in BOUNDS[name]] == accepted
