"""How a trial runs as a process: a program that stands for train.py ends in all ways that a run can end.

Then the parts of a study: its space, its file, and the pipe between a worker and a run.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from filelock import FileLock
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from mtl.checks import InputError
from mtl.config.compose import split_overrides
from mtl.files.records import LOCK
from mtl.runs.trial import TrialEnd
from mtl.tune import definition, space
from mtl.tune.launch import Launcher, run_folder
from mtl.tune.queue import STALE, Outcome, Queue
from mtl.tune.storage import open_storage
from mtl.tune.work import work
from tests.conftest import ROOT
from tests.programs import run_file
from tests.unit.test_tune_queue import SIMPLE, old, states

# It notes its words, reports two epochs, and then does what is under test
PROGRAM = """
import json, os, pathlib, signal, sys
words = dict(word.split("=", 1) for word in sys.argv[2:])
given = words.get("hydra.run.dir") or words["ckpt"].replace("/checkpoints/last.ckpt", "")
folder = pathlib.Path(given.strip("'"))
with (folder.parent / "words.txt").open("a") as file:
    file.write(json.dumps(words) + "\\n")
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
again = "ckpt" in words
for epoch in (0, 1):
    if trial.report(epoch, 1.0 - epoch / 2):
        break
def results(value):
    (folder / "results.json").write_text(json.dumps({"best": value, "numbers": {}}))
"""


def study(tmp_path: Path, rest: str, **options: object) -> tuple[Queue, Launcher]:
    """Return a study of one trial, whose program ends with the code ``rest``."""
    (tmp_path / "program.py").write_text(PROGRAM + rest)
    definition = replace(SIMPLE, overrides=["data=x", "data.data_dir=mine", f"paths.output_dir={tmp_path}"], **options)
    storage = open_storage(f"journal:{tmp_path}/log", Path())
    queue = Queue(definition, storage, "val/loss", n_trials=1, heartbeat=0.3, retries=2)
    return queue, Launcher(tmp_path / "runs", partial(run_file, tmp_path / "program.py"))


def words_of(tmp_path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (tmp_path / "runs" / "g" / "words.txt").read_text().splitlines()]


def run(queue: Queue, launch: Launcher) -> list[str]:
    said: list[str] = []
    work([queue], launch, None, said.append)
    return said


def test_a_trial_is_a_run_with_its_own_folder_and_seed(tmp_path: Path) -> None:
    queue, launch = study(tmp_path, "results(0.5)")
    run(queue, launch)
    [trial] = queue.study.trials
    assert (trial.state.name, trial.value, trial.intermediate_values) == ("COMPLETE", 0.5, {0: 1.0, 1: 0.5})
    folder = tmp_path / "runs" / "g" / "trial_00000"
    assert trial.user_attrs["folder"] == str(folder)
    [words] = words_of(tmp_path)
    assert words["seed"] == str(trial.user_attrs["seed"]) == str(queue.training_seed(0))
    assert words["hydra.run.dir"] == str(folder)
    assert float(words["optimizer.lr"]) == trial.params["optimizer.lr"]
    assert trial.user_attrs["command"] == [f"{key}={value}" for key, value in words.items() if key != "hydra.run.dir"]


@pytest.mark.parametrize(
    ("rest", "goes_on", "value"),
    [
        ("SAVE\nif not again: KILL\nresults(0.25)", [False, True], 0.25),  # from its checkpoint
        # After its training it begins anew: from its last checkpoint it might train further, an early stop being over
        ("SAVE\nif begun == 1:\n    trial.fitted()\n    KILL\nresults(0.5)", [False, False], 0.5),
        ("results(0.125)\nKILL", [False], 0.125),  # which it does not repeat
    ],
)
def test_a_killed_run_goes_on(rest: str, goes_on: list[bool], value: float, tmp_path: Path) -> None:
    last = tmp_path / "runs" / "g" / "trial_00000" / "checkpoints" / "last.ckpt"
    short = {"SAVE": "begun = len(list(open(folder.parent / 'words.txt')))\n(folder / 'checkpoints/last.ckpt').touch()"}
    for name, code in (short | {"KILL": "os.kill(os.getpid(), signal.SIGKILL)"}).items():
        rest = rest.replace(name, code)
    queue, launch = study(tmp_path, rest)
    run(queue, launch)
    [trial], told = queue.study.trials, words_of(tmp_path)
    assert ["hydra.run.dir" not in words for words in told] == goes_on
    local = {"data.data_dir": "mine", "paths.output_dir": str(tmp_path)}  # what no checkpoint may decide
    assert all(words == {"ckpt": str(last), **local} for words in told if "ckpt" in words)
    assert (trial.state.name, trial.value, trial.user_attrs["starts"]) == ("COMPLETE", value, 2)


@pytest.mark.parametrize(
    ("rest", "error"),
    [
        ("sys.exit('error: out of memory (16 GiB)')", "out of memory (16 GiB)"),
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("results(None)", "no finite val/loss was measured"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "its process or worker was killed 3 times"),
    ],
)
def test_a_run_that_fails_says_why(rest: str, error: str, tmp_path: Path) -> None:
    queue, launch = study(tmp_path, rest)
    run(queue, launch)
    assert states(queue) == ["FAIL"]
    assert queue.study.trials[0].user_attrs["error"] == error


def test_a_pruned_run_stops_after_the_epoch(tmp_path: Path) -> None:
    pruner = {"_target_": "optuna.pruners.ThresholdPruner", "upper": 0.75}
    queue, launch = study(tmp_path, "results(1.0)", pruner=pruner)
    said = run(queue, launch)
    assert said[-1].startswith("s/g trial 0: pruned")
    assert (states(queue), queue.study.trials[0].intermediate_values) == (["PRUNED"], {0: 1.0})


def test_a_script_is_not_run_again_by_the_runs_that_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may call ``mtl.share`` without the guard that Python's multiprocessing asks for."""
    (tmp_path / "script.py").write_text("raise AssertionError")
    script = ModuleType("__main__")
    script.__file__ = str(tmp_path / "script.py")
    monkeypatch.setitem(sys.modules, "__main__", script)
    queue, launch = study(tmp_path, "results(0.5)")
    run(queue, launch)
    assert (states(queue), sys.modules["__main__"]) == (["COMPLETE"], script)


