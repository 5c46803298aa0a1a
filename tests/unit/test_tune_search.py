"""Who runs which trial: workers that share a study, are killed, come back, and fail; an objective only computes."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import signal
import sqlite3
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from mtl.checks import InputError
from mtl.jobs.job import Job, JobResult, Prune
from mtl.jobs.work import JobList, work
from mtl.tune.definition import Definition
from mtl.tune.search import Search
from mtl.tune.storage import open_storage, opened
from mtl.tune.trials import read_study
from tests.programs import SERVER as PROCESSES

SPACE = {
    "optimizer.lr": {"low": 1e-4, "high": 1e-1, "log": True},
    "gate.k": [1, 2, 4],
    "data.rows": {"low": 1, "high": 9},
}
RANDOM = {"_target_": "optuna.samplers.RandomSampler", "_partial_": True}
NEVER = {"_target_": "optuna.pruners.NopPruner"}
SIMPLE = Definition("s/g", "g", ["data=x"], SPACE, RANDOM, NEVER, seed=0)


@pytest.fixture
def journal(tmp_path: Path) -> str:
    return f"journal:{tmp_path}/study.log"


@pytest.fixture(params=["sqlite", "journal"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/study.db" if request.param == "sqlite" else f"journal:{tmp_path}/study.log"


@pytest.fixture(autouse=True)
def polls_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtl.jobs.work.POLL", 0.05)


def worker(
    address: str, n_trials: int, definition: Definition = SIMPLE, folder: Path | None = None, retries: int = 2
) -> Search:
    """Return the trials as a worker of its own sees them, with its own connection; by default beside the storage."""
    folder = folder or Path(re.sub(r"^\w+:/*", "/", address)).parent
    common: Any = {
        "folder": folder,
        "monitor": "val/loss",
        "count": n_trials,
        "retries": retries,
        "seed": definition.seed,
    }
    return Search(setting=definition, storage=open_storage(address, Path()), **common)


def parameters(job: Job) -> dict[str, str]:
    return dict(override.split("=", 1) for override in job.overrides)


def objective(job: Job, prune: Prune) -> JobResult:
    drawn = parameters(job)
    return JobResult(abs(math.log10(float(drawn["optimizer.lr"])) + 2) + int(drawn["gate.k"]))


def one(job: Job, prune: Prune) -> JobResult:
    return JobResult(1.0)


def run(*sources: JobList, do: Any = objective, max_failures: int | None = None, later: int | None = 0) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        work(sources, max_failures, later, do)
    return said.getvalue().splitlines()


def states(search: Search) -> list[str]:
    return [trial.state.name for trial in search.study.trials]


@pytest.mark.parametrize(
    "forged",
    [
        "trial_user_attributes set value_json = 'no JSON'",
        "trial_params set distribution_json = '[]'",
        "study_directions set direction = 'X'",
    ],
)
def test_what_a_study_cannot_hold_is_one_message(forged: str, tmp_path: Path) -> None:
    run(worker(f"sqlite:///{tmp_path}/study.db", 1))
    with contextlib.closing(sqlite3.connect(tmp_path / "study.db")) as database, database:
        database.execute(f"update {forged}")
    for read in (lambda: worker(f"sqlite:///{tmp_path}/study.db", 1), lambda: read_study("s", None, tmp_path)):
        with pytest.raises(InputError, match=r"study s.*its storage is damaged"):
            read()


def test_a_damaged_journal_is_one_message(journal: str, tmp_path: Path) -> None:
    run(worker(journal, 1))
    path = tmp_path / "study.log"
    path.write_text(path.read_text().replace('"distribution":"', '"distribution":"x'))
    with pytest.raises(InputError, match=r"study\.log: JSONDecodeError: .*; the file is damaged"):
        worker(journal, 1)


def test_a_study_has_as_many_trials_as_asked_and_takes_more_later(journal: str) -> None:
    first = worker(journal, 3)
    run(first)
    assert states(first) == ["COMPLETE"] * 3
    values = [trial.value for trial in first.study.trials]
    assert run(worker(journal, 3)) == []  # nothing is repeated
    more = worker(journal, 5)
    assert len(run(more)) == 4  # two lines for each of two trials
    assert [trial.value for trial in more.study.trials][:3] == values
    assert states(more) == ["COMPLETE"] * 5


def test_the_time_left_is_that_of_all_runs_by_all_workers(journal: str) -> None:
    mine, other, taken = worker(journal, 4), worker(journal, 4), list[Job]()

    def do(job: Job, prune: Prune) -> JobResult:
        job.note(seconds=600.0)
        if job.number == 1:
            taken.extend(filter(None, [other.take()]))
        elif job.number == 3:
            taken[0].note(seconds=600.0)
            other.finish(taken[0], JobResult(1.0))
            taken[0].lock.release()
        return JobResult(error="no memory") if job.number == 0 else objective(job, prune)

    ends = [line.partition("; about ")[2] for line in run(mine, do=do, later=2) if " s)" in line]
    assert [job.number for job in taken] == [2]
    assert ends == ["", "20 minutes left (4 runs)", "20 minutes left (2 runs)"]
    assert "left" not in run(worker(journal, 5), do=do, later=None)[-1]  # what follows is not known


def test_random_search_depends_on_the_number_of_the_trial_alone(journal: str, tmp_path: Path) -> None:
    whole = worker(f"journal:{tmp_path}/whole/log", 4)
    run(whole)
    first, second = worker(journal, 4), worker(journal, 4)
    taken = [job for source in (first, second, second, first) if (job := source.take())]
    assert [job.number for job in taken] == [0, 1, 2, 3]
    assert [job.overrides for job in taken] == [trial.user_attrs["command"] for trial in whole.study.trials]
    assert first.take() is None
    assert len({tuple(trial.params.values()) for trial in whole.study.trials}) == 4
    other = worker(journal, 4, replace(SIMPLE, name="s/h", label="h"))
    others = [job for _ in range(4) if (job := other.take())]
    assert len({parameters(job)["seed"] for job in (*taken, *others)}) == 8


def test_tpe_by_one_worker_gives_the_same_trials_again_also_after_a_restart(tmp_path: Path) -> None:
    sampler = {"_target_": "optuna.samplers.TPESampler", "_partial_": True, "n_startup_trials": 3}
    tpe = replace(SIMPLE, sampler=sampler)
    whole = worker(f"journal:{tmp_path}/a.log", 8, tpe)
    run(whole)
    for n_trials in (5, 8):
        again = worker(f"journal:{tmp_path}/b.log", n_trials, tpe)
        run(again)
    assert [trial.params for trial in again.study.trials] == [trial.params for trial in whole.study.trials]
    plain = worker(f"journal:{tmp_path}/c.log", 8)
    run(plain)
    assert [t.params for t in plain.study.trials][3:] != [t.params for t in whole.study.trials][3:]


def hold(address: str, note: Path) -> None:
    """Take a trial, say so, and work on it for ever, in a process of its own."""
    job = worker(address, 2).take()
    assert job is not None
    note.write_text(str(list(job.overrides)))
    time.sleep(1000)


def test_the_trial_of_a_killed_worker_goes_on_at_once_as_the_same_trial(address: str, tmp_path: Path) -> None:
    note = tmp_path / "note"
    process = PROCESSES.Process(target=hold, args=(address, note), daemon=True)
    process.start()
    while not (note.exists() and note.read_text()):
        assert process.is_alive()
        time.sleep(0.02)
    alive = worker(address, 2)
    second = alive.take()
    assert second is not None
    assert second.number == 1
    assert alive.take() is None
    text = next(alive.held())
    assert re.fullmatch(rf"s/g trial 0 \(process {process.pid} on .+ has .*/g/trial_00000\.lock\)", text)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    again = alive.take()
    assert again is not None
    assert (again.number, str(list(again.overrides)), again.record()["starts"]) == (0, note.read_text(), 2)
    for job in (again, second):
        alive.finish(job, JobResult(1.0))
    assert len(alive.ended()) == 2
    assert states(alive) == ["COMPLETE"] * 2


def test_a_trial_whose_folder_is_on_another_disk_is_left_alone(address: str, tmp_path: Path) -> None:
    """Although its lock is free there: the machines share a storage, but no disk."""
    here, there = (worker(address, 2, folder=tmp_path / name) for name in ("here", "there"))
    jobs = [here.take(), there.take()]
    assert [job.number for job in jobs if job] == [0, 1]
    assert (here.take(), there.take()) == (None, None)
    for source, job in zip((here, there), jobs, strict=True):
        assert job is not None
        source.finish(job, JobResult(1.0))
    assert len(here.ended()) == 2
    assert len(here.trials()) == 2


@pytest.mark.parametrize(
    ("results", "ended", "errors"),  # by number of the trial; None: its process was killed
    [
        ([JobResult(1.0), JobResult(pruned=True)], ["COMPLETE", "PRUNED"], [None, None]),
        ([JobResult(error="no memory"), JobResult(1.0)], ["FAIL", "COMPLETE"], ["no memory", None]),
        ([None, JobResult(1.0)], ["FAIL", "COMPLETE"], ["its process or worker was killed 3 times", None]),
    ],
)
def test_how_trials_end(results: list[JobResult | None], ended: list[str], errors: list[Any], journal: str) -> None:
    starts = []

    def do(job: Job, prune: Prune) -> JobResult | None:
        starts.append(job.number)
        return results[job.number]

    search = worker(journal, 2)
    run(search, do=do)
    assert states(search) == ended
    assert [trial.user_attrs.get("error") for trial in search.study.trials] == errors
    assert starts == [0] * (3 if results[0] is None else 1) + [1]


def test_a_stopped_worker_gives_its_trial_back_at_once(journal: str) -> None:
    def stopped(job: Job, prune: Prune) -> JobResult:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(worker(journal, 1), do=stopped)
    search = worker(journal, 1)
    run(search, do=lambda job, prune: JobResult(job.record()["starts"]))
    assert [trial.value for trial in search.study.trials] == [1.0]  # the stopped one does not count


def test_failed_trials_in_a_row_end_the_worker(journal: str) -> None:
    def failing(job: Job, prune: Prune) -> JobResult:
        return JobResult(error="out of memory") if job.number % 3 else objective(job, prune)

    run(worker(journal, 4), do=failing, max_failures=3)
    search = worker(journal, 9)
    with pytest.raises(InputError, match="2 trials in a row failed, the last one with: out of memory"):
        run(search, do=failing, max_failures=2)
    assert states(search) == ["COMPLETE", "FAIL", "FAIL", "COMPLETE", "FAIL", "FAIL"]


def test_workers_at_once_neither_lose_nor_double_a_trial(address: str) -> None:
    ran, searches = [], [worker(address, 6) for _ in range(3)]

    def do(job: Job, prune: Prune) -> JobResult:
        ran.append(job.number)
        return objective(job, prune)

    threads = [threading.Thread(target=work, args=([search], None, 0, do)) for search in searches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ran) == list(range(6))
    assert states(searches[0])[:6] == ["COMPLETE"] * 6
    assert all(trial.state == TrialState.WAITING for trial in searches[0].study.trials[6:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"space": SPACE | {"gate.k": [1, 2]}}, r"space.gate.k was \[1, 2, 4\], is \[1, 2\]"),
        ({"overrides": ["data=y"]}, "overrides.data was data=x, is data=y"),
        ({"seed": 1}, "seed was 0, is 1"),
    ],
)
def test_a_study_that_has_changed_is_refused(change: dict[str, Any], message: str, journal: str) -> None:
    worker(journal, 1)
    with pytest.raises(InputError, match=f"study s/g exists with other options: .*{message}"):
        worker(journal, 1, replace(SIMPLE, **change))


def test_a_study_of_an_earlier_mtl_is_refused(journal: str) -> None:
    study = worker(journal, 1).study
    study.set_user_attr("definition", study.user_attrs["definition"] | {"format": 1})
    with pytest.raises(InputError, match=r"format was 1, is 2\. .* or choose another name with name=NAME"):
        worker(journal, 1)


SERVER = "postgresql+psycopg://me:secret@127.0.0.1:1/x"
STORAGES = {"nonsense": "storage=nonsense: .*journal:FILE", SERVER: r"storage=.*//127.*1/x: .*start the same command"}
STORAGES |= {"sqlite:////proc/none/study.db": "study.db: .*unable to open", "journal:/proc/none/x": "storage=journal:"}


@pytest.mark.parametrize(("storage", "message"), STORAGES.items())
def test_a_storage_that_cannot_be_opened_is_one_message(storage: str, message: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("mtl.tune.storage.ATTEMPTS", 1)
    with pytest.raises(InputError, match=message) as caught:
        open_storage(storage, Path())
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("how", ["locked", "text", "cut", "schema"])
def test_a_locked_damaged_or_old_file_is_one_message_at_once(how: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("mtl.tune.storage.SQLITE_TIMEOUT_S", 0.5)
    address, file = f"sqlite:///{tmp_path}/study.db", tmp_path / "study.db"
    search = worker(address, 1)
    run(search)
    search.storage.remove_session()
    search.storage.engine.dispose()
    content, message = file.read_bytes(), "is damaged: put a copy of it back"
    holder = sqlite3.connect(file, isolation_level=None)
    if how == "locked":
        message = "database is locked; another program holds the file"
        holder.execute("BEGIN IMMEDIATE")
    elif how == "schema":
        message = "no longer compatible with the table schema .*; this can be done with a copy of the file"
        holder.execute("UPDATE alembic_version SET version_num = 'v2.6.0.a'")
    else:
        file.write_bytes(b"hello" * 1000 if how == "text" else content[: len(content) // 2])
    began = time.monotonic()
    with contextlib.closing(holder), pytest.raises(InputError, match=rf"^storage=.*/study.db: .*{message}"):
        use(address, tmp_path)
    assert time.monotonic() - began < 5


def use(address: str, folder: Path) -> None:
    with opened(address, folder):
        run(worker(address, 2))


def test_a_grid_goes_through_all_combinations_and_starts_again(journal: str) -> None:
    space = {"a": [1, 2, 3], "b": ["x", "y"]}
    grid = {"_target_": "mtl.tune.grid.GridSampler", "_partial_": True}
    search = worker(journal, 7, replace(SIMPLE, space=space, sampler=grid))
    run(search, do=one)
    found = [(trial.params["a"], trial.params["b"]) for trial in search.study.trials]
    assert found == [(1, "x"), (1, "y"), (2, "x"), (2, "y"), (3, "x"), (3, "y"), (1, "x")]
    other = worker(journal, 1, replace(SIMPLE, name="other", sampler=grid))
    with pytest.raises(InputError, match=r"sampler=grid: space: .* must be a list of values"):
        other.take()
