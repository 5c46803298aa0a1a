"""Private names of other libraries that this program uses, and the versions that it accepts."""

from __future__ import annotations

import inspect
import tomllib
from types import SimpleNamespace

import pytest
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


def test_torchmetrics_does_not_import_transformers() -> None:
    assert RequirementCache("torch").requirement == "torch"
    assert RequirementCache("torch")
    assert not RequirementCache("no-such-package")


def test_torchvision_is_left_alone_where_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compat._library
    monkeypatch.setitem(compat.sys.modules, "torchvision", SimpleNamespace())
    compat.prepare_imports()
    assert compat._library is before


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
