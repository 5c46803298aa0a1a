"""A worker of a study whose trials only compute: ``python -m tests.tune_worker STORAGE N_TRIALS FOLDER``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from optuna.trial import Trial

from mtl.tune.queue import Outcome, Queue
from mtl.tune.storage import open_storage
from mtl.tune.work import work
from tests.unit.test_tune_queue import SIMPLE, objective


def main(address: str, n_trials: str, folder: str) -> None:
    """Write the number of each trial that this process runs into a file of its own."""
    ran = Path(folder) / f"{os.getpid()}.txt"

    def launch(queue: Queue, trial: Trial) -> Outcome:
        with ran.open("a") as file:
            file.write(f"{trial.number}\n")
        time.sleep(0.05)
        return objective(queue, trial)

    storage = open_storage(address, Path())
    queue = Queue(SIMPLE, storage, "val/loss", int(n_trials), heartbeat=5, retries=0)
    work([queue], launch, None, print)


if __name__ == "__main__":
    main(*sys.argv[1:])
