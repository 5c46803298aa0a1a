"""How a job runs as a process: a program that stands for train.py ends in all ways that a run can end.

Then lists of repeats, the parts of a study: its space and its file, and the pipe between a worker and a run.
"""

from __future__ import annotations

import json
import os
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
from mtl.files.run_files import LOCK
from mtl.jobs.job import Do, Job, JobResult, Prune, do
from mtl.jobs.process import SERVER
from mtl.jobs.setting import Setting
from mtl.jobs.work import JobList, work
from mtl.runs.trial import TrialEnd
from mtl.tune import definition, space
from mtl.tune.search import Search
from mtl.tune.storage import open_storage
from tests.conftest import ROOT
from tests.programs import run_file
from tests.unit.test_tune_search import SIMPLE, run, states

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


def study(tmp_path: Path, rest: str, **options: Any) -> tuple[Search, Do]:
    """Return a study of one trial, and what does it by a program that ends with the code ``rest``."""
    definition = replace(SIMPLE, overrides=["data=x", "data.data_dir=mine", f"paths.output_dir={tmp_path}"], **options)
    storage = open_storage(f"journal:{tmp_path}/log", Path())
    common: Any = {"folder": tmp_path / "runs", "monitor": "val/loss", "count": 1, "retries": 2, "seed": 0}
    search = Search(setting=definition, storage=storage, **common)
    return search, program(tmp_path, rest)


def program(tmp_path: Path, rest: str) -> Do:
    (tmp_path / "program.py").write_text(PROGRAM + rest)
    return partial(do, program=partial(run_file, tmp_path / "program.py"))


def words_of(tmp_path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (tmp_path / "runs" / "g" / "words.txt").read_text().splitlines()]


def trial_of(search: Search) -> Any:
    [trial] = search.study.trials
    return trial


def test_a_trial_is_a_run_with_its_own_folder_and_seed(tmp_path: Path) -> None:
    search, do_job = study(tmp_path, "results(0.5)")
    run(search, do=do_job)
    trial = trial_of(search)
    assert (trial.state.name, trial.value, trial.intermediate_values) == ("COMPLETE", 0.5, {0: 1.0, 1: 0.5})
    folder = tmp_path / "runs" / "g" / "trial_00000"
    assert trial.user_attrs["folder"] == str(folder)
    [words] = words_of(tmp_path)
    assert words["seed"] == str(trial.user_attrs["seed"])
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
    search, do_job = study(tmp_path, rest)
    run(search, do=do_job)
    trial, told = trial_of(search), words_of(tmp_path)
    assert ["hydra.run.dir" not in words for words in told] == goes_on
    local = {"data.data_dir": "mine", "paths.output_dir": str(tmp_path)}  # what no checkpoint may decide
    assert all(words == {"ckpt": str(last), **local} for words in told if "ckpt" in words)
    assert (trial.state.name, trial.value, search.job(0).record()["starts"]) == ("COMPLETE", value, 2)


def test_ctrl_c_stops_the_run_and_the_same_command_goes_on(tmp_path: Path) -> None:
    waits = "if not again:\n    trial.report(2, 0.125)\n    signal.pause()\n"
    search, do_job = study(tmp_path, f"(folder / 'checkpoints/last.ckpt').touch()\n{waits}results(0.25)")

    def interrupted(job: Job, prune: Prune) -> JobResult | None:
        def asked(epoch: int, value: float) -> bool:
            if epoch == 2:
                raise KeyboardInterrupt
            return prune(epoch, value)

        return do_job(job, asked)

    with pytest.raises(KeyboardInterrupt):
        run(search, do=interrupted)
    run(search, do=do_job)
    assert ["ckpt" in words for words in words_of(tmp_path)] == [False, True]
    assert (trial_of(search).value, search.job(0).record()["starts"]) == (0.25, 1)  # the stopped start does not count


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
    search, do_job = study(tmp_path, rest)
    run(search, do=do_job)
    assert states(search) == ["FAIL"]
    assert trial_of(search).user_attrs["error"] == error


