"""A run that starts from a checkpoint has the checkpoint's options where its own command line changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from mtl.checkpoints.files import Checkpoint
from mtl.checks import InputError
from mtl.config.resume import resumed_config
from tests.conftest import ROOT
from tests.integration.helpers import composed

HERE = "paths.run_dir=."
OWN = ["trainer.max_epochs=7", "recipe.patience=3", "optimizer.lr=0.0123", "run_name=mine", "callbacks.progress=null"]


def labelled(words: Sequence[str]) -> DictConfig:
    cfg = composed(words)
    cfg.run_name = cfg.run_name if "run_name=mine" in words else "a label"  # the default asks Hydra for the choices
    return cfg


def resumed(run: Sequence[str], *words: str, evaluate: bool = False, **changes: Any) -> DictConfig:
    """Return the configuration of ``words`` that resume, or test, a ``run``, whose checkpoint has ``changes``."""
    cfg = labelled([HERE, *run])
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value)
    content = {"config": OmegaConf.to_container(cfg, resolve=True)}
    return resumed_config(Checkpoint(content, Path("last.ckpt")), [HERE, *words], labelled, evaluate=evaluate)


@pytest.mark.parametrize("name", [None, *sorted(path.stem for path in (ROOT / "conf" / "experiment").iterdir())])
def test_without_words_a_run_is_as_before(name: str | None) -> None:
    words = [*([f"experiment={name}"] if name else []), *OWN]
    if OmegaConf.is_missing(labelled([HERE, *words]).distillation, "teacher"):
        words.append("distillation.teacher=run")
    run = OmegaConf.to_container(labelled([HERE, *words]), resolve=True)
    assert OmegaConf.to_container(resumed(words), resolve=True) == run
    if name in (None, "comet_bert_plus", "synthetic_pairs_routing"):  # also if all are given again
        assert OmegaConf.to_container(resumed(words, *words), resolve=True) == run


def test_what_is_given_counts_also_if_it_is_the_default() -> None:
    default = labelled([]).recipe.max_epochs
    assert resumed(["recipe.max_epochs=3"], f"recipe.max_epochs={default}").trainer.max_epochs == default
    assert resumed(["monitor=val/average"], "monitor=val/loss").callbacks.best.monitor == "val/loss"
    with pytest.raises(InputError, match=r"optimizer.lr is 0.5 in the checkpoint, 0.001 now"):
        resumed(["recipe.learning_rate=0.5"], "recipe.learning_rate=1e-3")


def test_a_choice_takes_along_what_the_run_has_set_of_the_former_one() -> None:
    run = ["schedule=temperature", "callbacks.temperature_schedule.epochs=3"]
    assert "temperature_schedule" not in resumed(run, "schedule=none").callbacks
    assert resumed(run, "recipe.patience=2").callbacks.temperature_schedule.epochs == 3
    assert "early_stopping" not in resumed(["~callbacks.early_stopping"], "trainer.max_epochs=3").callbacks


def test_files_that_have_changed_since() -> None:
    """They count, but for what the weights depend on; what the run has set itself stays."""
    changed = {"recipe.patience": 99, "gate.gamma": 0.25, "trainer.log_every_n_steps": 3}
    default = labelled([]).recipe.patience
    cfg = resumed(["trainer.log_every_n_steps=3"], "recipe.max_epochs=5", **changed)
    assert [OmegaConf.select(cfg, key) for key in changed] == [default, 0.25, 3]
    assert (cfg.trainer.max_epochs, cfg.callbacks.early_stopping.patience) == (5, default)
    with pytest.raises(InputError, match=r"gate.gamma is 0.25 in the checkpoint, 0.5 now"):
        resumed([], "gate.gamma=0.5", **changed)


@pytest.mark.parametrize("word", ["report=true", "calibrate=true", "blend=none", "optimizer.lr=0.5", "monitor=val/x"])
def test_a_test_refuses_what_it_would_not_read(word: str) -> None:
    resumed([word], evaluate=True)
    resumed([word], word, evaluate=True)
    with pytest.raises(InputError, match=rf"^{word.split('=')[0].split('.')[0]}: without effect on a test"):
        resumed([], word, evaluate=True)
