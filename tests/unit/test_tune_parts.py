"""The parts of a study: its space, its file, and the line between a worker and a run."""

from __future__ import annotations

import json
import signal
import socket
import threading
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from mtl.checks import InputError
from mtl.runs import channel
from mtl.tune import definition, space
from tests.conftest import ROOT


@pytest.mark.parametrize("value", [5e-5, 1e-16, 0.1, 3, True, None, [50, 50], [[32], 8], "auto", {"a": 0.5, "b": [1]}])
def test_a_word_gives_the_value_back_exactly(value: Any) -> None:
    [word] = space.words({"gate.x": value})
    assert OverridesParser.create().parse_override(word).value() == value


def test_lists_are_choices_as_words() -> None:
    found = space.distributions({"units": [[32], [50, 50]], "k": [1, 2], "epochs": {"low": 1, "high": 10}})
    assert found["units"].choices == ("[32]", "[50,50]")  # type: ignore[attr-defined]  # Optuna stores no lists
    assert space.words({"units": "[50,50]"}) == ["units=[50,50]"]
    assert (found["epochs"].low, found["epochs"].high) == (1, 10)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ([], "gate.k=\\[\\]: must have at least one value"),
        (3, "gate.k=3: must be a list of values, or"),
        ({"low": 1}, "must be a list of values, or"),
        ({"low": 0.0, "high": 1.0, "log": True}, "gate.k=.*low"),
        ({"low": 1, "high": 2, "base": 2}, "base is not known"),
    ],
)
def test_a_wrong_space_is_one_message(described: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        space.distributions({"gate.k": described})


def config(**changes: Any) -> Any:
    options = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "tune.yaml"))
    assert isinstance(options, dict)
    del options["defaults"]
    own = {"fixed": ["data=x", "recipe.k=2"], "space": {"optimizer.lr": [1, 2]}, "sampler": {}, "pruner": {}}
    gates = {"topk": {}, "topk+": {"fixed": ["gate=topk", "permutation=sinkhorn"], "space": {"gate.k": [1]}}}
    return OmegaConf.create(options | own | {"gates": gates} | changes)


def test_each_gate_has_its_own_options_and_the_command_line_replaces_them() -> None:
    one, two = definition.read(config(), "s", [], ["recipe.k=3", "data.rows=[1]"])
    assert (one.name, two.name, two.label) == ("s/topk", "s/topk+", "topk+")
    assert one.words == ["data=x", "recipe.k=3", "gate=topk", "data.rows=[1]"]
    assert two.words == ["data=x", "recipe.k=3", "gate=topk", "permutation=sinkhorn", "data.rows=[1]"]
    assert (one.space, two.space) == ({"optimizer.lr": [1, 2]}, {"optimizer.lr": [1, 2], "gate.k": [1]})
    [only] = definition.read(config(name="mine"), "s", ["topk+"], [])
    assert only.name == "mine/topk+"
    [plain] = definition.read(config(gates={}), "s", ["comet"], [])
    assert (plain.name, plain.label, plain.words[-1]) == ("s", "", "gate=comet")


@pytest.mark.parametrize(
    ("changes", "gates", "words", "message"),
    [
        ({}, ["comet"], [], "gate=comet: study s has the gates topk, topk+"),
        ({"n_trials": 0}, [], [], "n_trials=0"),
        ({"heartbeat": 0}, [], [], "heartbeat=0"),
        ({"name": "a/b"}, [], [], "name=a/b"),
        ({}, [], ["optimizer.lr=1"], "optimizer.lr=1: study s searches this option"),
        ({"gates": {}}, ["a", "b"], [], "gate=a,b: study s has no section gates"),
    ],
)
def test_a_wrong_option_is_one_message(changes: Any, gates: Any, words: Any, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("+", r"\+")):
        definition.read(config(**changes), "s", gates, words)


def test_a_run_asks_whether_to_go_on_and_is_stopped_when_the_worker_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setenv(channel.VARIABLE, str(theirs.detach()))
    stopped = threading.Event()
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())
    try:
        run, asked = channel.RunEnd(), []
        with ours, ours.makefile("rw") as line:

            def answer() -> None:
                for reply in ("go\n", "stop\n"):
                    asked.append(json.loads(line.readline()))
                    line.write(reply)
                    line.flush()

            worker = threading.Thread(target=answer)
            worker.start()
            assert [run.report(0, 0.5), run.report(1, 0.25)] == [False, True]
            worker.join()
            assert asked == [{"epoch": 0, "value": 0.5}, {"epoch": 1, "value": 0.25}]
            assert not stopped.is_set()
        assert stopped.wait(5)
        assert not run.report(2, 0.125)
    finally:
        signal.signal(signal.SIGTERM, earlier)
