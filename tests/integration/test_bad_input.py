"""Bad input gets one message before any work is done: the cases that once did not, and random ones.

``pytest -m slow tests/integration/test_bad_input.py`` tries all of them; the ordinary run tries a sample.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from mtl.checks import InputError
from mtl.config.check import check
from tests.integration.helpers import composed
from tests.programs import attempt, generated

CHOICES = (["gate=dselect_k"], ["gate=topk", "permutation=sinkhorn"], ["schedule=temperature"])
KNOWN = [  # that values of single options do not cover: tests/unit/test_options.py has those
    *("trainer=nothing", "trainer=null", "trainer=5", "callbacks.best.monitor=nothing", "callbacks.best.mode=middle"),
    *("callbacks.early_stopping.monitor=nothing", "callbacks.last.every_n_minutes=abc", "gate=null", "gate=commet"),
    *("gate=topk gate.k=99", "network=null", "compile=true", "ckpt=5", "ckpt=", "ckpt=nowhere.ckpt", "ckpt=."),
    *("evaluate=nowhere.ckpt", "evaluate=5", "ckpt=a evaluate=b", "optimizer=null", "hydra.run.dir=/proc/nothing"),
    *("hydra.run.dir=/dev/null", "paths.output_dir=/dev/null", "nothing=1", "+nothing=1", "x", "=", "a b"),
    *("optimizer._target_=torch.optim.Nothing", "gate._target_=nothing.At.All", "+gate.more=1", "data=null"),
    *("data._target_=null", "data.nothing=1", "++data.nothing=1", "recipe=5", "callbacks=null", "logger=5"),
    *("experiment=nothing", "run_name=${nothing}", "recipe.k=${recipe.k}", "schedule=temperature", "gate=comet,topk"),
    *("'unbalanced", "data.rows=[1", "gate.k={a", "~nothing", "trainer.strategy=nothing", "+trainer.nothing=1"),
    *("data=table data.path=nowhere.csv", "data=table data.path=/dev/null 'data.tasks.a={kind: binary}'"),
    *("data=table data.path=.", "data=table 'data.tasks.a={kind: binary}'", "data=table data.tasks=5 data.path=x.csv"),
    *("data=movielens data.download=false", "data=celeba data.attributes=[Nothing] data.download=false"),
    *("data=omniglot data.alphabets=[]", "data=digits data.download=false paths.data_dir=/dev/null"),
]


def answered(cases: list[list[str]], folder: Path) -> None:
    """Try ``cases`` and fail with a list of those that did not get exactly one message."""
    problems = []
    for number, words in enumerate(cases):
        large = any(word.startswith(("data=", "data._target_", "data.rows", "recipe.")) for word in words)
        outcome = attempt(words, folder / str(number), small=not large)
        if outcome.problem:
            problems.append(f"{outcome.problem}: {' '.join(words)}\n{outcome.output[-600:]}")
        if (folder / str(number) / "outputs").exists() and list((folder / str(number)).rglob("*.ckpt")):
            problems.append(f"trained before it noticed: {' '.join(words)}")
    assert not problems, f"{len(problems)} of {len(cases)}\n" + "\n".join(problems)


def known() -> list[list[str]]:
    return [["".join(word) for word in re.findall(r"'([^']+)'|(\S+)", case)] for case in KNOWN]


def random_ones() -> list[list[str]]:
    cases = []
    for seed, words in enumerate(CHOICES):
        cases += [[*words, *case] for case in generated(composed(words), 80, seed)]
    return cases


def found_at_once(words: list[str]) -> bool:
    """Return whether the check of the configuration, which comes first, answers the last of ``words``."""
    cfg, (key, _, _) = composed(words[:-1]), words[-1].partition("=")
    cfg.run_name, cfg.paths.run_dir = "test", "."
    OmegaConf.update(cfg, key, OverridesParser.create().parse_override(words[-1]).value(), merge=False)
    try:
        check(cfg)
    except InputError as error:
        message = str(error)
    else:
        return False
    assert key.rpartition(".")[2] in message, words
    return True


def test_good_input_is_accepted(tmp_path: Path) -> None:
    outcome = attempt([], tmp_path)
    assert outcome.problem == "accepted", outcome.output


def test_a_list_of_seeds_gets_one_message(tmp_path: Path) -> None:
    answered([["seed=[1,2]"], ["seed={a: 1}"], ["ckpt=" + "a" * 5000, "data.batch_size=3"]], tmp_path)


def test_sample_of_bad_input_gets_one_message(tmp_path: Path) -> None:
    """Every twelfth of the cases that once failed, and of the random ones those that are found late, by option."""
    sample = random_ones()[::3]
    late = {words[-1].partition("=")[0]: words for words in sample if not found_at_once(words)}
    assert len(late) < len(sample) / 4
    answered([*known()[::6], *late.values()], tmp_path)


@pytest.mark.slow
def test_all_bad_input_gets_one_message(tmp_path: Path) -> None:
    cases = [*known(), *random_ones()]
    assert len(cases) >= 280
    answered(cases, tmp_path)
