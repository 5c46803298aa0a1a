"""Search the options of a data set: ``mtl tune study=comet_movielens gate=comet,topk n_trials=50``.

Words that ``conf/tune.yaml`` lists are options of the study, all others are options of every trial's run. The same
command, started again or on other machines, works on the same study. ``show=best`` prints the best trials, ``show=12``
trial 12. The studies are in ``conf/study/``; ``--config-dir FOLDER`` finds yours in ``FOLDER/study/``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import hydra
from omegaconf import OmegaConf

from mtl.checks import InputError
from mtl.cli.study import check_names, start
from mtl.config.compose import CONF, own_options, split_overrides
from mtl.jobs.process import prepare
from mtl.overrides import key_of
from mtl.tune.definition import read

OWN = [*own_options("tune.yaml", "fixed", "space", "values", "methods"), "sampler", "pruner", "study"]


def run(overrides: Sequence[str]) -> None:
    """Compose and check the study, then show it or work on it."""
    study, others = split_overrides(overrides, OWN)
    special = {key: override.partition("=")[2] for override in others if (key := key_of(override)) in ("gate", "show")}
    others = [override for override in others if key_of(override) not in special]
    if "study" not in map(key_of, study):
        check_names(others, OWN)
        names = ", ".join(sorted(path.stem for path in (CONF / "study").glob("*.yaml")))
        raise InputError(f"give a study, as in study=comet_movielens; there are {names}")
    cfg = hydra.compose("tune", study, return_hydra_config=True)
    name = cfg.hydra.runtime.choices.study
    cfg = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    gates = [gate for gate in special.get("gate", "").split(",") if gate]
    check_names(read(cfg, name, gates, others)[0].overrides, OWN)
    if "show" not in special:
        prepare()
    from mtl.tune.command import tune  # imports slow packages, as runs do

    tune(cfg, name, gates, others, special.get("show"))


main = partial(start, "tune.yaml", __doc__ or "", run)
