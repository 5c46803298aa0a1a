"""Compare weightings of tasks on MovieLens and Multi-MNIST: train what is missing, or print the table as Markdown.

python benchmarks/weighting_study.py run FOLDER [NAME=VALUE ...] trains 48 small networks one after the other, and skips
those that have results; words at the end replace options of all runs. python benchmarks/weighting_study.py table FOLDER
prints, for the runs that are done, means and standard errors over seeds and the differences to ``fixed`` by seed.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from mtl.report.statistics import summarise

ROOT = Path(__file__).resolve().parent.parent
WEIGHTINGS = ("fixed", "uncertainty", "upgrad", "pcgrad")
NETWORKS = {"mmoe": "network=mmoe gate=comet", "shared_bottom": "network=shared_bottom"}
SEEDS = range(3)
DATA = {  # smaller than the published settings, so that all runs take about an hour of one core
    "movielens": "data=movielens data.variant=1m recipe.num_experts=8 recipe.embedding_dim=32"
    " recipe.expert_units=[64] recipe.head_units=[64] recipe.dropout=0.2 recipe.batch_size=2048"
    " recipe.learning_rate=3e-3"
    " recipe.max_epochs=2 +trainer.limit_train_batches=390",
    "multi_mnist": "data=multi_mnist data.rows=[10000,2000,4000] recipe.num_experts=4 recipe.k=2"
    " recipe.batch_size=128 recipe.max_epochs=3",
}
METRICS = {"movielens": ("watch/auroc", "rating/mse"), "multi_mnist": ("top_left/accuracy", "bottom_right/accuracy")}
Results = dict[tuple[str, str, str, int], dict[str, Any]]


def runs() -> list[tuple[str, str, str, int]]:
    """Return (data, network, weighting, seed) of all runs, whole seeds first."""
    return [(d, n, w, s) for s, d, n, w in itertools.product(SEEDS, DATA, NETWORKS, WEIGHTINGS)]


def name(data: str, network: str, weighting: str, seed: int) -> str:
    return f"{data}_{network}_{weighting}_s{seed}"


def train(folder: Path, words: list[str]) -> None:
    for data, network, weighting, seed in runs():
        own = folder.resolve() / name(data, network, weighting, seed)
        if (own / "results.json").is_file():
            continue
        options = (
            f"{DATA[data]} {NETWORKS[network]} weighting={weighting} seed={seed} logger=csv callbacks.progress=null"
        )
        command = [sys.executable, "train.py", *options.split(), f"hydra.run.dir={own}", *words]
        with Path(f"{own}.log").open("w") as log:
            code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log).returncode
        print(f"{own.name}: {'done' if code == 0 else f'failed with status {code}, see {own}.log'}", flush=True)


def table(folder: Path) -> str:
    found: Results = {}
    for run in runs():
        file = folder / name(*run) / "results.json"
        if file.is_file():
            found[run] = json.loads(file.read_text())["test"]
    lines = []
    for data, metrics in METRICS.items():
        columns = [text for metric in metrics for text in (metric, "to fixed")]
        lines += [f"| {data} | weighting | runs | " + " | ".join(columns) + " |", "|" + "---|" * (3 + len(columns))]
        for network, weighting in itertools.product(NETWORKS, WEIGHTINGS):
            seeds = [seed for seed in SEEDS if (data, network, weighting, seed) in found]
            cells = []
            for metric in metrics:
                values = {seed: found[data, network, weighting, seed][metric] for seed in seeds}
                pairs = [s for s in seeds if weighting != "fixed" and (data, network, "fixed", s) in found]
                apart = [values[s] - found[data, network, "fixed", s][metric] for s in pairs]
                cells += [shown(list(values.values()), ".4f"), shown(apart, "+.4f")]
            lines.append(f"| {network} | {weighting} | {len(seeds)} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def shown(values: list[float], form: str) -> str:
    """Return the mean and its standard error."""
    found = summarise(values)
    if found.mean is None:
        return "-"
    return f"{found.mean:{form}}" + (f" ± {found.error:.4f}" if found.error is not None else "")


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in ("run", "table"):
        sys.exit(__doc__)
    if sys.argv[1] == "run":
        train(Path(sys.argv[2]), sys.argv[3:])
    else:
        print(table(Path(sys.argv[2])))
