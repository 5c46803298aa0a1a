"""Runs on texts that are stopped and go on: the last bit is the same; pretrained files are needed only once.

Then COMET-BERT's three steps on a tiny encoder: a dense teacher, its importance, its distillation into experts.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mtl.data_modules.texts import vocabulary
from mtl.data_modules.texts.rows import Texts

from mtl.checks import InputError
from mtl.cli.use import neurons
from mtl.config import build
from mtl.pipeline.run import run
from tests.glue_files import TINY, write_glue
from tests.integration.helpers import compose_small
from tests.stopping import assert_same, go_on, interrupted

LOGGED = ["logger=csv", "trainer.log_every_n_steps=1"]
# Steps of two super-batches of two tasks each, with a soft permutation that is hardened in the second epoch
LOCAL_SEARCH = ["gate=comet", "permutation=sinkhorn", "recipe.permutation.epochs=1.4", "permutation.noise=0.1"]
LOCAL_SEARCH += ["data.tasks_per_step=2", "data.task_order=proportional", "trainer.accumulate_grad_batches=2"]
LOCAL_SEARCH += ["lr_schedule=linear", "callbacks.lr_schedule.warmup=0.3"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    write_glue(folder / "glue", {"rte": 30, "sst2": 40, "stsb": 20})
    return folder


@pytest.fixture(scope="module")
def teacher(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint of a dense network of three tasks."""
    folder = tmp_path_factory.mktemp("teacher")
    run(compose_small(folder, *words(data), "network.mixture_layers=[]", "trainer.max_epochs=1", "~logger"))
    return folder / "checkpoints" / "last.ckpt"


def words(data: Path, tasks: str = "[rte,sst2,stsb]") -> list[str]:
    return [*TINY, *LOGGED, f"data.tasks={tasks}", f"paths.data_dir={data}"]


def assert_resumes(tmp_path: Path, options: list[str], batches: list[int], data: Path) -> None:
    """Stop a run at each of ``batches``, resume it, and compare it with a run that was not stopped."""
    run(compose_small(tmp_path / "whole", *options))
    for batch in batches:
        folder = tmp_path / f"stopped_{batch}"
        interrupted(folder, batch, *options)
        go_on(folder, f"paths.data_dir={data}")
        assert_same(folder, tmp_path / "whole")


def test_super_batches_local_search_and_distillation(data: Path, teacher: Path, tmp_path: Path) -> None:
    options = [*words(data), *LOCAL_SEARCH, "distillation=dense_run", f"distillation.teacher={teacher}"]
    assert_resumes(tmp_path, options, [2], data)  # of six batches and three steps in an epoch


def test_run_that_started_from_other_tasks(data: Path, teacher: Path, tmp_path: Path) -> None:
    """With the vocabulary of the other run; one of its own, as large, is refused."""
    options = [*words(data, "[stsb,sst2]"), f"start_from={teacher}", "gate=task_top1"]
    with pytest.raises(InputError, match="another vocabulary"):
        run(compose_small(tmp_path / "own", *options))
    [theirs] = {Path(found).parent for found in data.glob("cache/vocabulary-*/vocab.txt")} - own_vocabulary(options)
    assert_resumes(tmp_path, [*options, f"data.tokenizer={theirs}"], [5], data)


def own_vocabulary(options: list[str]) -> set[Path]:
    texts: Any = build.build_data(compose_small(Path("unused"), *options))
    texts.setup()
    return {Path(texts.encoder.source)}


@pytest.fixture
def pretrained(data: Path, tmp_path: Path) -> Path:
    """Return a folder with an encoder and a tokenizer."""
    import transformers

    folder = tmp_path / "pretrained"
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    transformers.BertModel(transformers.BertConfig(vocab_size=100, **sizes)).save_pretrained(folder)
    found = vocabulary.trained(
        [Texts(["the cat sees a dog", "the cat likes a dog"], None, torch.ones(2))], 100, tmp_path
    )
    shutil.copytree(found.source, folder, dirs_exist_ok=True)
    return folder


def test_pretrained_encoder_is_not_read_again(data: Path, pretrained: Path, tmp_path: Path) -> None:
    """A checkpoint holds the weights and the tokenizer of its run; a new run needs their files."""
    options = [*words(data, "[sst2]"), f"network.pretrained={pretrained}", "network.config=null", "data.tokenizer=null"]
    own = options[:-1]  # with the tokenizer of the encoder
    run(compose_small(tmp_path / "whole", *options))
    interrupted(tmp_path / "parts", 2, *options)
    interrupted(tmp_path / "own", 0, *own)
    shutil.rmtree(pretrained)
    for folder in ("parts", "own"):
        go_on(tmp_path / folder, f"paths.data_dir={data}")
    assert_same(tmp_path / "parts", tmp_path / "whole")
    with pytest.raises(InputError, match=f"data.tokenizer={pretrained} "):
        run(compose_small(tmp_path / "new", *own))


EXPERIMENT = ["network.pretrained=null", "data.tokenizer=null", "network.config={hidden_size: 16}"]
EXPERIMENT += ["data.vocabulary=200", "data.tasks=[rte]", "recipe.batch_size=8"]
EXPERIMENT += ["trainer.max_epochs=2", "+trainer.limit_train_batches=2"]


@pytest.fixture(scope="module")
def taught(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a dense network, with its importance."""
    folder = tmp_path_factory.mktemp("taught")
    words = ["experiment=glue_finetune", "network.mixture_layers=[]", *EXPERIMENT, f"paths.data_dir={tiny_data}"]
    run(compose_small(folder, *words))
    neurons([str(folder / "checkpoints" / "best.ckpt"), "--data-dir", str(tiny_data)])
    return folder


def test_importance_is_saved(taught: Path) -> None:
    scores = torch.load(taught / "neuron_scores.pt", weights_only=True)["neuron_scores"]
    assert scores.shape == (2, 64)
    assert (scores >= 0).all()
    assert (scores > 0).any()


@pytest.mark.parametrize("name", ["moebert_hash gate.assignment=balanced", "comet_bert", "comet_bert_plus"])
def test_teacher_is_split_and_distilled(name: str, taught: Path, tmp_path: Path, tiny_data: Path) -> None:
    best = taught / "checkpoints" / "best.ckpt"
    words = [*f"experiment={name}".split(), *EXPERIMENT, f"start_from={best}", f"distillation.teacher={best}"]
    words += [f"network.neuron_scores={taught}/neuron_scores.pt", "experts.width=24", "network.shared_neurons=16"]
    run(compose_small(tmp_path, *words, f"paths.data_dir={tiny_data}"))
    record = json.loads((tmp_path / "results.json").read_text())
    assert 0 <= record["numbers"]["test"]["network"]["average"] <= 1
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert not [key for key in saved if "teacher" in key]
    assert saved["network.layers.0.mixture.experts.up.weight"].shape == (4, 24, 16)