@pytest.mark.slow
def test_a_run_whose_server_was_killed_counts(tmp_path: Path) -> None:
    """Its exit status is lost, so its results are looked for."""
    queue, launch = study(tmp_path, "os.kill(os.getppid(), signal.SIGKILL)\nresults(0.5)")
    run(queue, launch)
    assert (states(queue), len(words_of(tmp_path))) == (["COMPLETE"], 1)


def test_a_worker_that_waits_for_the_run_folder_keeps_its_trial(tmp_path: Path) -> None:
    """The process of a worker that is gone may need minutes to save its state: far longer than a lease lives."""
    (other, _), (queue, launch) = (study(tmp_path, "results(0.5)") for _ in range(2))
    queue.heartbeat = other.heartbeat = 0.5  # a slow machine must not lose the lease by accident
    folder = run_folder(tmp_path / "runs", "g", 0)
    folder.mkdir(parents=True)
    trial = queue.take()
    assert trial is not None
    with ThreadPoolExecutor() as pool:
        with FileLock(folder / LOCK):
            waiting = pool.submit(launch, queue, trial)
            time.sleep(STALE * queue.heartbeat + 1)
            assert other.take() is None
        assert waiting.result(30) == Outcome(value=0.5)
    old(queue, 0)
    assert other.take() is not None
    assert launch(queue, trial) is None  # it is the other worker's


@pytest.mark.parametrize("value", [5e-5, 1e-16, 0.1, 3, True, None, [50, 50], [[32], 8], "auto", {"a": 0.5, "b": [1]}])
def test_a_word_gives_the_value_back_exactly(value: Any) -> None:
    [word] = space.write_overrides({"gate.x": value})
    assert OverridesParser.create().parse_override(word).value() == value


