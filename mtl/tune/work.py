"""Work on studies until all of their trials have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean

from optuna.trial import Trial, TrialState

from mtl.checks import InputError
from mtl.files.formatting import duration, number
from mtl.tune.launch import Launch
from mtl.tune.queue import Queue
from mtl.tune.space import short


def work(
    queues: Sequence[Queue],
    launch: Launch,
    max_failures: int | None,
    say: Callable[[str], None],
    later: int | None = 0,
) -> None:
    """Run trials of ``queues`` until all have ended, always from the queue with the fewest trials.

    All queues then have about equally many trials if the work is interrupted. Waits while other workers run the last
    trials, since one of them might be killed. Raises InputError after ``max_failures`` failed trials in a row.

    ``later``: the number of runs that follow these, which count for the time left; None: unknown, so no time is said.
    """
    failures, waiting = 0, False
    while not all(queue.finished() for queue in queues):
        in_turn = sorted(queues, key=lambda queue: len(queue.trials()))  # a stable sort: the first queue wins a tie
        taken = next(((queue, trial) for queue in in_turn if (trial := queue.take())), None)
        if taken is None:
            if not waiting:
                say("waiting for the trials of other workers; Ctrl-C leaves them alone")
            waiting = True
            time.sleep(min(queue.heartbeat for queue in queues))
            continue
        waiting, error = False, _run_trial(*taken, launch, say, lambda: "" if later is None else _left(queues, later))
        failures = failures + 1 if error else 0
        if max_failures and failures >= max_failures:
            raise InputError(
                f"{failures} trials in a row failed, the last one with: {error}. "
                "Correct this, or set max_failures=null, and start the same command again"
            )


def _run_trial(queue: Queue, trial: Trial, launch: Launch, say: Callable[[str], None], left: Callable[[], str]) -> str:
    """Run one trial and, if it ended, store its outcome; return its error, "" if there is none.

    ``left`` returns the end of the last line.
    """
    began, name = time.monotonic(), f"{queue.definition.name} trial {trial.number}"
    again = " again" if trial.user_attrs["starts"] > 1 else ""
    say(f"{name}{again}" + (f": {short(trial.params)}" if trial.params else ""))
    try:
        outcome = launch(queue, trial)
    except BaseException:
        queue.spend(trial.number, time.monotonic() - began)
        queue.release(trial.number, counts=False)
        raise
    queue.spend(trial.number, time.monotonic() - began)
    if outcome is None:
        queue.release(trial.number, counts=True)
        say(f"{name}: its process was killed, or another worker has it")
        return ""
    queue.finish(trial.number, outcome)
    value = "pruned" if outcome.pruned else number(outcome.value, 6)
    result = f"failed: {outcome.error}" if outcome.error else value
    say(f"{name}: {result} ({time.monotonic() - began:.0f} s){_best(queue)}{left()}")
    return outcome.error


def _best(queue: Queue) -> str:
    """Return the best value so far and its trial as the end of a line; "" if no trial has completed."""
    try:
        best = queue.study.best_trial
    except ValueError:
        return ""
    done = sum(trial.state.is_finished() for trial in queue.trials())
    return f"; {done} of {queue.n_trials} done, best {number(best.value, 6)} (trial {best.number})"


def _left(queues: Sequence[Queue], later: int) -> str:
    """Return how long the runs take that are left, as the end of a line; "" if there are none, or none has succeeded.

    They are assumed to take as long as those that have ended, on average, and to be shared by all workers.
    """
    ended = [trial for queue in queues for trial in queue.trials()[: queue.n_trials] if trial.state.is_finished()]
    seconds = [trial.user_attrs.get("seconds", 0.0) for trial in ended if trial.state != TrialState.FAIL]
    runs = sum(queue.n_trials for queue in queues) - len(ended) + later
    if not runs or not seconds:
        return ""
    workers = 1 + sum(queue.running() for queue in queues)
    return f"; about {duration(runs * fmean(seconds) / workers)} left ({runs} run{'s' * (runs > 1)})"