def test_a_pruned_run_stops_after_the_epoch(tmp_path: Path) -> None:
    pruner = {"_target_": "optuna.pruners.ThresholdPruner", "upper": 0.75}
    search, do_job = study(tmp_path, "results(1.0)", pruner=pruner)
    said = run(search, do=do_job)
    assert said[-1].startswith("s/g trial 0: pruned")
    assert (states(search), trial_of(search).intermediate_values) == (["PRUNED"], {0: 1.0})


def test_a_script_is_not_run_again_by_the_runs_that_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may call ``mtl.share`` without the guard that Python's multiprocessing asks for."""
    (tmp_path / "script.py").write_text("raise AssertionError")
    script = ModuleType("__main__")
    script.__file__ = str(tmp_path / "script.py")
    monkeypatch.setitem(sys.modules, "__main__", script)
    search, do_job = study(tmp_path, "results(0.5)")
    run(search, do=do_job)
    assert (states(search), sys.modules["__main__"]) == (["COMPLETE"], script)


@pytest.mark.slow
def test_a_run_whose_server_was_killed_counts(tmp_path: Path) -> None:
    """Its exit status is lost, so its results are looked for."""
    search, do_job = study(tmp_path, "os.kill(os.getppid(), signal.SIGKILL)\nresults(0.5)")
    run(search, do=do_job)
    assert (states(search), len(words_of(tmp_path))) == (["COMPLETE"], 1)