def test_lists_are_choices_as_words() -> None:
    found = space.distributions({"units": [[32], [50, 50]], "k": [1, 2], "epochs": {"low": 1, "high": 10}})
    assert found["units"].choices == ("[32]", "[50,50]")  # type: ignore[attr-defined]  # Optuna stores no lists
    assert space.write_overrides({"units": "[50,50]"}) == ["units=[50,50]"]
    assert (found["epochs"].low, found["epochs"].high) == (1, 10)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ([], "gate.k=\\[\\]: must be a list of values, or"),
        (3, "gate.k=3: must be a list of values, or"),
        ({"low": 1}, "must be a list of values, or"),
        ({"low": 0.0, "high": 1.0, "log": True}, "gate.k=.*low"),
        ({"low": 1, "high": 2, "base": 2}, "unexpected keyword argument 'base'"),
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
    methods = {"topk": {}, "topk+": {"fixed": ["gate=topk", "permutation=sinkhorn"], "space": {"gate.k": [1]}}}
    return OmegaConf.create(options | own | {"methods": methods} | changes)


def test_runs_of_a_study_cannot_share_a_folder() -> None:
    with pytest.raises(InputError, match=r"paths.run_dir=x: each run has a folder of its own"):
        split_overrides(["n_trials=2", "paths.run_dir=x"], ["n_trials"])


def test_each_method_has_its_own_options_and_the_command_line_replaces_them() -> None:
    one, two = definition.read(config(), "s", [], ["recipe.k=3", "data.rows=[1]"])
    assert (one.name, two.name, two.label) == ("s/topk", "s/topk+", "topk+")
    assert one.overrides == ["data=x", "recipe.k=3", "gate=topk", "data.rows=[1]"]
    assert two.overrides == ["data=x", "recipe.k=3", "gate=topk", "permutation=sinkhorn", "data.rows=[1]"]
    assert (one.space, two.space) == ({"optimizer.lr": [1, 2]}, {"optimizer.lr": [1, 2], "gate.k": [1]})
    [only] = definition.read(config(name="mine"), "s", ["topk+"], [])
    assert only.name == "mine/topk+"
    [plain] = definition.read(config(methods={}), "s", ["comet"], [])
    assert (plain.name, plain.label, plain.overrides[-1]) == ("s", "", "gate=comet")


@pytest.mark.parametrize(
    ("changes", "methods", "words", "message"),
    [
        ({}, ["comet"], [], "gate=comet: study s has the methods topk, topk+"),
        ({"heartbeat": 0}, [], [], "heartbeat=0"),
        ({"name": "a/b"}, [], [], "name=a/b"),
        ({}, [], ["optimizer.lr=1"], "optimizer.lr=1: study s searches this option"),
        ({"methods": {}}, ["a", "b"], [], "gate=a,b: study s has no section methods"),
    ],
)
def test_a_wrong_option_is_one_message(changes: Any, methods: Any, words: Any, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("+", r"\+")):
        definition.read(config(**changes), "s", methods, words)


def test_a_run_is_stopped_when_the_worker_dies() -> None:
    ours, theirs = Pipe()
    stopped = threading.Event()
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())
    try:
        run = TrialEnd(theirs)
        assert not stopped.wait(0.05)
        ours.close()
        assert stopped.wait(5)
        assert not run.report(2, 0.125)
    finally:
        signal.signal(signal.SIGTERM, earlier)


def test_results_of_an_earlier_mtl_are_refused(tmp_path: Path) -> None:
    queue, launch = study(tmp_path, "results(0.5)")
    folder = tmp_path / "runs" / "g" / "trial_00000"
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps({"best_val_loss": 0.5, "test": {"loss": 1.0}}))
    with pytest.raises(InputError, match=r"trial_00000/results\.json is of an earlier mtl; train the run again, or"):
        run(queue, launch)
