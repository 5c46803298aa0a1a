"""The private names of other libraries that this program uses; an upgrade that breaks one fails here."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
from lightning_utilities.core.imports import RequirementCache
from pytorch_lightning import Trainer
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
from transformers import BertConfig, BertModel

from mtl import compat


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
