"""How often ``mtl share`` finds the true groups of simulated pairs: ``python benchmarks/share_pairs.py FOLDER 1 20``.

FOLDER for the runs, then the relatedness rho within a pair and the number of problems, each with tasks and rows of its
own (``data.seed``); further words are those of ``mtl share``, as in ``data.num_pairs=4 seeds=8``. Started again, it
goes on. Runs are trained in this process, since starting one would take longer than its training. Prints a line for
each problem.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
import torch
from optuna.trial import Trial

from mtl.cli.share import OWN
from mtl.config.check import checked_run
from mtl.config.compose import CONF, split_overrides
from mtl.files.records import RESULTS, read_json
from mtl.files.writing import write_json
from mtl.overrides import quote_path
from mtl.pipeline.run import run
from mtl.sharing.command import share
from mtl.sharing.page import write
from mtl.tune.launch import Launch, run_folder
from mtl.tune.queue import Outcome, Queue

# Linear tasks with noise and few rows, trained until the validation loss rises: what a task gains from another one is
# then what it can learn from the other's rows
PROBLEM = (
    *("data=synthetic_pairs", "data.num_pairs=2", "data.rows=[500,500,1000]", "data.input_dim=32", "data.num_sines=0"),
    *("data.noise=0.5", "recipe.batch_size=250", "recipe.learning_rate=1e-2", "recipe.max_epochs=60"),
    *("recipe.patience=6", "logger=none"),
)


def in_process(folder: Path) -> Launch:
    """Return what trains the run of a trial here."""

    def launch(queue: Queue, trial: Trial) -> Outcome:
        run_dir = run_folder(folder, queue.definition.label, trial.number)
        if not (run_dir / RESULTS).exists():
            shutil.rmtree(run_dir, ignore_errors=True)
            overrides = [*queue.definition.overrides, f"seed={queue.training_seed(trial.number)}"]
            cfg = checked_run([*overrides, f"paths.run_dir={quote_path(run_dir)}"])
            cfg.paths.run_dir = str(run_dir)
            run(cfg)
            choices = {name: str(value) for name, value in cfg.choices.items()}
            write_json(run_dir / "command.json", {"overrides": overrides, "choices": choices, "seed": cfg.seed})
        return Outcome(value=read_json(run_dir / RESULTS)["best"])

    return launch


def solve(folder: Path, rho: str, number: int, options: Sequence[str]) -> str:
    """Return the line of one problem."""
    overrides = [f"name=rho{rho}_{number}", "gates=[]", "every_n_steps=10", *PROBLEM, f"data.rho={rho}"]
    overrides += [f"data.seed={100 + number}", f"paths.output_dir={quote_path(folder)}", *options]
    of_share, of_runs = split_overrides(overrides, OWN)
    with contextlib.redirect_stdout(io.StringIO()):
        content = write(share(hydra.compose("share", of_share), of_runs, in_process), [*of_share, *of_runs])
    pairs = {name.rpartition("_")[0] for name in content["answers"]}
    true = [[f"{pair}_0", f"{pair}_1"] for pair in sorted(pairs)]
    shares = sum(line.startswith(f"{task}: better") for task, line in content["answers"].items())
    groups = " | ".join(" + ".join(group) for group in content["groups"])
    chosen = content["recommended"]["setting"]
    predicted, measured = content["predicted_gain"], content["delta_m"].get("groups", [])
    gained = f"{sum(measured) / len(measured):+.2f}" if measured else "-"
    correct = sorted(map(sorted, content["groups"])) == true
    return f"{rho},{number},{correct},{chosen},{shares},{predicted:.4f},{gained},{groups}"


def main() -> None:
    """Solve the problems."""
    torch.set_num_threads(1)
    folder, rho, count, *options = sys.argv[1:]
    print("rho,problem,true groups,recommended,tasks told to share,predicted affinity %,delta-m of the groups %,groups")
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        for number in range(int(count)):
            print(solve(Path(folder).absolute(), rho, number, options), flush=True)


if __name__ == "__main__":
    main()
