"""Search the options of a data set: ``python tune.py study=comet_movielens gate=comet,topk n_trials=50``.

Words that ``conf/tune.yaml`` lists are options of the study, all others are options of train.py for all of its trials.
The same command, started again or on other machines, works on the same study. ``show=best`` prints the best trials,
``show=12`` trial 12. The studies are in ``conf/study/``; ``hydra.searchpath=[file:///FOLDER]`` finds yours in
``FOLDER/study/``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

import train
from mtl.cli.explain import CONF, explain

STUDY_OPTIONS = [*OmegaConf.load(CONF / "tune.yaml"), "sampler", "pruner", "study"]
STUDY_OPTIONS = [name for name in STUDY_OPTIONS if name not in ("defaults", "fixed", "space", "gates")]
BOTH = "hydra.searchpath"  # where further YAML files are


def split_words(words: Sequence[str], own: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of the options ``own``, and those of train.py. Of an option given twice, the last one counts."""
    given = {word.partition("=")[0]: word for word in words}
    ours = [word for key, word in given.items() if key.split(".")[0] in own or key == BOTH]
    return ours, [word for key, word in given.items() if key == BOTH or word not in ours]


def first_run(words: Sequence[str]) -> DictConfig:
    """Return the configuration of ``train.py words``, with every value checked."""
    from mtl.checks import InputError
    from mtl.config import schema

    try:
        cfg = train.composed(words)
    except Exception as error:
        sentence = explain(error, words)
        if sentence is None:
            raise
        raise InputError(sentence) from error
    cfg.label, cfg.paths.run_dir = "trial", "."
    schema.check(cfg, words)
    return cfg


def run(words: Sequence[str]) -> None:
    """Compose and check the study, then show it or work on it."""
    from mtl.checks import InputError

    try:
        from mtl.tune.command import tune
    except ModuleNotFoundError as error:
        raise InputError(f"tune.py needs the package {error.name}: pip install -e '.[tune]'") from None
    study, others = split_words(words, STUDY_OPTIONS)
    special = {key: word.partition("=")[2] for word in others if (key := word.partition("=")[0]) in ("gate", "show")}
    others = [word for word in others if word.partition("=")[0] not in special]
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
    """Run the command."""
    command(run, f"{__doc__}\n{(CONF / 'tune.yaml').read_text()}")


def command(run: Callable[[Sequence[str]], None], usage: str) -> None:
    """Run ``run`` with the words of the command line, or print ``usage``; print every error as one message."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(usage)
        return
    os.environ.setdefault("MTL_FULL_ERROR", os.environ.get("HYDRA_FULL_ERROR", "0"))
    try:
        run(sys.argv[1:])
    except SystemExit:
        raise
    except BaseException as error:
        train.report(error)


if __name__ == "__main__":
    main()
