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

from mtl.cli.share import OWN
from mtl.config.check import checked_run
from mtl.config.compose import CONF, split_overrides
from mtl.files.run_files import CHECKPOINTS, COMMAND
from mtl.files.writing import write_json
from mtl.jobs.job import Job, JobResult, Prune
from mtl.overrides import quote_path
from mtl.pipeline.run import run
from mtl.sharing.command import share
from mtl.sharing.page import write

# Linear tasks with noise and few rows, trained until the validation loss rises: what a task gains from another one is
# then what it can learn from the other's rows
PROBLEM = (
    *("data=synthetic_pairs", "data.num_pairs=2", "data.rows=[500,500,1000]", "data.input_dim=32", "data.num_sines=0"),
    *("data.noise=0.5", "recipe.batch_size=250", "recipe.learning_rate=1e-2", "recipe.max_epochs=60"),
    *("recipe.patience=6", "logger=none"),
)


def in_process(job: Job, prune: Prune) -> JobResult | None:
    """Train the run of a job here, from its beginning."""
    if job.result() is None:
        shutil.rmtree(job.folder / CHECKPOINTS, ignore_errors=True)
        cfg = checked_run([*job.overrides, f"paths.run_dir={quote_path(job.folder)}"])
        cfg.paths.run_dir = str(job.folder)
        run(cfg)
        choices = {name: str(value) for name, value in cfg.choices.items()}
        write_json(job.folder / COMMAND, {"overrides": list(job.overrides), "choices": choices, "seed": cfg.seed})
    return job.result()


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