def test_a_run_that_outlives_its_worker_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may need minutes to complete its step and to save; meanwhile nobody else gets the job."""
    (other, _), (search, do_job) = (study(tmp_path, "results(0.5)") for _ in range(2))
    job = search.take()
    assert job is not None
    with ThreadPoolExecutor() as pool:
        with FileLock(job.folder / LOCK):
            waiting = pool.submit(do_job, job, lambda epoch, value: False)
            time.sleep(0.5)
            assert not waiting.done()
            assert other.take() is None
        assert replace(waiting.result(60), seconds=0.0) == JobResult(0.5)
    assert len(words_of(tmp_path)) == 1
    assert "s/g trial 0: waiting for the process of an earlier worker" in capsys.readouterr().out


def repeats(
    tmp_path: Path, overrides: list[str] | None = None, seeds: range = range(5, 8), label: str = "g"
) -> JobList:
    common: Any = {"folder": tmp_path / "runs", "monitor": "val/loss", "count": len(seeds), "retries": 1}
    return JobList(setting=Setting(f"s/{label}", label, overrides or ["data=x"]), seed=seeds.start, **common)


def writes(job: Job, prune: Prune) -> JobResult | None:
    """Write the results of a run at once."""
    seed = next(int(override.partition("=")[2]) for override in job.overrides if override.startswith("seed="))
    (job.folder / "results.json").write_text(json.dumps({"best": float(seed), "numbers": {}}))
    return job.result()


def test_repeats_have_the_next_seeds_and_are_done_once(tmp_path: Path) -> None:
    said = run(repeats(tmp_path), repeats(tmp_path, label="h"), do=writes)
    begun = [line for line in said if ":" not in line]
    assert begun == [f"s/{name} trial {number}" for number in range(3) for name in ("g", "h")]  # in turn
    assert said[-1].endswith("; 3 of 3 done, best 5 (trial 0)")
    assert run(repeats(tmp_path), do=writes) == []
    assert len(run(repeats(tmp_path, seeds=range(5, 10)), do=writes)) == 4  # two lines for each of two more
    assert [result.value for result in repeats(tmp_path).ended().values()] == [5.0, 6.0, 7.0]


def test_repeats_with_other_options_are_refused(tmp_path: Path) -> None:
    run(repeats(tmp_path), do=writes)
    assert run(repeats(tmp_path, ["data=x", "paths.data_dir=elsewhere"]), do=writes) == []
    for changed, message in (
        (repeats(tmp_path, ["data=y"]), "data was data=x, is data=y"),
        (repeats(tmp_path, seeds=range(6, 8)), "seed was seed=5, is seed=6"),
    ):
        with pytest.raises(InputError, match=f"s/g trial 0 exists with other options: {message}"):
            run(changed, do=writes)


def test_a_repeat_that_failed_counts_and_is_tried_again_by_the_next_command(tmp_path: Path) -> None:
    failed = [JobResult(error="no memory"), None, None, JobResult(error="no disk")]
    source, results = repeats(tmp_path), iter(failed)
    said = run(source, do=lambda job, prune: next(results))
    assert [result.error for result in source.ended().values()] == [
        *("no memory", "its process or worker was killed 2 times", "no disk"),
    ]
    assert [line.partition(": ")[2].partition(" (")[0] for line in said if "failed" in line] == [
        *("failed: no memory", "failed: its process or worker was killed 2 times", "failed: no disk"),
    ]
    assert run(source, do=writes) == []
    again = repeats(tmp_path)
    assert again.ended() == {}
    run(again, do=writes)
    assert [result.value for result in again.ended().values()] == [5.0, 6.0, 7.0]


def test_workers_at_once_train_no_repeat_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtl.jobs.work.POLL", 0.02)
    trained = []

    def do_job(job: Job, prune: Prune) -> JobResult | None:
        trained.append(job.number)
        time.sleep(0.01)
        return writes(job, prune)

    with ThreadPoolExecutor() as pool:
        workers = [pool.submit(work, [repeats(tmp_path, seeds=range(12))], None, 0, do_job) for _ in range(3)]
    assert [worker.result() for worker in workers] == [None] * 3
    assert sorted(trained) == list(range(12))


def hold(tmp_path: Path) -> None:
    """Take a run, save a checkpoint, and work on it for ever, in a process of its own."""
    job = repeats(tmp_path).take()
    assert job is not None
    (job.folder / "checkpoints").mkdir()
    (job.folder / "checkpoints" / "last.ckpt").touch()
    time.sleep(1000)


def test_a_killed_workers_repeat_goes_on_from_its_checkpoint_at_once(tmp_path: Path) -> None:
    worker = SERVER.Process(target=hold, args=(tmp_path,), daemon=True)
    worker.start()
    last = tmp_path / "runs" / "g" / "trial_00000" / "checkpoints" / "last.ckpt"
    while not last.exists():
        assert worker.is_alive()
        time.sleep(0.02)
    source = repeats(tmp_path, seeds=range(5, 6))
    assert source.take() is None
    assert f"process {worker.pid} on " in next(source.held())
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    run(source, do=program(tmp_path, "results(0.25)"))
    assert words_of(tmp_path) == [{"ckpt": str(last)}]
    assert (source.ended()[0].value, source.job(0).record()["starts"]) == (0.25, 2)


@pytest.mark.parametrize("value", [5e-5, 1e-16, 0.1, 3, True, None, [50, 50], [[32], 8], "auto", {"a": 0.5, "b": [1]}])
def test_a_word_gives_the_value_back_exactly(value: Any) -> None:
    [word] = space.write_overrides({"gate.x": value})
    assert OverridesParser.create().parse_override(word).value() == value


def test_lists_are_choices_as_words() -> None:
    found = space.distributions({"units": [[32], [50, 50]], "k": [1, 2], "epochs": {"low": 1, "high": 10}})
    assert found["units"].choices == ("[32]", "[50,50]")  # type: ignore[attr-defined]  # Optuna stores no lists
    assert space.write_overrides({"units": "[50,50]"}) == ["units=[50,50]"]
    assert (found["epochs"].low, found["epochs"].high) == (1, 10)  # type: ignore[attr-defined]  # an IntDistribution


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
        ({"retries": -1}, [], [], "retries=-1"),
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
    search, do_job = study(tmp_path, "results(0.5)")
    folder = tmp_path / "runs" / "g" / "trial_00000"
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps({"best_val_loss": 0.5, "test": {"loss": 1.0}}))
    with pytest.raises(InputError, match=r"trial_00000/results\.json is of an earlier mtl; train the run again, or"):
        run(search, do=do_job)
