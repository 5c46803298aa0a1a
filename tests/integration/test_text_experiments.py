"""COMET-BERT's three steps on a tiny encoder: a dense teacher, its importance, and its distillation into experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mtl.cli.run import run
from mtl.cli.use import importance
from tests.integration.helpers import compose_small

SMALL = ["network.pretrained=null", "data.tokenizer=null", "network.config={hidden_size: 16}", "data.vocabulary=200"]
SMALL += ["data.tasks=[rte]", "recipe.batch_size=8", "trainer.max_epochs=2", "+trainer.limit_train_batches=2"]


@pytest.fixture(scope="module")
def teacher(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a dense network, with its importance."""
    folder = tmp_path_factory.mktemp("teacher")
    words = ["experiment=glue_finetune", "network.mixture_layers=[]", *SMALL, f"paths.data_dir={tiny_data}"]
    run(compose_small(folder, *words))
    importance([str(folder / "checkpoints" / "best.ckpt"), "--data-dir", str(tiny_data)])
    return folder


def test_importance_is_saved(teacher: Path) -> None:
    scores = torch.load(teacher / "importance.pt", weights_only=True)["importance"]
    assert scores.shape == (2, 64)
    assert (scores >= 0).all()
    assert (scores > 0).any()


@pytest.mark.parametrize(
    "name", ["moebert_hash", "moebert_hash gate.assignment=balanced", "comet_bert", "comet_bert_plus"]
)
def test_teacher_is_split_and_distilled(name: str, teacher: Path, tmp_path: Path, tiny_data: Path) -> None:
    best = teacher / "checkpoints" / "best.ckpt"
    words = [*f"experiment={name}".split(), *SMALL, f"start_from={best}", f"distillation.teacher={best}"]
    words += [f"network.importance={teacher}/importance.pt", "experts.width=24", "network.shared_neurons=16"]
    run(compose_small(tmp_path, *words, f"paths.data_dir={tiny_data}"))
    record = json.loads((tmp_path / "results.json").read_text())
    assert 0 <= record["test"]["average"] <= 1
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert not [key for key in saved if "teacher" in key]
    assert saved["network.layers.0.mixture.experts.up.weight"].shape == (4, 24, 16)
