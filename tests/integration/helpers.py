"""Compose the real configuration, shrunk to seconds."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtl.checkpoints.files import read, read_to_resume
from mtl.cli.help import groups
from mtl.config import compose
from mtl.config.check import check
from mtl.config.portable import is_portable
from mtl.config.resume import resumed_config
from mtl.pipeline.run import run
from mtl.python.fit import own_hydra
from tests.config_files import keep_files
from tests.conftest import ROOT

keep_files()
GROUPS = [name for name, _ in groups(ROOT / "conf")]  # the choices that a run makes
SMALL = [
    "trainer.max_epochs=2",
    "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1",
    "callbacks.progress=null",
    "callbacks.routing.figures=false",  # a picture takes longer than a small run
    "blend=none",  # so do trees
]
# Sizes of a mixture that trains at once
NARROW = ["recipe.embedding_dim=4", "recipe.num_experts=4", "recipe.expert_units=[8]", "recipe.head_units=[8]"]


def composed(words: Sequence[str]) -> DictConfig:
    """Return the configuration of ``python train.py <words>``, with its choices, as train.py composes it.

    Values are set in the configuration that the other words compose: Hydra takes longer than many a test.
    """
    values = [(word, *value) for word in words if (value := _value(word))]
    cfg = copy.deepcopy(_composed(tuple(word for word in words if not _value(word))))
    try:
        for _, key, value in values:
            OmegaConf.update(cfg, key, value)
    except OmegaConfBaseException:  # the configuration has no such option
        return copy.deepcopy(_composed(tuple(words)))
    cfg.overrides = [word for word in words if _is_harmless(word)]
    return cfg


_is_harmless = cache(is_portable)


@cache
def _value(word: str) -> tuple[str, Any] | None:
    """Return the key and the value of a word that sets an option; None if it chooses a file or must be composed."""
    key = word.partition("=")[0]
    if not re.fullmatch(r"\w+(\.\w+)*", key) or key in GROUPS or key.startswith("hydra."):
        return None
    override = OverridesParser.create().parse_override(word)
    return None if override.is_sweep_override() else (key, override.value())


@cache
def _composed(words: tuple[str, ...]) -> DictConfig:
    with own_hydra():
        return compose.composed(words)


def compose_small(run_dir: Path, *words: str) -> DictConfig:
    """Return the configuration of ``python train.py <words>``, shrunk, writing to ``run_dir``."""
    logger = [] if any(word.lstrip("~").startswith("logger") for word in words) else ["logger=none"]
    cfg = composed([*SMALL, *logger, "run_name=test", *words])
    given = {word.partition("=")[0] for word in words}
    smaller: dict[str, Any] = {}  # set as if they were words, since Hydra takes longer than many a test
    if "tasks_per_group" in cfg.data and "data.tasks_per_group" not in given:
        smaller["tasks_per_group"] = 3  # what is logged of each task takes longer than its training
        smaller |= {} if {"data.num_groups", "experiment"} & given else {"num_groups": 1}
    if "rows" in cfg.data and "data.rows" not in given:
        smaller["rows"] = [60, 20, 20] if "source" in cfg.data else [600, 200, 200]  # pictures are dear
    cfg.data.update(smaller)
    cfg.paths.run_dir = str(run_dir)
    return cfg


def accepted(words: Sequence[str]) -> DictConfig:
    """Return the configuration of ``words``, with every value checked."""
    cfg = composed(words)
    cfg.run_name, cfg.paths.run_dir = "test", "."
    check(cfg)
    return cfg


def narrow(cfg: DictConfig) -> DictConfig:
    """Return ``cfg`` with layers of 8 units and embeddings of 4 numbers: published sizes take longer than all else."""
    cfg.recipe.embedding_dim = 4
    for name in ("expert_units", "head_units"):
        cfg.recipe[name] = [8] * len(cfg.recipe[name])
    return cfg


def resume_small(
    path: Path, run_dir: Path, *words: str, evaluate: bool = False, trust: Sequence[str] = ()
) -> DictConfig:
    """Return the configuration of ``python train.py ckpt=<path> <words>``, or ``evaluate=<path>``."""
    words = (f"{'evaluate' if evaluate else 'ckpt'}='{path}'", f"paths.run_dir='{run_dir}'", *words)
    checkpoint = read(path) if evaluate else read_to_resume(path)
    cfg = resumed_config(checkpoint, words, composed, trust, evaluate)
    if OmegaConf.is_interpolation(cfg, "run_name"):  # of Hydra's choices
        cfg.run_name = "test"
    return cfg


def train_table(folder: Path, rows: pl.DataFrame, *words: str) -> Path:
    """Train a small network on ``rows``, written to ``rows.csv`` in ``folder``; return the folder of the run."""
    rows.write_csv(folder / "rows.csv")
    sizes = ("recipe.embedding_dim=4", "recipe.expert_units=[8]", "recipe.head_units=[8]", "recipe.num_experts=3")
    words = ("data=table", f"data.path={folder}/rows.csv", *sizes, "trainer.max_epochs=1", "~logger", *words)
    run(compose_small(folder / "run", *words))
    return folder / "run"
