"""What Hydra could not compose is said in one sentence, with the nearest option or choice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import SearchPathException

from mtl.cli import resolvers
from mtl.cli.explain import explain
from tests.conftest import ROOT

resolvers.register()


@pytest.fixture
def hydra() -> Iterator[None]:
    """Have Hydra ready to compose, as it is while the program runs."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield


def failure(*words: str) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        compose("train", list(words))
    return caught.value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gate.gama=1"], "gate.gama=1: no such option; did you mean gate.gamma=1?"),
        (["gate=topk", "gate.nosy=true"], "did you mean gate.noisy=true?"),
        (["gate=commet"], "gate=commet: there is no gate commet; did you mean gate=comet?"),
        (["data=nothing"], "data=nothing: there is no data nothing; there are books"),
        (["gates=comet"], "did you mean gate=comet?"),
        (["batch_size=64"], "did you mean data.batch_size=64?"),
        (["network.experts.unit=[4]"], "did you mean network.experts.units=[4]?"),
        (["+gate.gamma=1"], "the configuration has gate.gamma already; write gate.gamma=1"),
        (["~gate.gama"], "there is no gate.gama to remove; did you mean ~gate.gamma?"),
        (["gate=comet,topk"], "several values need -m"),
        (["seed=1,2"], "seed=1,2: several values need -m"),
        (["gate"], "gate: must be OPTION=VALUE"),
        (["data.path=a=b{"], "the value cannot be read"),
        (["recipe.expert_units=[4"], "the value cannot be read"),
        (["a b=3"], "must be the name of an option"),
        (["network=single_task", "network/gate_trunk=conv"], "has no network/gate_trunk"),
        (["nothing/gate=comet"], "there is no group nothing/gate"),
        (["gate=comet", "gate.k.a=1"], "gate.k.a"),
        (["hydra/launcher=nothing"], "there is no hydra/launcher nothing"),
        (["recipe.k=${a.b"], "the value cannot be read"),
        (["recipe.k='${a.b'"], "close every brace"),
        (["gate=5"], "gate=5: must name one of comet"),
        (
            ["logger=true"],
            "logger=true: must name one of csv, mlflow, none, tensorboard, wandb; several are logger=[csv,tensorboard]",
        ),
        (["gate=null"], "gate=null: must name one of comet"),
        (["gate@network.gate=comet"], "without @"),
        (["+gate=topk"], "write gate=topk to replace it"),
        (["hydra.searchpath=5"], "hydra.searchpath"),
        (["gate=a,b", "gate=${x}"], "several values"),
        (["=3"], "must be the name of an option"),
        ([""], "an empty word: must be OPTION=VALUE"),
        (["gate="], "there is no gate without a name"),
        (["ünknown=3"], "ünknown=3: "),
        (["network/gate=comet"], "there is no group network/gate"),
        (["seed=" + "9" * 5000], "9..."),
    ],
)
@pytest.mark.usefixtures("hydra")
def test_compositions_that_fail_get_one_sentence(words: list[str], message: str) -> None:
    sentence = explain(failure(*words), words)
    assert sentence is not None
    assert message in sentence
    assert len(sentence.splitlines()) == 1


def test_explaining_needs_no_running_program() -> None:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        error = failure("gate.gama=1")
    GlobalHydra.instance().clear()
    assert "did you mean gate.gamma=1?" in str(explain(error, ["gate.gama=1"]))
    assert not GlobalHydra.instance().is_initialized()


def test_a_folder_of_files_that_does_not_exist_is_named() -> None:
    error = SearchPathException("Additional config directory '/no/conf' not found")
    assert explain(error, []) == "--config-dir /no/conf: there is no such folder"


def test_errors_of_other_kinds_are_not_explained() -> None:
    assert explain(ValueError("no"), ["gate=comet"]) is None
    assert explain(KeyboardInterrupt(), []) is None
