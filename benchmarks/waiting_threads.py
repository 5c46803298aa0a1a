"""Time training with one thread, and with threads that spin while they wait, spin shortly (``import mtl``) or sleep.

OpenMP reads the setting when torch is loaded, so each measurement is a process of its own; the contenders take turns.
``python benchmarks/waiting_threads.py data=table --busy 0,2,3`` prints the median seconds of an epoch beside so many
busy processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from mtl import compat

ROOT = Path(__file__).resolve().parent.parent
TRAIN = "import sys; from mtl.cli.main import main; main(['train', *sys.argv[1:]])"
CONTENDERS: dict[str, tuple[str, dict[str, str], str]] = {  # program, environment, number of threads
    "spinning": ("import torch; " + TRAIN, {}, "null"),  # torch is loaded before mtl could set anything
    "short spin": (TRAIN, {}, "null"),
    "asleep": (TRAIN, {"OMP_WAIT_POLICY": "PASSIVE"}, "null"),
    "one thread": (TRAIN, {}, "1"),
}


def seconds_of(program: str, variables: dict[str, str], options: list[str]) -> tuple[float, float]:
    """Train in a new process; return the seconds of an epoch and the validation loss."""
    unset = (*compat.WAITING, "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in unset} | variables
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", program, *options, f"hydra.run.dir={folder}/run"]
        subprocess.run(command, check=True, cwd=ROOT, env=environment, capture_output=True)
        results = json.loads(Path(folder, "run", "results.json").read_text())
    return results["seconds_per_epoch"], results["numbers"]["val"]["network"]["loss"]


def main() -> None:
    """Print a table: a row for each number of busy processes, a column for each contender."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("options", nargs="*", help="of mtl train, such as data=table trainer.max_epochs=3")
    parser.add_argument("--busy", default="0", help="numbers of busy processes beside the training")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print("| busy processes | " + " | ".join(CONTENDERS) + " | losses |\n|" + "--:|" * (len(CONTENDERS) + 2))
    for busy in map(int, arguments.busy.split(",")):
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
        try:
            measured = [
                {
                    name: seconds_of(program, variables, [*arguments.options, f"threads={threads}"])
                    for name, (program, variables, threads) in CONTENDERS.items()
                }
                for _ in range(arguments.rounds)
            ]
        finally:
            for process in others:
                process.kill()
        cells = []
        for name in CONTENDERS:
            seconds = [each_round[name][0] for each_round in measured]
            cells.append(f"{statistics.median(seconds):.3g} ({min(seconds):.3g} to {max(seconds):.3g})")
        losses = sorted({loss for each_round in measured for _, loss in each_round.values()})
        print(f"| {busy} | " + " | ".join(cells) + f" | {', '.join(map(repr, losses))} |", flush=True)


if __name__ == "__main__":
    main()
