"""The trials of a study as jobs: Optuna proposes their parameters, prunes them, and stores their values.

Taking a waiting trial is one atomic operation of the storage, so that workers with disks of their own share a study. A
running trial goes on only where its folder is, by a worker that gets its lock. Its number in the study determines its
parameters, training seed and folder; it counts once, however often it is started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import optuna
from optuna.storages import BaseStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from mtl.checks import InputError, first_line
from mtl.config import build
from mtl.jobs.job import RECORD, Job, JobResult
from mtl.jobs.setting import derived_seed, require_same
from mtl.jobs.work import JobList
from mtl.training.metrics import mode_of
from mtl.tune.definition import Definition
from mtl.tune.space import distributions, short, suggest, write_overrides


@dataclass(kw_only=True)
class Search(JobList):
    """The trials of one study, as one worker sees them."""

    setting: Definition
    storage: BaseStorage

    def __post_init__(self) -> None:
        """Create the study, unless it is there. Raises InputError if it has another definition, or is damaged."""
        self._sampler = build.build_part("sampler", self.setting.sampler)
        study_of(self.setting.name, self.storage)
        self.study = optuna.create_study(
            storage=self.storage,
            study_name=self.setting.name,
            direction="maximize" if mode_of(self.monitor) == "max" else "minimize",
            pruner=build.build_part("pruner", self.setting.pruner),
            load_if_exists=True,
        )
        self._study_id = self.storage.get_study_id_from_name(self.setting.name)
        self._begun: dict[int, Trial] = {}  # by this worker, by number
        now = self.setting.record(self.monitor)
        require_same(f"study {self.setting.name}", self.study.user_attrs.get("definition", now), now)
        self.study.set_user_attr("definition", now)

    def trials(self) -> list[FrozenTrial]:
        """Return all trials, including waiting ones."""
        return self.study.get_trials(deepcopy=False)

    def ended(self) -> Mapping[int, JobResult]:
        return {
            trial.number: JobResult(
                trial.value if trial.state == TrialState.COMPLETE else None,
                trial.state == TrialState.PRUNED,
                trial.user_attrs.get("error", ""),
                trial.user_attrs.get("seconds", 0.0),
            )
            for trial in self.trials()[: self.count]
            if trial.state.is_finished()
        }

    def overrides(self, number: int) -> list[str]:
        """Return the overrides that all trials share; references stand for first runs."""
        return super().overrides(0)

    def begin(self, job: Job) -> bool:
        """Let the study run a trial, unless a worker on another disk has it, and complete its job."""
        while len(self.trials()) <= job.number:
            self.study.add_trial(create_trial(state=TrialState.WAITING))  # a surplus waits until ``count`` is raised
        state, here = self.trials()[job.number].state, bool(job.record())
        if state == TrialState.WAITING:
            job.note(starts=0, fitted=False, pruned=False)  # before it runs: only where there is a record it goes on
            here = False
            with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
                here = self.storage.set_trial_state_values(self._id(job.number), TrialState.RUNNING)
            if not here:  # another worker was faster
                (job.folder / RECORD).unlink()
        if state.is_finished() or not here:
            return False
        seeds = (self.seed, self.setting.label, job.number)
        self.study.sampler = self._sampler(seed=derived_seed(*seeds, "parameters"))  # for the same draws by any worker
        trial = self._begun[job.number] = Trial(self.study, self._id(job.number))
        for name, distribution in distributions(self.setting.space).items():
            suggest(trial, name, distribution)
        seed = derived_seed(*seeds, "training")
        job.overrides = [*self.overrides(job.number), *write_overrides({**trial.params, "seed": seed})]
        job.text = short(trial.params)
        for attribute, value in (("folder", str(job.folder)), ("command", job.overrides), ("seed", seed)):
            trial.set_user_attr(attribute, value)
        return True

    def prune(self, job: Job, epoch: int, value: float) -> bool:
        """Store the ``value`` after ``epoch``, and return whether the study prunes the trial."""
        trial = self._begun[job.number]
        if epoch not in self.trials()[job.number].intermediate_values:  # an epoch may be trained twice
            trial.report(value, epoch)
        return trial.should_prune()

    def finish(self, job: Job, result: JobResult) -> None:
        trial, state = self._begun[job.number], TrialState.PRUNED if result.pruned else TrialState.COMPLETE
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            trial.set_user_attr("seconds", job.record().get("seconds", 0.0))
            if result.error:
                state = TrialState.FAIL
                trial.set_user_attr("error", result.error)
            self.study.tell(trial, result.value, state, skip_if_finished=True)

    def _id(self, number: int) -> int:
        return self.storage.get_trial_id_from_study_id_trial_number(self._study_id, number)


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
    """Return the study ``name``, None if the storage has none."""
    with undamaged(name):
        if name not in optuna.get_all_study_names(storage):
            return None
        study = optuna.load_study(study_name=name, storage=storage)
        _ = study.direction, study.user_attrs, study.get_trials(deepcopy=False)
        return study
