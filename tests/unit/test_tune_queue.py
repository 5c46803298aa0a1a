"""Who runs which trial: workers that share a study, die, come back, and fail, with an objective that only computes."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import Trial, TrialState

from mtl.checks import InputError
from mtl.tune.definition import Definition
from mtl.tune.queue import STALE, Lease, Outcome, Queue
from mtl.tune.storage import open_storage, reached
from mtl.tune.trials import read_study
from mtl.tune.work import work

HEARTBEAT = 2.0  # seconds; a slow machine must not lose a lease by accident
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


def worker(address: str, n_trials: int, definition: Definition = SIMPLE, **options: Any) -> Queue:
    """Return the queue of a worker of its own, with its own connection."""
    values = {"monitor": "val/loss", "heartbeat": HEARTBEAT, "retries": 2} | options
    return Queue(definition, open_storage(address, Path()), n_trials=n_trials, **values)


def objective(queue: Queue, trial: Trial) -> Outcome:
    return Outcome(value=abs(math.log10(trial.params["optimizer.lr"]) + 2) + trial.params["gate.k"])


def run(*queues: Queue, launch: Any = objective, max_failures: int | None = None) -> list[str]:
    said: list[str] = []
    work(queues, launch, max_failures, said.append)
    return said


def states(queue: Queue) -> list[str]:
    return [trial.state.name for trial in queue.study.trials]


def old(queue: Queue, number: int) -> None:
    """Let the lease of a trial be that of a worker that gave its last sign of life long ago."""
    queue.set(number, "lease", {"worker": "gone", "time": 0})


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        (
            "trial_user_attributes set value_json = '5' where key = 'command'",
            r"trial 0\.command=5: must be a",
        ),
        ("trial_user_attributes set value_json = '[\"a\\u0000\"]' where key = 'command'", r"trial 0\.command\[0\]="),
        ("trial_user_attributes set value_json = '{\"time\": \"x\"}' where key = 'lease'", r"lease\.time=x: must be"),
        ("trial_user_attributes set value_json = 'no JSON'", "its storage is damaged"),
        ("study_user_attributes set value_json = '[]'", r"definition=\[\]: must be a valid dict"),
        ("trial_params set distribution_json = '[]'", "its storage is damaged"),
        ("trial_values set value = 'x'", "trial 0: its value is x, not a number"),
        ("trials set number = 'x'", "number of a trial=x: must be"),
        ("study_directions set direction = 'X'", "its storage is damaged"),
    ],
)
def test_what_a_study_cannot_hold_is_one_message(forged: str, reason: str, tmp_path: Path) -> None:
    queue = worker(f"sqlite:///{tmp_path}/study.db", 1)
    run(queue, launch=lambda queue, trial: queue.set(trial.number, "command", ["a=1"]) or objective(queue, trial))
    with contextlib.closing(sqlite3.connect(tmp_path / "study.db")) as database, database:
        database.execute(f"update {forged}")
    for read in (lambda: worker(f"sqlite:///{tmp_path}/study.db", 1), lambda: read_study("s", None, tmp_path)):
        with pytest.raises(InputError, match=f"study s.*{reason}"):
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
    one, other, said = worker(journal, 4), worker(journal, 4), list[str]()

    def launch(queue: Queue, trial: Trial) -> Outcome:
        queue.set(trial.number, "seconds", 600.0)
        if trial.number == 1:
            other.take()
        elif trial.number == 3:
            other.set(2, "seconds", 600.0)
            other.finish(2, Outcome(value=1.0))
        return Outcome(error="no memory") if trial.number == 0 else objective(queue, trial)

    work([one], launch, None, said.append, later=2)
    ends = [line.partition("; about ")[2] for line in said if " s)" in line]
    assert ends == ["", "20 minutes left (4 runs)", "20 minutes left (2 runs)"]
    more = worker(journal, 5)
    work([more], launch, None, said.append, later=None)  # what follows is not known
    assert "left" not in said[-1]


def test_random_search_depends_on_the_number_of_the_trial_alone(journal: str, tmp_path: Path) -> None:
    whole = worker(f"journal:{tmp_path}/whole.log", 4)
    run(whole)
    one, two = worker(journal, 4), worker(journal, 4)
    taken = [one.take(), two.take(), two.take(), one.take()]
    for trial in reversed(taken):
        assert trial is not None
        assert trial.params == whole.study.trials[trial.number].params
    assert [trial.number for trial in taken if trial] == [0, 1, 2, 3]
    assert one.take() is None
    assert len({tuple(trial.params.values()) for trial in whole.study.trials}) == 4
    seeds = [one.training_seed(number) for number in range(4)]
    assert seeds == [whole.training_seed(number) for number in range(4)]
    other = worker(journal, 4, replace(SIMPLE, name="s/h", label="h"))
    assert len({*seeds, *(other.training_seed(number) for number in range(4))}) == 8


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


def test_the_trial_of_a_dead_worker_goes_on_as_the_same_trial(address: str) -> None:
    dead, alive = worker(address, 2), worker(address, 2)
    lost = dead.take()
    assert lost is not None
    before = dict(lost.params)
    assert alive.take().number == 1  # type: ignore[union-attr]
    assert alive.take() is None  # the other one's lease is fresh
    old(dead, 0)
    again = alive.take()
    assert again is not None
    assert (again.number, again.params, again.user_attrs["starts"]) == (0, before, 2)
    assert not dead.holds(0)
    alive.finish(0, Outcome(value=1.0))
    dead.finish(0, Outcome(value=2.0))  # it was not dead, but its result comes too late
    assert alive.study.trials[0].value == 1.0
    alive.finish(1, Outcome(value=1.0))
    assert alive.finished()
    assert len(alive.study.trials) == 2


def test_a_lease_is_renewed_and_its_loss_is_noticed(journal: str) -> None:
    one, two, lost = worker(journal, 1, heartbeat=0.4), worker(journal, 1, heartbeat=0.4), threading.Event()
    assert one.take() is not None
    with Lease(one, 0, lost.set) as lease:
        assert not lost.wait(STALE * one.heartbeat * 1.5)
        assert two.take() is None
        two.renew(0)
        assert lost.wait(5)
        assert lease.is_lost


@pytest.mark.parametrize(
    ("outcomes", "ended", "errors"),  # by number of the trial; None: its process was killed
    [
        ([Outcome(1.0), Outcome(pruned=True)], ["COMPLETE", "PRUNED"], [None, None]),
        ([Outcome(error="no memory"), Outcome(1.0)], ["FAIL", "COMPLETE"], ["no memory", None]),
        ([None, Outcome(1.0)], ["FAIL", "COMPLETE"], ["its process or worker was killed 3 times", None]),
    ],
)
def test_how_trials_end(outcomes: list[Outcome | None], ended: list[str], errors: list[Any], journal: str) -> None:
    starts = []

    def launch(queue: Queue, trial: Trial) -> Outcome | None:
        starts.append(trial.number)
        return outcomes[trial.number]

    queue = worker(journal, 2, heartbeat=0.2)
    run(queue, launch=launch)
    assert states(queue) == ended
    assert [trial.user_attrs.get("error") for trial in queue.study.trials] == errors
    assert starts == [0] * (3 if outcomes[0] is None else 1) + [1]


def test_a_stopped_worker_gives_its_trial_back_at_once(journal: str) -> None:
    def stopped(queue: Queue, trial: Trial) -> Outcome:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(worker(journal, 1), launch=stopped)
    queue = worker(journal, 1, heartbeat=0.2)
    run(queue)
    assert states(queue) == ["COMPLETE"]
    assert queue.study.trials[0].user_attrs["starts"] == 1


def test_failed_trials_in_a_row_end_the_worker(journal: str) -> None:
    def failing(queue: Queue, trial: Trial) -> Outcome:
        return Outcome(error="out of memory") if trial.number % 3 else objective(queue, trial)

    run(worker(journal, 4), launch=failing, max_failures=3)
    queue = worker(journal, 9)
    with pytest.raises(InputError, match="2 trials in a row failed, the last one with: out of memory"):
        run(queue, launch=failing, max_failures=2)
    assert states(queue) == ["COMPLETE", "FAIL", "FAIL", "COMPLETE", "FAIL", "FAIL"]


def test_workers_at_once_neither_lose_nor_double_a_trial(address: str) -> None:
    ran, queues = [], [worker(address, 6, heartbeat=1.0) for _ in range(3)]

    def launch(queue: Queue, trial: Trial) -> Outcome:
        ran.append(trial.number)
        return objective(queue, trial)

    threads = [threading.Thread(target=run, args=(queue,), kwargs={"launch": launch}) for queue in queues[1:]]
    for thread in threads:
        thread.start()
    run(queues[0], launch=launch)
    for thread in threads:
        thread.join()
    assert sorted(ran) == list(range(6))
    assert states(queues[0])[:6] == ["COMPLETE"] * 6
    assert all(trial.state == TrialState.WAITING for trial in queues[0].study.trials[6:])


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
    monkeypatch.setattr("mtl.tune.storage.PATIENCE", 0.5)
    address, file = f"sqlite:///{tmp_path}/study.db", tmp_path / "study.db"
    queue = worker(address, 1)
    run(queue)
    queue.storage.remove_session()
    queue.storage.engine.dispose()
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
    with reached(address, folder):
        run(worker(address, 2))


def test_a_grid_goes_through_all_combinations_and_starts_again(journal: str) -> None:
    space = {"a": [1, 2, 3], "b": ["x", "y"]}
    grid = {"_target_": "mtl.tune.grid.GridSampler", "_partial_": True}
    queue = worker(journal, 7, replace(SIMPLE, space=space, sampler=grid))
    run(queue, launch=lambda queue, trial: Outcome(1.0))
    found = [(trial.params["a"], trial.params["b"]) for trial in queue.study.trials]
    assert found == [(1, "x"), (1, "y"), (2, "x"), (2, "y"), (3, "x"), (3, "y"), (1, "x")]
    other = worker(journal, 1, replace(SIMPLE, name="other", sampler=grid))
    with pytest.raises(InputError, match=r"sampler=grid: space: .* must be a list of values"):
        other.take()


def test_trials_of_a_study_without_a_space_repeat_it_with_the_next_seeds(journal: str) -> None:
    queues = [worker(journal, 3, replace(SIMPLE, name=name, space={}, seed=5)) for name in ("one", "two")]
    said = run(*queues, launch=lambda queue, trial: Outcome(1.0))
    assert [queues[0].training_seed(number) for number in range(3)] == [5, 6, 7]
    begun = [line for line in said if ":" not in line]
    assert begun == [f"{name} trial {number}" for number in range(3) for name in ("one", "two")]  # in turn
