"""Share the trials of a study among any number of workers.

A worker that runs a trial holds its lease: an attribute of the trial that names the worker and is renewed every
``heartbeat`` seconds. When the lease of a running trial is stale, its worker is gone. Another worker then takes over
the lease and continues the same trial, which keeps its number, parameters, seed and folder and counts once. The clocks
of the machines must agree to within a few heartbeats.

Taking a waiting trial is one atomic operation of the storage. Taking over a lease is not: if two workers try at once,
the last one to write holds the lease. The other one notices this at its next heartbeat at the latest and stops its run.
Either way a result is stored only once.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import optuna
from optuna.storages import BaseStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial
from pydantic import Field, with_config
from typing_extensions import TypedDict

from mtl.checks import InputError, first_line, format_value, require
from mtl.config import build
from mtl.options import CONFIG, FilePath, LargeCountOrZero, Name, NonNegative, RunSeed, StrictModel, valid
from mtl.training.metrics import mode_of
from mtl.tune.definition import Definition, require_same
from mtl.tune.space import derived_seed, distributions, suggest

LEASE = "lease"
STALE = 4  # heartbeats after which a lease is stale


@dataclass(frozen=True)
class Outcome:
    """How a trial ended: with the ``value`` of the monitored metric, pruned, or failed with the message ``error``."""

    value: float | None = None
    pruned: bool = False
    error: str = ""


@with_config(CONFIG)
class Held(TypedDict):
    """The lease of a trial."""

    worker: str
    time: NonNegative


class StudyAttributes(StrictModel, extra="ignore"):
    """What mtl tune stores of a study."""

    definition: dict[str, Any] | None = None


class TrialAttributes(StrictModel, extra="ignore"):
    """What mtl tune stores of a trial, beside its parameters and its value."""

    starts: LargeCountOrZero = 0
    seed: RunSeed | None = None
    folder: FilePath = Path()
    command: Annotated[list[Name], Field(default_factory=list)]
    seconds: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    error: str = ""
    lease: Held | None = None


class Queue:
    """The trials of one study, as one worker sees them.

    ``n_trials``: the number of trials to finish in all, by any worker at any time.
    """

    def __init__(
        self,
        definition: Definition,
        storage: BaseStorage,
        monitor: str,
        n_trials: int,
        heartbeat: float,
        retries: int,
    ) -> None:
        self.definition, self.storage, self.monitor = definition, storage, monitor
        self.n_trials, self.heartbeat, self.retries = n_trials, heartbeat, retries
        self.worker = uuid.uuid4().hex
        self.sampler = build.build_part("sampler", definition.sampler)
        study_of(definition.name, storage)  # raises InputError for damage
        self.study = optuna.create_study(
            storage=storage,
            study_name=definition.name,
            direction="maximize" if mode_of(monitor) == "max" else "minimize",
            pruner=build.build_part("pruner", definition.pruner),
            load_if_exists=True,
        )
        self._study_id = storage.get_study_id_from_name(definition.name)
        now = definition.record(monitor)
        require_same(definition.name, self.study.user_attrs.get("definition", now), now)
        self.study.set_user_attr("definition", now)

    def take(self) -> Trial | None:
        """Return a trial to run, or None if none is free now; ask again until the study is ``finished``.

        Waiting trials and those whose worker is gone come before new ones. A trial has failed if its worker is gone and
        it was already restarted ``retries`` times.
        """
        trials, start = self.trials(), self.storage.set_trial_state_values
        try:
            for trial in trials[: self.n_trials]:
                number, state, starts = trial.number, trial.state, int(trial.user_attrs.get("starts", 0))
                if state == TrialState.RUNNING and self._is_stale(trial) and self._take_over(number):
                    if starts <= self.retries:
                        return self._begin(number, starts + 1)
                    self.finish(number, Outcome(error=f"its process or worker was killed {starts} times"))
                elif state == TrialState.WAITING and start(self._id(number), TrialState.RUNNING):
                    self.renew(number)
                    return self._begin(number, 1)
        except optuna.exceptions.UpdateFinishedTrialError:  # another worker has finished it
            return self.take()
        if len(trials) < self.n_trials:  # if several workers add one, the surplus waits until n_trials is raised
            self.study.add_trial(create_trial(state=TrialState.WAITING))
            return self.take()
        return None

    def finished(self) -> bool:
        """Return whether all ``n_trials`` trials have ended."""
        return sum(trial.state.is_finished() for trial in self.trials()[: self.n_trials]) == self.n_trials

    def running(self) -> int:
        """Return how many trials a worker runs now."""
        return sum(trial.state == TrialState.RUNNING and not self._is_stale(trial) for trial in self.trials())

    def finish(self, number: int, outcome: Outcome) -> None:
        """Store how trial ``number`` ended, unless another worker has done so."""
        state = TrialState.PRUNED if outcome.pruned else TrialState.COMPLETE
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            if outcome.error:
                state = TrialState.FAIL
                self.set(number, "error", outcome.error)
            self.study.tell(number, outcome.value, state, skip_if_finished=True)

    def release(self, number: int, counts: bool) -> None:
        """Give back an unfinished trial for any worker to continue at once, unless another worker has it already.

        ``counts``: whether this start counts towards ``retries``.
        """
        if self.holds(number):
            self.set(number, "starts", int(self.frozen(number).user_attrs["starts"]) - (not counts))
            self.set(number, LEASE, {"worker": "", "time": 0})

    def _begin(self, number: int, starts: int) -> Trial:
        self.set(number, "starts", starts)
        seed = derived_seed(self.definition.seed, self.definition.label, number, "parameters")
        self.study.sampler = self.sampler(seed=seed)  # so that draws do not depend on the worker
        begun = Trial(self.study, self._id(number))
        for name, distribution in distributions(self.definition.space).items():
            suggest(begun, name, distribution)
        return begun

    def training_seed(self, number: int) -> int:
        """Return the option ``seed`` of the run of trial ``number``.

        A study without a space repeats one setting: its trials have the seeds ``seed``, ``seed`` + 1, ..., so that the
        trials of several such studies can be compared in pairs.
        """
        if not self.definition.space:
            return self.definition.seed + number
        return derived_seed(self.definition.seed, self.definition.label, number, "training")

    def set(self, number: int, name: str, value: Any) -> None:
        """Store a user attribute of a trial that has not ended."""
        self.storage.set_trial_user_attr(self._id(number), name, value)

    def spend(self, number: int, seconds: float) -> None:
        """Add to the ``seconds`` that workers have spent on trial ``number``, unless another one has it already."""
        if self.holds(number):
            self.set(number, "seconds", self.frozen(number).user_attrs.get("seconds", 0.0) + seconds)

    def renew(self, number: int) -> None:
        """Write the lease of trial ``number`` anew, for this worker."""
        self.set(number, LEASE, {"worker": self.worker, "time": time.time()})

    def holds(self, number: int) -> bool:
        """Return whether this worker has the lease of trial ``number``."""
        return bool(self.frozen(number).user_attrs.get(LEASE, {}).get("worker") == self.worker)

    def frozen(self, number: int) -> FrozenTrial:
        """Return trial ``number`` as the storage has it now."""
        return self.storage.get_trial(self._id(number))

    def _id(self, number: int) -> int:
        return self.storage.get_trial_id_from_study_id_trial_number(self._study_id, number)

    def trials(self) -> list[FrozenTrial]:
        """Return all trials, including waiting ones."""
        return self.study.get_trials(deepcopy=False)

    def _is_stale(self, trial: FrozenTrial) -> bool:
        lease = trial.user_attrs.get(LEASE)
        if lease is None:  # its worker is about to write one, or was killed before it could
            begun = trial.datetime_start
            return begun is not None and abs((datetime.now() - begun).total_seconds()) > STALE * self.heartbeat
        return bool(time.time() - lease["time"] > STALE * self.heartbeat)

    def _take_over(self, number: int) -> bool:
        self.renew(number)
        time.sleep(min(1.0, self.heartbeat))  # meanwhile another worker may write its lease
        return self.holds(number)


class Lease:
    """A ``with`` block in which a thread renews the lease of trial ``number``.

    ``lost`` is called when another worker has taken the lease.
    """

    def __init__(self, queue: Queue, number: int, lost: Callable[[], None]) -> None:
        self.is_lost = False
        self._queue, self._number, self._lost = queue, number, lost
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> Lease:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _renew(self) -> None:
        while not self._over.wait(self._queue.heartbeat):
            with contextlib.suppress(Exception):  # an outage of the storage must not end hours of training
                if not self._queue.holds(self._number):
                    self.is_lost = True
                    self._lost()
                    return
                self._queue.renew(self._number)


def monitor_of(study: Study) -> str:
    """Return the metric of a study; InputError if mtl tune did not create it."""
    definition = study.user_attrs.get("definition")
    if not isinstance(definition, dict) or not isinstance(definition.get("monitor"), str):
        raise InputError(f"study {study.study_name}: its definition is missing: mtl tune did not create it")
    return str(definition["monitor"])


@contextlib.contextmanager
def undamaged(name: str) -> Iterator[None]:
    """Raise InputError if Optuna cannot read what the storage of study ``name`` holds: it checks no value."""
    try:
        yield
    except InputError:
        raise
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"study {name}: its storage is damaged ({reason}); put back a copy or begin anew") from error


def study_of(name: str, storage: BaseStorage) -> Study | None:
    """Return the study ``name``, None if the storage has none; InputError if mtl tune did not write what it holds."""
    with undamaged(name):
        if name not in optuna.get_all_study_names(storage):
            return None
        study = optuna.load_study(study_name=name, storage=storage)
        _ = study.direction
        valid(StudyAttributes, study.user_attrs, f"study {name}")
        for trial in study.get_trials(deepcopy=False):
            location = f"study {name}, trial {trial.number}"
            valid(TrialAttributes, trial.user_attrs, location)
            valid(dict[str, Any], trial.system_attrs, f"{location}: system_attrs")
            valid(int, trial.number, f"study {name}: number of a trial")
            value = trial.value
            is_known = isinstance(value, float) or (value is None and trial.state != TrialState.COMPLETE)
            require(is_known, f"{location}: its value is {format_value(value)}, not a number")
        return study
