"""Search the options of a data set: ``python tune.py study=comet_movielens gate=comet,topk n_trials=50``.

Words that ``conf/tune.yaml`` lists are options of the study, all others are options of train.py for all of its trials.
The same command, started again or on other machines, works on the same study. ``show=best`` prints the best trials,
``show=12`` trial 12. The studies are in ``conf/study/``; ``hydra.searchpath=[file:///FOLDER]`` finds yours in
``FOLDER/study/``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

import train
from conf.explain import CONF, explain

STUDY_OPTIONS = [*OmegaConf.load(CONF / "tune.yaml"), "sampler", "pruner", "study"]
STUDY_OPTIONS = [name for name in STUDY_OPTIONS if name not in ("defaults", "fixed", "space", "gates")]
BOTH = "hydra.searchpath"  # where further YAML files are


def split(words: Sequence[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """Return the words of the study, gate and show with their values, and the words of train.py."""
    keys = [word.partition("=")[0] for word in words]
    given = dict(zip(keys, words, strict=True))
    study = [word for key, word in given.items() if key.split(".")[0] in STUDY_OPTIONS or key == BOTH]
    special = {key: given[key].partition("=")[2] for key in ("gate", "show") if key in given}
    others = [word for key, word in given.items() if key == BOTH or (word not in study and key not in special)]
    return study, special, others


def first_run(words: Sequence[str]) -> DictConfig:
    """Return the configuration of ``train.py words``, with every value checked."""
    from mtl.run import schema
    from mtl.types import InputError

    try:
        cfg = train.composed(words)
    except Exception as error:
        sentence = explain(error, words)
        if sentence is None:
            raise
        raise InputError(sentence) from error
    cfg.label, cfg.paths.run_dir = "trial", "."
    schema.check(cfg)
    return cfg


def run(words: Sequence[str]) -> None:
    """Compose and check the study, then show it or work on it."""
    from mtl.types import InputError

    try:
        from mtl.tune.command import tune
    except ModuleNotFoundError as error:
        raise InputError(f"tune.py needs the package {error.name}: pip install -e '.[tune]'") from None
    study, special, others = split(words)
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        if not any(word.startswith("study=") for word in study):
            names = ", ".join(sorted(path.stem for path in (CONF / "study").glob("*.yaml")))
            raise InputError(f"give a study, as in study=comet_movielens; there are {names}")
        cfg = hydra.compose("tune", study, return_hydra_config=True)
        name = cfg.hydra.runtime.choices.study
        cfg = OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])
        gates = [gate for gate in special.get("gate", "").split(",") if gate]
        tune(cfg, name, gates, others, special.get("show"), first_run, Path(__file__).with_name("train.py"))


def main() -> None:
    """Run the command; print every error as one message."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(f"{__doc__}\n{(CONF / 'tune.yaml').read_text()}")
    os.environ.setdefault("MTL_FULL_ERROR", os.environ.get("HYDRA_FULL_ERROR", "0"))
    try:
        run(sys.argv[1:])
    except SystemExit:
        raise
    except BaseException as error:
        train.report(error)


if __name__ == "__main__":
    main()
